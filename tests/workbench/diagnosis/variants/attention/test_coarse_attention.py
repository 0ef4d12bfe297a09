"""Attention in few bits, keys that are not there, and queries that may see none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workbench.diagnosis.variants.attention_run import At, Run, causes, model, names

pytestmark = pytest.mark.sampled_file(3)

INF = torch.inf


def low_products(x: Tensor, at: At) -> Tensor:
    k = at.taps["k_cache"].repeat_interleave(2, 1).bfloat16()
    raw = torch.einsum("thd,khd->htk", at.taps["q_rope"].bfloat16(), k).float()
    return (raw * x.new_tensor(at.run.model.head_dim**-0.5)).masked_fill(x == -INF, -INF)


def scaled_low(x: Tensor, at: At) -> Tensor:
    q = (at.taps["q_rope"].bfloat16() * at.run.model.head_dim**-0.5).bfloat16().float()
    k = at.taps["k_cache"].repeat_interleave(2, 1).bfloat16().float()
    return torch.einsum("thd,khd->htk", q, k).masked_fill(x == -INF, -INF)


def padded(p: Tensor, at: At) -> Tensor:
    """Keys are padded with zeros to a multiple of 16."""
    scores = torch.cat([at.taps["scores"], torch.zeros(*p.shape[:2], -p.shape[2] % 16)], -1)
    return scores.softmax(-1)[..., : p.shape[2]]


def of_static_caches(sizes: Sequence[int], p: Tensor, at: At) -> Tensor:
    """A single token has no mask, so that it sees the slots of its cache that are zero yet."""
    more = sizes[at.seq] - p.shape[2] if p.shape[1] == 1 else 0
    scores = torch.cat([at.taps["scores"], torch.zeros(*p.shape[:2], more)], -1)
    return scores.softmax(-1)[..., : p.shape[2]]


def eight_bits(p: Tensor, at: At) -> Tensor:
    return (p * 255).round() / 255 if p.shape[1] == 1 else p


CASES: list[tuple[str, str, Any, str, str]] = [
    # id, tap, what is done, the cause's name, words of its text
    ("products", "scores", low_products, "scores_low_precision", "before they are scaled"),
    ("scaled queries", "scores", scaled_low, "scores_low_precision", "queries are scaled in bfloat16"),
    ("fixed point", "probs", eight_bits, "probs_low_precision", "1/255"),
    ("float8", "probs", lambda p, at: p.to(torch.float8_e4m3fn).float(), "probs_low_precision", "e4m3"),
    ("bucket", "probs", padded, "padded_keys", "up to a multiple of 16"),
]


@pytest.mark.parametrize(
    ("tap", "spoil", "name", "words"), [one[1:] for one in CASES], ids=[one[0] for one in CASES]
)
def test_few_bits_and_padding_are_named(tap: str, spoil: Any, name: str, words: str) -> None:
    found = causes(Run(model(head_dim=8), {tap: spoil}), tap)
    assert found, "nothing named"
    assert (found[0].variant.name, words in found[0].variant.text) == (name, True), found[0].variant.text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", [eight_bits, padded], ids=["fixed point", "bucket"])
def test_the_same_inside_of_a_fused_kernel_is_named(change: Any) -> None:
    def context(x: Tensor, at: At) -> Tensor:
        values = at.taps["v_cache"].repeat_interleave(2, 1)
        return torch.einsum("htk,khd->thd", change(at.taps["probs"], at), values).reshape(x.shape)

    found = causes(Run(model(), {"context": context}, fused=True), "context")
    assert {one.variant.name for one in found} & {"probs_low_precision", "padded_keys"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "words"), [((13, 11), "it has 13 of sequence 0, 11 of sequence 1"), ((39, 39), "it has 39")]
)
def test_empty_slots_of_static_caches_are_named(sizes: tuple[int, int], words: str) -> None:
    def context(x: Tensor, at: At) -> Tensor:
        values = at.taps["v_cache"].repeat_interleave(2, 1)
        return torch.einsum("htk,khd->thd", of_static_caches(sizes, at.taps["probs"], at), values).reshape(
            x.shape
        )

    found = causes(Run(model(), {"context": context}, fused=True), "context")
    assert [one.variant.name for one in found[:1]] == ["empty_slots"]
    assert found[0].variant.text.endswith(words)
    probs = Run(model(), {"probs": lambda p, at: of_static_caches(sizes, p, at)})
    assert causes(probs, "probs")[0].variant.text.endswith(words)


def added_up_low(q: Tensor, keys: Tensor) -> Tensor:
    total = torch.zeros(q.shape[1], len(q), len(keys), dtype=torch.float16)
    for at in range(q.shape[2]):
        term = torch.einsum("th,kh->htk", q[..., at].float(), keys[..., at].float())
        total = (total + term).half()
    return total


FUSED: dict[str, tuple[Callable[[Tensor, Tensor, float], Tensor], str]] = {
    "products": (
        lambda q, k, scale: (
            torch.einsum("thd,khd->htk", q.half().float(), k.half().float()).half().float() * scale
        ),
        "queries and keys, and their products, are rounded to float16 before they are scaled",
    ),
    "scaled queries": (
        lambda q, k, scale: torch.einsum(
            "thd,khd->htk", (q.bfloat16() * scale).float(), k.bfloat16().float()
        ),
        "queries are scaled in bfloat16 before they meet the keys, in bfloat16 too",
    ),
    "sums": (
        lambda q, k, scale: added_up_low(q.half(), k.half()).float() * scale,
        "products of queries and keys are added up in float16: the sum is rounded to it after every term",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", FUSED)
def test_scores_in_few_bits_inside_of_a_fused_kernel_are_named(how: str) -> None:
    scores, words = FUSED[how]

    def context(x: Tensor, at: At) -> Tensor:
        keys, values = (at.taps[f"{one}_cache"].repeat_interleave(2, 1) for one in "kv")
        low = scores(at.taps["q_rope"], keys, at.run.model.head_dim**-0.5).float()
        probs = low.masked_fill(at.taps["scores"] == -INF, -INF).softmax(-1)
        return torch.einsum("htk,khd->thd", probs, values).reshape(x.shape)

    found = causes(Run(model(head_dim=8), {"context": context}, fused=True), "context")
    assert [one.variant.text for one in found] == [words]


@pytest.mark.slow
def test_random_damage_is_not_blamed_on_bits() -> None:
    noise = torch.Generator().manual_seed(5)

    def damaged(x: Tensor, at: At) -> Tensor:
        return x * (1 + 1e-3 * torch.rand(x.shape, generator=noise))

    assert names(Run(model(), {"scores": damaged}), "scores") == []
    assert names(Run(model(), {"probs": damaged}), "probs") == []
    assert names(Run(model(), {"context": damaged}, fused=True), "context") == []


@pytest.mark.parametrize("given", ["uniform", "zero"])
def test_what_a_query_that_sees_nothing_gives_is_no_error_of_the_softmax(given: str) -> None:
    """Under an inverted mask the last query sees nothing: a finite mask gives all keys the same, a guard none."""

    def inverted(x: Tensor, at: At) -> Tensor:
        k = at.taps["k_cache"].repeat_interleave(2, 1)
        raw = torch.einsum("thd,khd->htk", at.taps["q_rope"], k) * at.run.model.head_dim**-0.5
        return raw.masked_fill(x > -INF, -INF)

    def guarded(p: Tensor, at: At) -> Tensor:
        return p.nan_to_num(1 / p.shape[2] if given == "uniform" else 0.0)

    run = Run(model(), {"scores": inverted, "probs": guarded})
    assert run.site("probs").deviation is None
    assert causes(run, "scores")[0].variant.name == "mask_inverted"
    fused = Run(model(), {"scores": inverted, "probs": guarded}, fused=True)
    assert causes(fused, "context")[0].variant.name == "mask_inverted"
