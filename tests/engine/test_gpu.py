"""The engine on a GPU: the same logits and tokens as transformers there, also with more ranks than GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.engine.taps.measure import GPU_PIECE, measured_rows
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 700), (2, GPU_PIECE + 5), (1, 2 * GPU_PIECE)])
def test_tensors_are_measured_as_on_the_cpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Short rows, and some in pieces; checksums to the bit."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 3], x[0, 5], x[-1, -1] = torch.nan, -torch.inf, 0
    parts, sums = measured_rows(x)
    on_gpu, sums_on_gpu = measured_rows(x.cuda())
    assert (sums_on_gpu.cpu() == sums).all()
    torch.testing.assert_close(on_gpu.cpu(), parts, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_that_share_a_gpu_repeat_themselves(tp: int, variant: Callable[[str], Path]) -> None:
    engine = Engine(tp, device="cuda")
    try:
        engine.load(variant("llama"))
        engine.capture("logits", statistics=True)
        first = engine.generate([PROMPT], 3)
        for _ in range(2):
            engine.rules({})
            again = engine.generate([PROMPT], 3)
            assert all((a.checksums == b.checksums).all() for a, b in zip(first, again, strict=True))
    finally:
        engine.close()
