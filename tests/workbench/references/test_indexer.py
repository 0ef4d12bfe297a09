"""The golden recorder of models with an indexer against transformers itself, run without any hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from lockstep.sessions import Session
from lockstep.workbench.references.loading import CACHE
from lockstep.workbench.references.request import GoldenRequest, GoldenSequence
from lockstep.workbench.references.transformers_recorder import record
from tests.checkpoints import tiny_checkpoint

STEPS = 2


def recorded(folder: Path, model: Path, prompt: tuple[int, ...]) -> Session:
    record(GoldenRequest(str(model), (GoldenSequence(prompt),), steps=STEPS), folder / "golden.session")
    return Session.open(folder / "golden.session")


def plain(path: Path) -> Any:
    """transformers as it comes."""
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, **how).eval()


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_taps_change_no_bit(family: str, tmp_path: Path) -> None:
    """Of logits and probabilities, in the prefill and in decode steps; what was chosen is what has a probability."""
    path, prompt = tiny_checkpoint(tmp_path, family), tuple(range(3, 17))
    model = plain(path)
    cache, ids = DynamicCache(config=model.config), prompt
    with recorded(tmp_path, path, prompt) as session, torch.inference_mode():
        for step in range(STEPS + 1):
            given = {CACHE: cache, "use_cache": True, "output_attentions": True, "logits_to_keep": 1}
            out = model(torch.tensor([ids]), **given)
            logits = session.rebuilt("logits", step=step, seq=0).array
            np.testing.assert_array_equal(logits, out.logits[0, -1:].numpy())
            for layer, probs in enumerate(out.attentions):
                found = session.rebuilt(f"layers.{layer}.attn.probs", step=step, seq=0).array
                np.testing.assert_array_equal(found, probs[0].numpy())
                names = (f"layers.{layer}.attn.{one}_chosen" for one in ("index", "shared"))
                chosen = session.rebuilt(next(filter(session.has_tap, names)), step=step, seq=0).array
                assert chosen is not None
                for row, of_query in zip(chosen, probs[0].amax(0), strict=True):
                    assert of_query.nonzero().flatten().tolist() == row[row >= 0].tolist()
            ids = (int(out.logits[0, -1].argmax()),)


@pytest.mark.slow
def test_a_prompt_whose_attention_is_not_kept_whole(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "glm_moe_dsa", max_position_embeddings=2048, num_hidden_layers=2,
                           indexer_types=["full", "shared"], mlp_layer_types=["dense", "dense"])  # fmt: skip
    prompt = tuple(3 + i * 37 % 128 for i in range(1100))
    model = plain(path)
    with recorded(tmp_path, path, prompt) as session, torch.inference_mode():
        found = session.rebuilt("logits", step=0, seq=0).array
        right = model(torch.tensor([prompt]), use_cache=False).logits[0, -1:].numpy()
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)
