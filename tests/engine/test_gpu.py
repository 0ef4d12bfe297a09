"""The engine on a GPU: the same logits and tokens as transformers there, also with more ranks than GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import VARIANTS, tiny_model
from tests.engine.harness import Engine, reference_logits
from tests.engine.test_logits import PROMPT, RAGGED, TOLERANCE

pytestmark = pytest.mark.gpu
STEPS = 9


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "llama-llama3", "mistral-window"])
def test_logits_match_transformers(name: str, tp: int, variant: Callable[[str], Path]) -> None:
    family, overrides = VARIANTS[name]
    engine = Engine(tp, device="cuda")
    try:
        engine.load(variant(name))
        engine.capture("logits", statistics=True)
        passes = engine.generate([PROMPT], STEPS)
    finally:
        engine.close()
    model = tiny_model(family, **overrides, attn_implementation="eager")
    golden, tokens = reference_logits(model, PROMPT, STEPS)
    assert [one.token() for one in passes] == tokens
    assert np.abs(np.stack([one.logits() for one in passes]) - golden.numpy()).max() <= TOLERANCE


@pytest.mark.parametrize("tp", [1, 2])
def test_a_ragged_batch_in_half_precision_is_each_sequence_alone(
    tp: int, variant: Callable[[str], Path]
) -> None:
    """Through the paged kernel where this GPU has it: what one sequence gets does not depend on the others."""
    engine = Engine(tp, device="cuda", dtype="bfloat16")
    try:
        engine.load(variant("qwen2-tied"))
        engine.capture("logits")
        together = engine.generate(RAGGED, STEPS)
        for seq, ids in enumerate(RAGGED):
            engine.rules({})
            alone = engine.generate([ids], 1)
            np.testing.assert_allclose(together[0].logits(seq), alone[0].logits(), atol=0.1, rtol=0.02)
    finally:
        engine.close()
