"""Wrong scores, masks and heads are named by what was done to them; what is right is not accused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workbench.diagnosis.variants.attention_run import At, Run, causes, masked, model, names, rotate

pytestmark = pytest.mark.sampled_file(3)

DIM = 16
INF = torch.inf


def again(q: Tensor, k: Tensor, at: At, *, hidden: Tensor | None = None, scale: float = DIM**-0.5) -> Tensor:
    """Scores anew, from other operands: q [T, heads, D], k [K, kv, D]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    x = torch.einsum("thd,khd->htk", q, k) * scale
    return x.masked_fill(causal(at) if hidden is None else hidden, -INF)


def where(at: At) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys."""
    count = len(at.taps["q_rope"])
    return torch.arange(at.start, at.start + count), torch.arange(at.start + count)


def causal(at: At) -> Tensor:
    return masked(*where(at), at.run.model.windows[at.layer] if at.run.model.windows else None)


def distance(at: At) -> Tensor:
    q, k = where(at)
    return (q[:, None] - k[None, :]).float()


def plain(at: At, name: str) -> Tensor:
    x = at.taps[name]
    return x.view(len(x), -1, DIM)


def operands(change: Callable[[Tensor, Tensor, At], tuple[Tensor, Tensor]]) -> Callable[[Tensor, At], Tensor]:
    return lambda x, at: again(*change(at.taps["q_rope"], at.taps["k_cache"], at), at)


def history(at: At, name: str) -> Tensor:
    """The rows of a tap of all passes of the sequence so far."""
    mine = [i for i, one in enumerate(at.run.passes) if one.seq == at.seq]
    held = at.run.held[f"layers.{at.layer}.attn.{name}", at.rank]
    return torch.cat([held[i] for i in mine])


def kv_map(reads: Callable[[int], int]) -> Callable[[Tensor, At], Tensor]:
    def spoil(x: Tensor, at: At) -> Tensor:
        k = at.taps["k_cache"][:, [reads(h) for h in range(8)]]
        return again(at.taps["q_rope"], k, at)

    return spoil


def slope(head: int) -> float:
    return 2.0 ** -(head + 1)


SCORES: list[tuple[str, Any, str, str]] = [
    # id, what is done, the cause's name, words of its text
    ("unscaled", lambda x, at: x * 4, "scores_scale", "the scale is missing"),
    ("scaled twice", lambda x, at: x / 4, "scores_scale", "scaled twice"),
    ("by hidden", lambda x, at: x * 4 * 96**-0.5, "scores_scale", "hidden_size"),
    ("by heads", lambda x, at: x * 4 * 8**-0.5, "scores_scale", "the number of heads"),
    ("hidden/heads", lambda x, at: x * 4 * 12**-0.5, "scores_scale", "not this model's head_dim"),
    ("any scale", lambda x, at: x * 1.2345, "scores_scale", "1.2345 times the right scale"),
    ("sign", lambda x, at: torch.where(x == -INF, x, -x), "scores_scale", "sign"),
    ("log2(e)", lambda x, at: x * math.log2(math.e), "scores_scale", "exp2"),
    (
        "head's own",
        lambda x, at: x * (1 + torch.arange(8.0))[:, None, None],
        "scores_scale_of_heads",
        "its own",
    ),
    (
        "log n",
        lambda x, at: torch.where(x == -INF, x, x * (where(at)[0] + 1.0).log()[:, None] / math.log(8)),
        "scores_scale_of_queries",
        "log(8)",
    ),
    (
        "soft cap 50",
        lambda x, at: torch.where(x == -INF, x, 50 * (x / 50).tanh()),
        "scores_soft_cap",
        "50 * tanh",
    ),
    (
        "soft cap 3.3",
        lambda x, at: torch.where(x == -INF, x, 3.3 * (x / 3.3).tanh()),
        "scores_soft_cap",
        "3.3 * tanh",
    ),
    (
        "unrotated k",
        operands(lambda q, k, at: (q, history(at, "k_proj").view(k.shape))),
        "scores_unrotated_keys",
        "keys",
    ),
    (
        "unrotated q",
        operands(lambda q, k, at: (plain(at, "q_proj"), k)),
        "scores_unrotated_queries",
        "queries",
    ),
    (
        "unrotated both",
        operands(lambda q, k, at: (plain(at, "q_proj"), history(at, "k_proj").view(k.shape))),
        "scores_unrotated",
        "queries and keys",
    ),
    (
        "rotated again",
        operands(lambda q, k, at: (rotate(q, where(at)[0], 1e4), rotate(k, where(at)[1], 1e4))),
        "scores_rotated_again",
        "once more",
    ),
    (
        "k one behind",
        operands(lambda q, k, at: (q, torch.cat([k[:1] * 0, k[:-1]]))),
        "cache_rows_shifted",
        "each key has what stands -1 from it",
    ),
    (
        "q one ahead",
        operands(lambda q, k, at: (torch.cat([q[1:], q[-1:]]), k)),
        "q_shifted",
        "each query has what stands +1 from it",
    ),
    (
        "newest missing",
        operands(lambda q, k, at: (q, torch.cat([k[:-1], k[:1] * 0]))),
        "cache_rows_zero",
        "not there yet",
    ),
    (
        "values",
        operands(lambda q, k, at: (q, at.taps["v_cache"])),
        "cache_keys_for_values",
        "what is read as keys are the values",
    ),
    (
        "not transposed",
        operands(lambda q, k, at: (q.reshape(8, len(q), DIM).transpose(0, 1), k)),
        "q_reread",
        "queries are transposed in memory",
    ),
    (
        "alibi",
        lambda x, at: x - torch.tensor([slope(h) for h in range(8)])[:, None, None] * distance(at),
        "scores_alibi",
        "published slopes",
    ),
    (
        "alibi of keys",
        lambda x, at: x + torch.tensor([0.1 * h for h in range(1, 9)])[:, None, None] * where(at)[1],
        "scores_alibi",
        "key's position",
    ),
    (
        "relative bias",
        lambda x, at: x + torch.sin(distance(at) ** 2),
        "scores_bias_relative",
        "relative position bias",
    ),
    (
        "halves of packed words exchanged",
        operands(lambda q, k, at: (q.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), k)),
        "keys_exchanged_in_pairs",
        "neighbouring dims stand in each other's place",
    ),
    (
        "dimensions backwards in one head",
        operands(lambda q, k, at: (torch.cat([q[:, :7], q[:, 7:].flip(-1)], 1), k)),
        "keys_reversed",
        "dims stand in reversed order",
    ),
    ("constant", lambda x, at: x + 3.0, "scores_constant", "a constant is added to all scores"),
    ("tiled", kv_map(lambda h: h % 4), "kv_heads_tiled", "h % n"),
    ("reversed", kv_map(lambda h: 3 - h // 2), "kv_heads_reversed", "reversed"),
    ("all 0", kv_map(lambda h: 0), "kv_heads_all_0", "reads KV head 0"),
    ("shifted", kv_map(lambda h: (h // 2 + 1) % 4), "kv_heads_shifted_1", "1 after their own"),
    ("other group", kv_map(lambda h: min(h // 4, 3)), "kv_heads_groups_of_4", "h // 4"),
    (
        "some",
        kv_map(lambda h: [0, 2, 1, 1, 2, 2, 3, 3][h]),
        "kv_heads_listed",
        "query head 1 reads KV head 2 instead of 0",
    ),
    ("q heads reversed", lambda x, at: x.flip(0), "score_heads_moved", "head 0 has those of head 7"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("spoil", "name", "words"), [one[1:] for one in SCORES], ids=[one[0] for one in SCORES]
)
def test_wrong_scores_are_named(spoil: Any, name: str, words: str) -> None:
    first = causes(Run(model(), {"scores": spoil}), "scores")[0].variant
    assert (first.name, words in first.text) == (name, True), first.text


def test_a_single_head_is_reported_by_itself() -> None:
    """Whose map is h // 1 as well, cut off at the last KV head."""

    def spoil(x: Tensor, at: At) -> Tensor:
        if at.rank == 0:
            return x
        k = at.taps["k_cache"][:, [0, 1, 1, 1]]
        return again(at.taps["q_rope"], k, at)

    first = causes(Run(model(), {"scores": spoil}, ranks=2), "scores", rank=1)[0].variant
    assert first.name == "kv_heads_listed"
    assert first.text.endswith(": query head 1 reads KV head 1 instead of 0; the others read their own")


