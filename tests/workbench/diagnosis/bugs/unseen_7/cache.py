"""The KV cache: slots, pages, what is rounded, what is not yet there."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _slots(p, change):
    """`change(rows)` spoils a copy of the rows [1, kv_heads, K, D] that decode reads."""

    def read(k, v):
        if not p.decode:
            return k, v
        k, v = k.clone(), v.clone()
        change(k), change(v)
        return k, v

    return read


@bug(
    "cache",
    accepted=("cache",),
    words="slot|row|overwrit|page|new|padd|last|other",
    taps=CACHES,
    step=1,
    model="llama",
    dtype="bfloat16",
)
def padding_slot_of_minus_one_is_the_last_of_the_page(p: Patched) -> None:
    """vllm#43810: rows of the padding are those of the new token, and land in slot 3."""

    def change(rows):
        rows[:, :, 3] = rows[:, :, -1]

    p.cache(read=_slots(p, change))


@bug(
    "cache",
    accepted=("cache", "precision"),
    words="round|precis|int8|8.bit|quant",
    taps=CACHES,
    model="llama-bias",
)
def cache_in_eight_bits_with_one_scale_for_all_heads(p: Patched) -> None:
    def rounded(rows):
        step = rows.abs().max() / 127
        return (rows / step).round() * step

    p.cache(written=lambda k, v: (rounded(k), rounded(v)))


@bug(
    "cache",
    accepted=("cache",),
    words="current|new|own|written|row|zero|stale|missing|last",
    taps=CACHES,
    ranks=(0,),
    step=1,
    model="mistral-full",
    dtype="bfloat16",
    tp=2,
)
def rank_0_attends_before_its_new_row_is_written(p: Patched) -> None:
    def change(rows):
        rows[:, :, -1] = 0

    if p.rank == 0:
        p.cache(read=_slots(p, change))


@bug(
    "cache",
    accepted=("cache",),
    words="slot|row|overwrit|zero|stuck|same|new|missing|empty",
    taps=CACHES,
    step=2,
    model="qwen3",
)
def every_decoded_row_lands_in_the_slot_of_the_first(p: Patched) -> None:
    def change(rows):
        first = rows.shape[2] - p.step
        rows[:, :, first] = rows[:, :, -1]
        rows[:, :, first + 1 :] = 0

    p.cache(read=_slots(p, change))


@bug(
    "cache",
    accepted=("cache", "mask"),
    words="window|row|slot|oldest|zero|evict|drop|missing|early",
    taps=CACHES,
    step=1,
    model="mistral-window",
    dtype="bfloat16",
)
def rolling_cache_evicts_a_row_still_in_the_window(p: Patched) -> None:
    def change(rows):
        rows[:, :, :-7] = 0

    p.cache(read=_slots(p, change))


@bug(
    "cache",
    accepted=("cache", "positions"),
    words="slot|row|shift|offset|padd|zero|position",
    taps=CACHES,
    model="llama-deep",
)
def rows_of_the_shorter_prompt_cached_behind_slots_of_padding(p: Patched) -> None:
    """Its last two rows do not find room."""

    def written(k, v):
        if p.decode or p.seq == 0:
            return k, v
        return pad(k, (0, 0, 2, 0))[:, :, :-2], pad(v, (0, 0, 2, 0))[:, :, :-2]

    p.cache(written=written)


@bug(
    "cache",
    accepted=("cache", "heads"),
    words="head|zero|empty|never|missing|row",
    taps=CACHES,
    layers=(1,),
    heads=(3,),
    model="llama",
    dtype="bfloat16",
)
def last_kv_head_of_the_prompt_never_cached_in_one_layer(p: Patched) -> None:
    def without(rows):
        return torch.cat([rows[:, :3], torch.zeros_like(rows[:, 3:])], 1) if not p.decode else rows

    p.cache((1,), written=lambda k, v: (without(k), without(v)))
