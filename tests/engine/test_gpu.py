"""The engine on a GPU: the same logits and tokens as transformers there, also with more ranks than GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.engine.layers import decode_attention
from lockstep.engine.run import graphs
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.run.sequences import StepResult
from lockstep.engine.taps import one_pass
from lockstep.engine.taps.collected import Collected, apart, side_by_side
from lockstep.engine.taps.hub import CapturePolicy
from lockstep.engine.taps.measurands import Growing, pieces_of
from lockstep.engine.taps.measure import GPU_PIECE, TiledStatistics, measured_rows, measured_whole
from tests.checkpoints import VARIANTS, tiny_model
from tests.engine.harness import Engine, local_runner, reference_logits
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


def steps(runner: Runner, policy: CapturePolicy, count: int) -> list[StepResult]:
    """All ragged prompts together, from the start."""
    runner.reset(runner.rules)
    runner.watch(policy)
    for seq, ids in enumerate(RAGGED):
        runner.add(seq, ids, Sampling())
    return [runner.step() for _ in range(count)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "llama-llama3", "mistral-window"])
def test_a_replayed_step_has_the_bits_of_one_that_is_run(
    name: str, dtype: str, variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics and checksums of every tap, also where a longer graph takes over, and after going back. A tensor that
    is captured makes a step run kernel by kernel."""
    monkeypatch.setattr(graphs, "_LEAST", 16)
    runner = local_runner(variant(name), device="cuda", dtype=dtype)
    replays = []
    run = graphs.DecodeGraphs.run
    monkeypatch.setattr(graphs.DecodeGraphs, "run", lambda *args: replays.append(1) or run(*args))
    replayed = steps(runner, CapturePolicy(statistics=True), 16)
    assert len(replays) == 15 - graphs.WARM_UP
    runner.rewind(
        {seq.id: (len(seq.ids) - 4, seq.computed - 4, seq.kv_len - 4) for seq in runner.sequences.values()},
        12,
    )
    again = [runner.step() for _ in range(4)]
    kept = {
        runner.hub.places["layers.0.attn.scores"]: "full",
        runner.hub.places["layers.1.attn.v_cache"]: "full",
    }
    apart = steps(runner, CapturePolicy(statistics=True, tensors=kept), 16)
    assert len(replays) == 19 - graphs.WARM_UP
    for one, other in zip([*replayed, *again], [*apart, *apart[12:]], strict=True):
        names = [runner.specs[i].name for i in np.flatnonzero(one.checksums != other.checksums)]
        assert not names
        np.testing.assert_allclose(one.stats, other.stats, rtol=1e-6)
        assert [seq.held for seq in one.sequences] == [seq.held for seq in other.sequences]
        assert [seq.emitted for seq in one.sequences] == [seq.emitted for seq in other.sequences]
        assert [seq.choice for seq in one.sequences] == [seq.choice for seq in other.sequences]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(14, 2, 64), (32, 8, 128), (3, 1, 80), (4, 4, 16)])
def test_the_kernels_of_decoding_pass_their_own_test(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert decode_attention.refusal(torch.device("cuda"), dtype, *shape, 16) is None


@pytest.mark.parametrize("dtype", one_pass.DTYPES)
def test_pieces_of_all_kinds_are_measured_as_on_the_cpu(dtype: torch.dtype) -> None:
    """Whole, a tile, as far as a length on the GPU goes, and by a table of blocks."""
    random = torch.Generator().manual_seed(0)
    page, width = 16, 24
    pool = torch.randn(40 * page, width, generator=random).to(dtype)
    pool[7, 3], pool[18, 1], pool[3, 5] = torch.nan, torch.inf, 0
    table = torch.randperm(40, generator=random).to(torch.int32)
    length = torch.tensor([600], dtype=torch.int32)
    slots = (table[:, None].long() * page + torch.arange(page)).flatten()[:600]
    tile = pool[: 2 * 5].reshape(2, 5, width)
    tiled = TiledStatistics((4, 9, 40), 0.0, dtype, torch.device("cpu"))
    waiting = Collected()
    on_gpu = TiledStatistics((4, 9, 40), 0.0, dtype, torch.device("cuda"), waiting)
    tiled.add(tile, 1, 2, 3)
    on_gpu.add(tile.cuda(), 1, 2, 3)
    pieces = [
        *pieces_of(pool.cuda()),
        *pieces_of(pool.cuda()[:, 5:17]),
        Growing(pool.cuda(), length.cuda(), width, 640),
        Growing(pool.cuda(), length.cuda(), width, 640, table.cuda(), page),
    ]
    for piece in pieces:
        waiting.add(piece)
    waiting.flush()
    parts, sums = apart(side_by_side(waiting.measured).cpu().numpy())
    whole = [measured_whole(x) for x in (pool, pool[:, 5:17], pool[:600], pool[slots])]
    assert [int(one) for one in sums[1:]] == [int(checksum) for _, checksum in whole]
    np.testing.assert_allclose(parts[1:], torch.cat([one for one, _ in whole]), rtol=1e-9)
    expected, its_checksum = tiled.close()
    found, checksum = on_gpu.put_together(parts, sums)
    assert checksum == int(its_checksum)
    np.testing.assert_allclose(found, expected[0], rtol=1e-9)
