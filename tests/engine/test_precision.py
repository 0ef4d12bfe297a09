"""16-bit runs within the noise floor: the error of the logits against float64, held against the error that
transformers makes at the same dtype on the same weights and tokens (ratio of the root mean squares)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import VARIANTS, tiny_checkpoint, tiny_model
from tests.engine.harness import Engine

PROMPT = [3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56]
FORCED = [(7 * i * i + 3) % 131 for i in range(33)]
LIMIT = 1.5  # "pass" in the design's terms


def reference(name: str, weights: torch.dtype, compute: torch.dtype) -> np.ndarray:
    """Logits [33, vocab] of transformers: weights rounded to one dtype, computed in another."""
    family, overrides = VARIANTS[name]
    model = tiny_model(family, **overrides, attn_implementation="eager").to(weights).to(compute)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + FORCED[:-1]]), use_cache=False).logits[0]
    return logits[len(PROMPT) - 1 :].double().numpy()


def rms(error: np.ndarray) -> float:
    return float(np.sqrt((error**2).mean()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen2-tied", "bfloat16"), ("qwen3", "bfloat16"), ("llama-yarn", "float16")]
)
def test_16_bit_errors_are_transformers_own(
    name: str, tp: int, dtype: str, engine_of: Callable[[int], Engine], tmp_path: Path
) -> None:
    torch_dtype = getattr(torch, dtype)
    family, overrides = VARIANTS[name]
    path = tiny_checkpoint(tmp_path, family, dtype=torch_dtype, **overrides)
    exact = reference(name, torch_dtype, torch.float64)
    floor = rms(reference(name, torch_dtype, torch_dtype) - exact)
    engine = engine_of(tp)
    for statistics in (False, True):  # both paths through attention
        engine.load(path, dtype=dtype)
        engine.capture("logits", statistics=statistics)
        engine.add(PROMPT)
        found = np.stack([engine.step({0: token}).logits() for token in FORCED])
        ratio = rms(found.astype(np.float64) - exact) / floor
        assert ratio <= LIMIT, f"{ratio:.2f} x the noise floor, with statistics {statistics}"
