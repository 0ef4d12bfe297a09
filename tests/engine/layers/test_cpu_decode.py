"""Attention of a whole batch of decode steps by one kernel, against float64 and against the way by each sequence."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.compiled import kernels
from lockstep.engine.faults.resolve import resolve
from lockstep.engine.layers import cpu_decode, weight
from lockstep.engine.layers.cpu_decode import CachedRows
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps import cpu_pass
from lockstep.engine.taps.hub import CapturePolicy
from tests.engine.harness import local_runner

pytestmark = pytest.mark.sampled_file(2)

PROMPTS = [[5, 6, 7] * 9, [9, 8], [3], [11, 12, 13, 14]]


@pytest.mark.slow
@given(
    st.sampled_from([(4, 4, 8), (6, 2, 16), (7, 1, 64)]),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from([None, 1, 7, 100]),
    st.integers(0, 1 << 30),
)
def test_scores_probabilities_and_context_are_those_of_float64(
    shape: tuple[int, int, int], lens: list[int], window: int | None, seed: int
) -> None:
    heads, kv_heads, width = shape
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(256, generator=random)
    rows = CachedRows.of(list(order[: sum(lens)].split(lens)))
    keys, values = (torch.randn(256, kv_heads, width, generator=random) for _ in range(2))
    q = torch.randn(len(lens), heads, width, generator=random)
    scores, probs, context = cpu_decode.attend(q, keys, values, rows, scale=0.3, window=window)
    for seq, own in enumerate(rows.slots.split(lens)):
        k, v = (
            x[own].double().transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for x in (keys, values)
        )
        right = 0.3 * (k @ q[seq].double()[:, :, None])[..., 0]
        right[:, : max(0, len(own) - (window or len(own)))] = -math.inf
        at = slice(heads * int(rows.ends[seq]), heads * int(rows.ends[seq + 1]))
        shares = right.softmax(-1)
        torch.testing.assert_close(scores[at].view(heads, -1).double(), right, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(probs[at].view(heads, -1).double(), shares, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(context[seq].double(), (shares[:, None] @ v)[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_where_torch_has_it(bad: float) -> None:
    """A key that is none spoils its head, and no other sequence."""
    rows = CachedRows.of([torch.arange(5), torch.arange(5, 9)])
    keys, values, q = torch.randn(9, 2, 8), torch.randn(9, 2, 8), torch.rand(2, 4, 8)
    keys[3, 1] = bad
    scores, probs, context = cpu_decode.attend(q, keys, values, rows, scale=1.0, window=None)
    right = (keys[:5].transpose(0, 1).repeat_interleave(2, 0) @ q[0][:, :, None])[..., 0]
    torch.testing.assert_close(scores[:20].view(4, 5), right, equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(probs[:20].view(4, 5), right.softmax(-1), equal_nan=True, rtol=1e-5, atol=1e-6)
    assert context[0].isnan().any(-1).tolist() == [False, False, True, True]
    assert context[1].isfinite().all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen2-window"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_is_the_same_as_sequence_by_sequence(
    name: str, threads: int, variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics, the tokens with taps and without, and the bits of the first layer's cache."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    steps = {}
    for at_once in (True, False):
        refused = None if at_once else "not now"
        monkeypatch.setattr(cpu_decode, "refusal", lambda *shape, refused=refused: refused)
        runner = local_runner(variant(name), max_sequences=16)
        assert [layer.attention.at_once(1) for layer in runner.decoder.layers] == [at_once] * len(
            runner.decoder.layers
        )
        for seen in (True, False):
            runner.watch(CapturePolicy(statistics=seen))
            for seq, prompt in enumerate(PROMPTS):
                runner.add(seq, prompt, Sampling())
            steps[at_once, seen] = [runner.step() for _ in range(4)]
            for seq in range(len(PROMPTS)):
                runner.remove(seq)
    for one, other in zip(steps[True, True], steps[False, True], strict=True):
        np.testing.assert_allclose(one.stats, other.stats, rtol=1e-3, atol=1e-4)
    tokens = [
        [[one.emitted for one in step.sequences] for step in each if step.phase == "decode"]
        for each in steps.values()
    ]
    assert tokens[0]
    assert all(one == tokens[0] for one in tokens)
    cache = [spec.name for spec in runner.specs].index("layers.0.attn.k_cache")
    assert steps[True, True][2].checksums[cache] == steps[False, True][2].checksums[cache]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 1 << 30))
def test_rows_are_found_where_the_pool_has_them(lens: list[int], page: int, seed: int) -> None:
    """Whatever pages a sequence has: what is measured of the pool are its rows in order."""
    random = torch.Generator().manual_seed(seed)
    pages = iter(torch.randperm(sum(-(-count // page) for count in lens) + 3, generator=random).tolist())
    slots = []
    for count in lens:
        first = [page * next(pages) for _ in range(-(-count // page))]
        slots.append(torch.tensor([start + row for start in first for row in range(page)][:count]))
    rows = CachedRows.of(slots)
    pool = torch.randn(int(torch.cat(slots).max()) + 1, 2, 3)
    stored = rows.stored(pool)
    assert len(stored.runs.table) <= sum(-(-count // page) for count in lens)
    for found, own in zip(stored.parts(), slots, strict=True):
        assert torch.equal(found, pool[own].flatten())
    cells = torch.randn(4 * sum(lens))
    for found, own in zip(rows.cells(cells).parts(), cells.split([4 * n for n in lens]), strict=True):
        assert torch.equal(found, own)


@pytest.mark.parametrize("faults", [{}, {"cache_layer": "shared"}])
def test_statistics_are_those_of_torch(
    faults: dict[str, str], variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured where rows lie; copied where layers overwrite each other's, as with that fault."""
    rules, runner = resolve(faults), local_runner(variant("qwen2-window"), max_sequences=16)
    found = []
    for used in (True, False):
        monkeypatch.setattr(cpu_pass, "_use", used)
        runner.reset(rules)
        runner.watch(CapturePolicy(statistics=True))
        for seq, prompt in enumerate(PROMPTS):
            runner.add(seq, prompt, Sampling())
        found.append([runner.step() for _ in range(3)])
    for in_one_pass, by_torch in zip(*found, strict=True):
        np.testing.assert_array_equal(in_one_pass.checksums, by_torch.checksums)
        np.testing.assert_allclose(in_one_pass.stats, by_torch.stats, rtol=1e-6)


