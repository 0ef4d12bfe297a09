"""Real models: the embedded demo model and, where it is at hand, stories260K with its published output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.workbench.demo import DEFAULT_PROMPT, MODEL_DIR
from tests.engine.harness import Engine, reference_logits

STEPS = 33  # the prefill and 32 decode steps
TOLERANCE = 1e-4
STORIES = Path(__file__).parents[3] / "shared" / "data" / "stories260K"

#: llama2.c's own continuation of "Once upon a time", and its highest logits at the last prompt position.
PROMPT = [1, 403, 407, 261, 378]
CONTINUATION = [432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338, 401, 396, 267,
                337, 410, 408, 419, 292, 411, 322, 265, 282, 295, 433, 426, 385, 328, 432]  # fmt: skip
TOP = {432: 17.7994, 383: 14.2813, 322: 9.7097, 353: 9.5873, 323: 9.1342}


@pytest.fixture(scope="module")
def demo() -> tuple[list[int], torch.Tensor, list[int]]:
    """Prompt, logits and greedy tokens of the demo model in transformers, float32."""
    if not (MODEL_DIR / "config.json").is_file():
        pytest.skip(f"the demo model is not there: {MODEL_DIR}")
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": DEFAULT_PROMPT}], add_generation_prompt=True, return_dict=False
    )
    return ids, *reference_logits(model.eval(), ids, STEPS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tp", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_demo_model_matches_transformers(
    tp: int, engine_of: Callable[[int], Engine], demo: tuple[list[int], torch.Tensor, list[int]]
) -> None:
    ids, golden, tokens = demo
    engine = engine_of(tp)
    engine.load(MODEL_DIR)
    engine.capture("logits")
    passes = engine.generate([ids], STEPS)
    assert [one.token() for one in passes] == tokens
    assert np.abs(np.stack([one.logits() for one in passes]) - golden.numpy()).max() <= TOLERANCE


@pytest.mark.skipif(not STORIES.is_dir(), reason="stories260K is not beside the repository (shared/data)")
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_stories_come_out_as_published(tp: int, engine_of: Callable[[int], Engine]) -> None:
    engine = engine_of(tp)
    engine.load(STORIES)
    engine.capture("logits")
    passes = engine.generate([PROMPT], 30)
    assert [one.token() for one in passes] == CONTINUATION
    first = passes[0].logits()
    assert np.argsort(-first)[:5].tolist() == list(TOP)
    assert first[list(TOP)] == pytest.approx(list(TOP.values()), abs=1e-4)