MASKS: list[tuple[str, Any, str, str]] = [
    ("none", lambda at: causal(at) & False, "mask_missing", "see later ones"),
    (
        "strict but for the first",
        lambda at: (distance(at) <= 0) & (where(at)[0] > 0)[:, None] | causal(at),
        "mask_strict",
        "does not see itself",
    ),
    ("one ahead", lambda at: distance(at) < -1, "mask_ahead", "off by 1"),
    ("inverted", lambda at: ~causal(at), "mask_inverted", "inverted"),
    (
        "top left",
        lambda at: ~torch.ones(distance(at).shape, dtype=torch.bool).tril(),
        "mask_top_left",
        "not counted",
    ),
    ("a window", lambda at: causal(at) | (distance(at) >= 4), "window_width", "window of 4 is applied"),
    (
        "blocks of 4",
        lambda at: where(at)[1][None, :] // 4 > where(at)[0][:, None] // 4,
        "mask_blocks",
        "block of 4",
    ),
    (
        "chunks of 4",
        lambda at: causal(at) | (where(at)[1][None, :] // 4 != where(at)[0][:, None] // 4),
        "mask_chunks",
        "chunks of 4",
    ),
    ("prefix of 3", lambda at: causal(at) & (where(at)[1] >= 3), "mask_prefix_seen", "first 3 keys"),
    (
        "key 2 hidden",
        lambda at: causal(at) | (where(at)[1] == 2) & (distance(at) > 0),
        "mask_keys_hidden",
        "the key at 2",
    ),
    (
        "cache masked",
        lambda at: causal(at) | (where(at)[1] < at.start),
        "mask_of_the_step",
        "what is cached is masked",
    ),
]


def masked_by(hidden: Callable[[At], Tensor]) -> Callable[[Tensor, At], Tensor]:
    return lambda x, at: again(at.taps["q_rope"], at.taps["k_cache"], at, hidden=hidden(at))


@pytest.mark.parametrize(
    ("hidden", "name", "words"), [one[1:] for one in MASKS], ids=[one[0] for one in MASKS]
)
def test_wrong_masks_are_named(hidden: Any, name: str, words: str) -> None:
    found = causes(Run(model(), {"scores": masked_by(hidden)}), "scores")
    assert found, "nothing named"
    first = found[0].variant
    assert (first.name, words in first.text) == (name, True), [one.variant.text for one in found]


WINDOWED = model(windows=(5, 5, None))


@pytest.mark.parametrize(
    ("width", "name", "words"),
    [
        (6, "window_width", "one token too wide"),
        (4, "window_width", "one token too narrow"),
        (None, "window_missing", "of 5 is not applied"),
        (8, "window_width", "8 wide instead of 5"),
    ],
)
def test_windows_of_another_width_are_reported_by_the_later_steps(
    width: int | None, name: str, words: str
) -> None:
    spoil = masked_by(lambda at: masked(*where(at), width if at.layer < 2 else None))
    (first, *_) = causes(Run(WINDOWED, {"scores": spoil}), "scores")
    assert (first.variant.name, words in first.variant.text) == (name, True)


def test_a_layer_that_slides_although_it_should_see_all_and_the_other_way() -> None:
    run = Run(WINDOWED, {"scores": masked_by(lambda at: masked(*where(at), None if at.layer < 2 else 5))})
    assert names(run, "scores", layer=1) == ["window_missing"]
    fused = Run(WINDOWED, run.spoil, fused=True)
    (first, *_) = causes(fused, "context", layer=2)
    assert "which this layer does not have (that of layers 0, 1)" in first.variant.text
    (first, *_) = causes(run, "scores", layer=2)
    assert (
        "window of 5 is applied, which this layer does not have (that of layers 0, 1)" in first.variant.text
    )


@pytest.mark.parametrize(
    ("fused", "operation", "name"),
    [(False, "scores", "window_prefill_only"), (True, "context", "window_prefill_only")],
)
def test_a_window_lost_in_decode_is_no_lost_causal_mask(fused: bool, operation: str, name: str) -> None:
    """In decode there is no later key: to see every key and every earlier one is the same."""
    lost = masked_by(lambda at: masked(*where(at), None))
    spoil = {"scores": lambda x, at: x if at.step == 0 else lost(x, at)}
    assert names(Run(WINDOWED, spoil, fused=fused), operation, layer=1)[0] == name


def test_a_mask_that_one_head_lacks_is_reported_of_that_head() -> None:
    def spoil(x: Tensor, at: At) -> Tensor:
        x = x.clone()
        x[5] = again(at.taps["q_rope"], at.taps["k_cache"], at, hidden=causal(at) & False)[5]
        return x

    run = Run(model(), {"scores": spoil})
    deviation = run.site("scores").deviation
    assert deviation is not None
    assert (deviation.heads, deviation.steps) == ((5,), (0,))
    assert "mask_missing" in names(run, "scores")


def test_heads_with_masks_of_their_own() -> None:
    def spoil(x: Tensor, at: At) -> Tensor:
        x = x.clone()
        x[2] = again(at.taps["q_rope"], at.taps["k_cache"], at, hidden=causal(at) | (distance(at) > 2))[2]
        x[5] = again(at.taps["q_rope"], at.taps["k_cache"], at, hidden=distance(at) < -1)[5]
        return x

    (first, *_) = causes(Run(model(), {"scores": spoil}), "scores")
    assert first.variant.name == "mask_of_heads"
    assert "head 2: a sliding window of 3" in first.variant.text
    assert "head 5: each query sees 1 later token" in first.variant.text


@pytest.mark.parametrize(
    ("spoil", "name", "words"),
    [
        (lambda x, at: x.masked_fill(causal(at), -20.0), "mask_finite", "are set to -20"),
        (
            lambda x, at: (
                again(at.taps["q_rope"], at.taps["k_cache"], at, hidden=causal(at) & False)
                - 10.0 * causal(at)
            ),
            "mask_finite",
            "the mask's -10",
        ),
        (lambda x, at: x.masked_fill(causal(at), 0.0), "mask_multiplied", "scores 0"),
        (
            lambda x, at: (
                again(at.taps["q_rope"], at.taps["k_cache"], at, hidden=causal(at) & False) + (~causal(at))
            ),
            "mask_bool_added",
            "as 1 and 0",
        ),
        (lambda x, at: x.masked_fill(causal(at), torch.nan), "mask_zero_times_inf", "should hide"),
        (lambda x, at: x + causal(at).float() * -INF, "mask_zero_times_inf", "that it allows"),
    ],
    ids=["set to -20", "adds -10", "multiplied", "bool added", "allowed NaN", "zero times inf"],
)
def test_masks_that_are_numbers(spoil: Any, name: str, words: str) -> None:
    found = causes(Run(model(), {"scores": spoil}), "scores")
    assert [one.variant.name for one in found][:1] == [name]
    assert words in found[0].variant.text


def test_a_weak_mask_on_scores_that_leave_no_probability_anyhow() -> None:
    """Of large scores many are as good as masked with it: they are no evidence against it."""

    def spoil(x: Tensor, at: At) -> Tensor:
        hidden = causal(at)
        return again(at.taps["q_rope"], at.taps["k_cache"], at, hidden=hidden & False) - 10.0 * hidden

    run = Run(model(), {"scores": spoil}, size=6.0)
    assert np.isneginf(run.site("scores").parts[0].seen).any()
    found = causes(run, "scores")
    assert [one.variant.name for one in found][:1] == ["mask_finite"]
    assert "the mask's -10" in found[0].variant.text


@cache
def right() -> Run:
    return Run(WINDOWED)


@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float32).min, -1e4, -65504.0])
def test_equivalent_mask_values_are_not_accused(value: float) -> None:
    run = Run(WINDOWED, {"scores": lambda x, at: x.masked_fill(x == -INF, value)})
    assert [run.site(kind, layer).deviation for kind in ("scores", "probs") for layer in range(3)] == [
        None
    ] * 6


