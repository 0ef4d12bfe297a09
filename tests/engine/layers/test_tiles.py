"""Attention in tiles: the same numbers as whole, whatever the borders, and nothing of the size of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.engine.layers import tiles
from lockstep.engine.layers.tiles import Tiling
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.run.sequences import StepResult
from lockstep.engine.taps import names
from lockstep.engine.taps.hub import CapturePolicy
from lockstep.engine.taps.measure import TiledStatistics, measured_whole
from tests.checkpoints import tiny_checkpoint
from tests.engine.harness import local_runner

pytestmark = pytest.mark.sampled_file(2)

PROMPTS = ([5, 6, 7] * 9, [9, 8], [3] * 13)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(0, 9), st.sampled_from([None, 1, 3, 50]),
    st.integers(1, 400), st.booleans(),
)  # fmt: skip
def test_every_cell_that_is_seen_lies_in_one_tile(
    kv_heads: int, group: int, queries: int, cached: int, window: int | None, cells: int, on_gpu: bool
) -> None:
    keys = cached + queries
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "GPU_CELLS" if on_gpu else "CELLS", cells)
        tiling = Tiling(kv_heads, group, queries, keys, True, window, on_gpu)
        times = torch.zeros(kv_heads, queries, keys, dtype=torch.int64)
        for tile in tiling:
            times[tile.heads, tile.rows, tile.keys] += 1
        covered = torch.zeros_like(times)
        for tile in tiling.over_all_keys():
            covered[tile.heads, tile.rows, tile.keys] += 1
    assert (covered == 1).all()
    assert times.max() <= 1
    distance = torch.arange(cached, keys)[:, None] - torch.arange(keys)
    seen = (distance >= 0) & (distance < (window or keys))
    assert (times[:, seen] == 1).all()


@given(st.data())
def test_statistics_of_tiles_are_those_of_the_whole(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 12)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    outside = data.draw(st.sampled_from([0.0, -math.inf]))
    whole = torch.full(shape, outside, dtype=dtype)
    tiled = TiledStatistics(shape, outside, dtype, whole.device)
    heads, rows, keys = shape
    some = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    step = data.draw(st.integers(1, rows))
    for head in range(heads):
        for row in range(0, rows, step):
            first = data.draw(st.integers(0, keys - 1))
            count = data.draw(st.integers(1, keys - first))
            tile = torch.randn(1, min(step, rows - row), count, generator=some).to(dtype)
            if data.draw(st.booleans()):
                tile[0, 0, 0] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))
            whole[head : head + 1, row : row + step, first : first + count] = tile
            tiled.add(tile, head, row, first)
    first, _ = tiled.close()  # as while a step is looked at half-way
    parts, checksum = tiled.close()
    assert torch.equal(parts, first)
    expected, its_checksum = measured_whole(whole)
    assert checksum.tolist() == its_checksum.tolist()
    torch.testing.assert_close(parts, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


RULES: list[dict[str, str]] = [
    {}, {"mask": "additive"}, {"mask": "weak"}, {"window": "one_more"}, {"window": "top_left"},
    {"window": "prefill_only"}, {"softmax": "plus_one"}, {"cache_reuse": "false"}, {"cache_reuse": "first_lost"},
    {"positions": "stuck"},
]  # fmt: skip


def run(runner: Runner, policy: CapturePolicy, steps: int = 3) -> list[StepResult]:
    """All prompts together, and some steps more."""
    runner.reset(runner.rules)
    runner.watch(policy)
    for seq, prompt in enumerate(PROMPTS):
        runner.add(seq, prompt, Sampling())
    return [runner.step() for _ in range(steps)]


def attention(runner: Runner) -> list[int]:
    """The taps on scores and probs."""
    return [i for i, spec in enumerate(runner.specs) if spec.name.endswith((".scores", ".probs"))]


@pytest.mark.parametrize("chunk", [None, 5])
def test_what_is_computed_does_not_depend_on_which_taps_are_on(
    chunk: int | None, variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tile by tile, a few rows of it kept, or whole: every tap has the same bits."""
    monkeypatch.setattr(tiles, "CELLS", 100)
    monkeypatch.setattr(names, "_WHOLE", 20)
    monkeypatch.setattr(names, "_ELEMENTS", 60)
    runner = local_runner(variant("qwen2-window"), chunk_tokens=chunk)
    taps = attention(runner)
    policies = [
        CapturePolicy(statistics=True),
        CapturePolicy(True, dict.fromkeys(taps, "full")),
        CapturePolicy(True, dict.fromkeys(taps, "last"), rows_bytes=3000),
        CapturePolicy(True, dict.fromkeys(taps, "newest")),
    ]
    reported, *others = [run(runner, policy) for policy in policies]
    for other in others:
        for one, same in zip(reported, other, strict=True):
            np.testing.assert_array_equal(one.checksums, same.checksums)
            np.testing.assert_array_equal(one.stats, same.stats)
    for newest in others[1:]:
        for whole_step, step in zip(others[0], newest, strict=True):
            for one, part in zip(whole_step.captured, step.captured, strict=True):
                assert (one.tap, one.seq) == (part.tap, part.seq)
                assert (one.tensor[:, -part.tensor.shape[1] :] == part.tensor).all()
    kept = [[one.tensor.shape[1] for one in steps[0].captured] for steps in (others[0], others[2])]
    assert sum(kept[1]) < sum(kept[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_borders_change_nothing_but_rounding(
    rules: dict[str, str], variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that decides what is seen does so in tiles as in the whole."""
    runner = local_runner(variant("qwen2-window"), rules)
    whole = run(runner, CapturePolicy(statistics=True))
    monkeypatch.setattr(tiles, "CELLS", 60)
    for one, tiled in zip(whole, run(runner, CapturePolicy(statistics=True)), strict=True):
        np.testing.assert_allclose(tiled.stats, one.stats, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("rules", [{}, {"mask": "weak"}], ids=str)
@pytest.mark.sampled(2)
def test_nothing_is_as_large_as_the_scores(
    statistics: bool, rules: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt of 900 tokens: no result has as many elements as one head has scores."""
    monkeypatch.setattr(tiles, "CELLS", 1 << 14)
    path = tiny_checkpoint(tmp_path, "qwen2", max_position_embeddings=960)
    runner = local_runner(path, rules, max_sequences=1)
    runner.watch(CapturePolicy(statistics=statistics))
    runner.add(0, [i % 100 for i in range(900)], Sampling())
    with Largest() as largest:
        runner.step()
    assert 900 * 64 < largest.elements < 900 * 900 // 2


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest new result."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **kwargs or {})
        if isinstance(found, Tensor) and not func.is_view:
            self.elements = max(self.elements, found.untyped_storage().nbytes() // found.element_size())
        return found


def test_nan_in_keys_reaches_the_logits_where_no_tap_is_on(variant: Callable[[str], Path]) -> None:
    """The causal kernel would lose it."""
    runner = local_runner(variant("llama"))
    logits = next(i for i, spec in enumerate(runner.specs) if spec.name == "logits")
    with torch.inference_mode():
        runner.decoder.parameters()["model.layers.0.self_attn.k_proj.weight"][0, 0] = math.nan  # type: ignore[index]
    for policy in (CapturePolicy(False, {logits: "full"}), CapturePolicy(True, {logits: "full"})):
        captured = run(runner, policy, steps=1)[0].captured
        assert [bool(one.tensor.isnan().all()) for one in captured] == [True, True, True]
