"""Paged FlashAttention: what it is given, when it serves, and that it computes what SDPA computes.

Without a GPU the kernel is stood in for by its documented contract in plain float64 loops, so that block
tables, lengths, windows and head groups are checked on every machine; with one, by the kernel itself.
"""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engine.layers import paged_attention
from lockstep.engine.rules import CORRECT
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.hub import CapturePolicy
from tests.engine.harness import local_runner

PROMPTS = ([3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56], [9, 9, 8], [100, 2, 45, 61, 13, 7, 7])
CPU = torch.device("cpu")
SHAPES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "page": 4}


def by_the_contract(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
    num_splits: int | None,
) -> Tensor:  # fmt: skip
    """`varlen_attn` as its documentation has it: pages [pages, page size, kv heads, D], window around the query
    aligned to the last key of its sequence."""
    assert num_splits == 1
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert {t.dtype for t in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    out = torch.empty_like(query)
    left, right = (10**9 if side < 0 else side for side in window_size)
    ends, used = cu_seq_q.tolist(), seqused_k.tolist()
    assert max_q == max(b - a for a, b in itertools.pairwise(ends))
    assert max_k == max(used)
    for i, rows in enumerate(used):
        for t in range(ends[i], ends[i + 1]):
            at = rows - (ends[i + 1] - t)  # the last query stands at the last key
            for head in range(query.shape[1]):
                scores = {}
                for p in range(max(0, at - left), min(rows, at + right + 1)):
                    page, offset = block_table[i, p // key.shape[1]], p % key.shape[1]
                    group = query.shape[1] // key.shape[2]
                    k, v = key[page, offset, head // group], value[page, offset, head // group]
                    scores[p] = (query[t, head].double() @ k.double() * scale, v)
                weights = torch.stack([score for score, _ in scores.values()]).softmax(0)
                out[t, head] = weights @ torch.stack([v for _, v in scores.values()]).double()
    return out


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The contract in place of the kernel, on the CPU in any precision; the list grows with every call."""
    calls: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Tensor:
        calls.append(arguments[0].shape[0])
        return by_the_contract(*arguments, **options)

    monkeypatch.setattr(paged_attention, "_kernel", lambda: counted)
    monkeypatch.setattr(paged_attention, "DEVICES", {"cpu"})
    monkeypatch.setattr(paged_attention, "DTYPES", {torch.float32})
    paged_attention._self_test.cache_clear()
    yield calls
    paged_attention._self_test.cache_clear()


def logits(path: Path, passes: int, **config: Any) -> Tensor:
    """[passes, sequences, vocab] of a ragged batch, in this process."""
    runner = local_runner(path, block_size=4, **config)
    runner.watch(CapturePolicy(False, {runner.hub.places["logits"]: "full"}))
    for seq, ids in enumerate(PROMPTS):
        runner.add(seq, list(ids), Sampling())
    return torch.stack([torch.cat([c.tensor for c in runner.step().captured]) for _ in range(passes)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen2-window", "llama-mha"])
@pytest.mark.parametrize("config", [{}, {"chunk_tokens": 3}])
def test_a_ragged_batch_gets_what_sdpa_gives(
    name: str, config: dict[str, Any], variant: Callable[[str], Path], kernel: list[int], monkeypatch: Any
) -> None:
    """Prefill, chunks of it, and decode steps across block borders; one with sliding windows."""
    paged = logits(variant(name), 4, **config)
    assert kernel, "the kernel was never called"
    monkeypatch.setattr(paged_attention, "DEVICES", set())
    called = len(kernel)
    expected = logits(variant(name), 4, **config)
    assert len(kernel) == called
    torch.testing.assert_close(paged, expected, atol=2e-5, rtol=0)


def test_a_tap_on_what_the_kernel_passes_over_is_served_without_it(
    variant: Callable[[str], Path], kernel: list[int]
) -> None:
    runner = local_runner(variant("qwen2-tied"), block_size=4)
    paths = {}
    for tap in ("attn.k_cache", "attn.scores", "attn.context"):
        runner.watch(CapturePolicy(False, {runner.hub.places[f"layers.0.{tap}"]: "full"}))
        paths[tap] = [layer.attention.unpaged for layer in runner.decoder.layers[:2]]
    assert paths == {
        "attn.k_cache": ["a tap is on", None],
        "attn.scores": ["a tap is on", None],
        "attn.context": [None, None],
    }


@pytest.mark.parametrize("seam", paged_attention.SEAMS)
def test_a_replaced_seam_is_never_papered_over(seam: str, kernel: list[int]) -> None:
    rules = replace(CORRECT, **{seam: lambda *arguments: None})
    reason = paged_attention.refusal(rules, device=CPU, dtype=torch.float32, **SHAPES)
    assert reason is not None
    assert seam in reason
    assert paged_attention.refusal(CORRECT, device=CPU, dtype=torch.float32, **SHAPES) is None


def test_devices_and_dtypes_that_the_kernel_does_not_serve() -> None:
    assert "GPU" in (paged_attention.refusal(CORRECT, device=CPU, dtype=torch.bfloat16, **SHAPES) or "")
    reason = paged_attention.refusal(CORRECT, device=torch.device("cuda"), dtype=torch.float32, **SHAPES)
    assert "float32" in (reason or "")


def test_a_kernel_that_is_missing_or_wrong_is_found_out(
    kernel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: Any, **options: Any) -> Tensor:
        raise RuntimeError("page size must be divisible by 256\nsecond line")

    def sees_the_future(*arguments: Any, **options: Any) -> Tensor:
        return by_the_contract(*arguments, **options | {"window_size": (-1, -1)})

    def without_pages(  # torch 2.11's
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        return_aux: None = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        raise AssertionError("called without a block table")

    for wrong, words in (
        (missing, "divisible by 256"),
        (sees_the_future, "is off by"),
        (without_pages, "unexpected keyword argument"),
    ):
        monkeypatch.setattr(paged_attention, "_kernel", lambda kernel=wrong: kernel)
        paged_attention._self_test.cache_clear()
        reason = paged_attention.refusal(CORRECT, device=CPU, dtype=torch.float32, **SHAPES)
        assert words in (reason or "")
        assert "second line" not in (reason or "")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_kernel_of_this_gpu_passes_its_own_test(head_dim: int) -> None:
    if "block_table" not in inspect.signature(paged_attention._kernel()).parameters:
        pytest.skip("the kernel of this torch takes no pages")
    reason = paged_attention.refusal(
        CORRECT, device=torch.device("cuda"), dtype=torch.bfloat16,
        heads=14, kv_heads=2, head_dim=head_dim, page=256,
    )  # fmt: skip
    assert reason is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen2-window", "llama-mha"])
def test_on_the_gpu_a_ragged_batch_gets_what_sdpa_gives(
    name: str, variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Tensor:
        runner = local_runner(variant(name), device="cuda", dtype="bfloat16")
        runner.watch(CapturePolicy(False, {runner.hub.places["logits"]: "full"}))
        for seq, ids in enumerate(PROMPTS):
            runner.add(seq, list(ids), Sampling())
        return torch.cat([c.tensor for c in runner.step().captured]).float()

    paged = run()
    monkeypatch.setattr(paged_attention, "DEVICES", set())
    torch.testing.assert_close(paged, run(), atol=0.1, rtol=0.02)  # logits of up to ~6 in bfloat16


@pytest.mark.slow
def test_a_rank_on_the_cpu_does_not_load_torch_dynamo() -> None:
    """It would double the time that every rank takes to start."""
    code = "import lockstep.engine.ranks.commands, sys; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