def test_nothing_is_accused_where_nothing_is_wrong() -> None:
    kinds = ("k_cache", "v_cache", "scores", "probs", "context")
    assert [right().site(kind, layer).deviation for kind in kinds for layer in range(3)] == [None] * 15


def test_random_damage_to_scores_is_not_blamed_on_anything() -> None:
    noise = torch.Generator().manual_seed(5)
    for size in (1e-3, 1.0):
        run = Run(model(), {"scores": lambda x, at, s=size: x + s * torch.randn(x.shape, generator=noise)})
        assert run.site("scores").deviation is not None
        assert names(run, "scores") == []


def test_decode_alone_is_named_from_all_steps_together() -> None:
    run = Run(model(), {"scores": lambda x, at: x * 4 if at.step else x})
    (first, *_) = causes(run, "scores")
    assert first.variant.name == "scores_scale"


def test_one_rank_that_reads_another_rank_s_heads() -> None:
    def spoil(x: Tensor, at: At) -> Tensor:
        if at.rank == 0:
            return x
        other = at.run.held[f"layers.{at.layer}.attn.k_cache", 0][-1]
        return again(at.taps["q_rope"], other, at)

    run = Run(model(), {"scores": spoil}, ranks=2)
    assert run.site("scores", rank=0).deviation is None
    (first, *_) = causes(run, "scores", rank=1)
    assert first.variant.text == "cached keys: rows are those of rank 0"


def test_a_cache_that_repeats_its_heads_is_held_against_no_rows_of_fewer() -> None:
    """What other sequences have written has four heads, the cache eight, of which the first four are read."""

    def doubled(x: Tensor, at: At) -> Tensor:
        return x.repeat_interleave(2, 1)

    spoil = {"k_cache": doubled, "v_cache": doubled}
    run = Run(
        model(), {**spoil, "scores": lambda x, at: again(at.taps["q_rope"], at.taps["k_cache"][:, :4], at)}
    )
    assert [one.variant.name for one in causes(run, "scores")][:1] == ["kv_heads_listed"]