@pytest.mark.parametrize(
    ("large", "config", "expected"),
    [
        (1 << 17, {}, [False, False]),
        (1, {}, [False, True]),
        (1, {"batch_invariant": True}, [False, False]),
        (1, {"dtype": "bfloat16"}, [False, False]),
        (1 << 17, {"max_sequences": 9}, [True, True]),
    ],
    ids=["small", "large", "batch invariant", "of 16 bits", "for many"],
)
def test_one_sequence_goes_alone_but_in_an_engine_for_many(
    large: int, config: dict[str, object], expected: list[bool], variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight, "LARGE", large)
    runner = local_runner(variant("qwen2-tied"), **{"max_sequences": 8, **config})
    for layer in runner.decoder.layers:
        assert [layer.attention.at_once(sequences) for sequences in (1, 2)] == expected


def test_without_numba_it_goes_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(cpu_decode, "kernels", kernels.__wrapped__)
    assert cpu_decode.refusal.__wrapped__(4, 2, 8) == (
        "no attention of a whole batch on this CPU: ModuleNotFoundError: import of numba halted; None in sys.modules"
    )


def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu_decode.attend

    def wrong(*tensors: object, **options: object) -> tuple[torch.Tensor, ...]:
        scores, probs, context = right(*tensors, **options)
        return scores, probs, context + 1e-3

    monkeypatch.setattr(cpu_decode, "attend", wrong)
    assert cpu_decode.refusal.__wrapped__(4, 2, 8) == (
        "no attention of a whole batch on this CPU: the kernel is wrong on it"
    )
