"""Held out: cache rows: scaled, foreign, shifted, rounded, of another length."""

from __future__ import annotations

import math

import torch

from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _in_decode(p, change):
    return lambda k, v: change(k, v) if p.decode else (k, v)


@bug(
    "cache",
    accepted=("cache", "scale"),
    words="scale|factor|half|0\\.5|times",
    taps=("attn.k_cache",),
    model="llama",
)
def keys_read_without_their_scale(p: Patched) -> None:
    p.cache(read=lambda k, v: (0.5 * k, v))


@bug(
    "cache",
    accepted=("cache", "scale"),
    words="scale|factor|times",
    taps=("attn.v_cache",),
    step=1,
    layers=(1,),
    model="qwen3",
)
def old_values_scaled(p: Patched) -> None:
    def read(k, v):
        v = v.clone()
        v[:, :, : p.past] *= 1.25
        return k, v

    p.cache((1,), read=_in_decode(p, read))


@bug(
    "cache",
    accepted=("cache", "precision"),
    words="round|precis|bfloat16|bf16|8.bit|fp8",
    taps=CACHES,
    model="llama",
)
def cache_in_bfloat16(p: Patched) -> None:
    p.cache(written=lambda k, v: (k.bfloat16().float(), v.bfloat16().float()))


@bug(
    "cache",
    accepted=("cache", "precision"),
    words="round|precis|fp8|float8|8.bit|quant",
    taps=("attn.v_cache",),
    model="qwen2-tied",
)
def values_in_eight_bits(p: Patched) -> None:
    p.cache(written=lambda k, v: (k, v.to(torch.float8_e4m3fn).float()))


@bug("cache", accepted=("cache",), words="sequence|another|other|foreign", taps=CACHES, step=1, model="llama")
def the_other_sequence_s_rows(p: Patched) -> None:
    def layer(i):
        def read(k, v):
            other = p.caches[1 - p.seq].layers[i] if len(p.caches) > 1 else None
            if other is None or p.seq == 0:
                return k, v
            k, v = k.clone(), v.clone()
            k[:, :, :4], v[:, :, :4] = other.keys[:, :, :4], other.values[:, :, :4]
            return k, v

        return read

    for i, _ in p.layers():
        p.cache((i,), read=_in_decode(p, layer(i)))


@bug(
    "cache",
    accepted=("cache",),
    words="length|row|short|miss|drop|lost|oldest|first",
    taps=(*CACHES, "attn.scores"),
    step=1,
    model="qwen3",
)
def oldest_row_dropped(p: Patched) -> None:
    p.cache(read=_in_decode(p, lambda k, v: (k[:, :, 1:], v[:, :, 1:])))


@bug(
    "cache",
    accepted=("cache",),
    words="length|row|more|extra|stale|longer|zero",
    taps=(*CACHES, "attn.scores"),
    step=1,
    model="llama",
)
def one_row_too_many(p: Patched) -> None:
    def read(k, v):
        return torch.cat([torch.zeros_like(k[:, :, :1]), k], 2), torch.cat(
            [torch.zeros_like(v[:, :, :1]), v], 2
        )

    p.cache(read=_in_decode(p, read))


@bug(
    "cache", accepted=("cache",), words="row|zero|stale|written|slot|last", taps=CACHES, step=1, model="qwen3"
)
def last_row_of_the_prompt_never_written(p: Patched) -> None:
    def read(k, v):
        k, v = k.clone(), v.clone()
        at = p.model.prompt_lengths[p.seq] - 1
        k[:, :, at], v[:, :, at] = 0, 0
        return k, v

    p.cache(read=_in_decode(p, read))


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|overwrit|window|wrap|oldest|ring|stale",
    taps=CACHES,
    step=1,
    model="llama",
)
def ring_of_eight_slots(p: Patched) -> None:
    def layer(i):
        def read(k, v):
            k, v = k.clone(), v.clone()
            for at in range(8, k.shape[2]):
                k[:, :, at - 8], v[:, :, at - 8] = k[:, :, at], v[:, :, at]
            return k, v

        return read

    for i, _ in p.layers():
        p.cache((i,), read=_in_decode(p, layer(i)))


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|overwrit|last|same|stale",
    taps=CACHES,
    step=2,
    model="qwen2-tied",
)
def new_row_written_over_the_one_before(p: Patched) -> None:
    def read(k, v):
        if p.step < 2:
            return k, v
        k, v = k.clone(), v.clone()
        k[:, :, -2], v[:, :, -2] = k[:, :, -1], v[:, :, -1]
        return k, v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache", "overflow"),
    words="NaN|stale|uninitiali|slot|poison",
    taps=("attn.v_cache", "attn.context"),
    step=2,
    layers=(1,),
    model="llama",
)
def a_stale_slot_holds_nan(p: Patched) -> None:
    def read(k, v):
        if p.step < 2:
            return k, v
        v = v.clone()
        v[:, :, 2] = math.nan
        return k, v

    p.cache((1,), read=read)


@bug(
    "cache",
    accepted=("cache", "sharding"),
    words="rank|row|stale|zero",
    taps=CACHES,
    step=1,
    ranks=(1,),
    model="qwen2-tied",
    tp=2,
)
def old_rows_lost_on_one_rank(p: Patched) -> None:
    def read(k, v):
        k, v = k.clone(), v.clone()
        k[:, :, : p.past], v[:, :, : p.past] = 0, 0
        return k, v

    if p.rank == 1:
        p.cache(read=_in_decode(p, read))


@bug(
    "cache",
    accepted=("cache",),
    words="cache|not used|current|own|length",
    taps=(*CACHES, "attn.scores"),
    step=1,
    layers=(0, 1, 2),
    model="mistral-full",
)
def cache_not_used_in_decode(p: Patched) -> None:
    p.cache(read=_in_decode(p, lambda k, v: (k[:, :, -1:], v[:, :, -1:])))


@bug(
    "cache",
    accepted=("cache",),
    words="order|permut|block|page|row|exchang|swap",
    taps=CACHES,
    step=1,
    model="llama",
)
def two_blocks_exchanged(p: Patched) -> None:
    def read(k, v):
        order = list(range(k.shape[2]))
        order[:4] = order[2:4] + order[:2]
        return k[:, :, order], v[:, :, order]

    p.cache(read=_in_decode(p, read))


@bug(
    "cache",
    accepted=("cache",),
    words="row|stale|step|old|same|frozen",
    taps=CACHES,
    step=1,
    layers=(2,),
    model="qwen3",
)
def rows_of_the_prompt_alone_are_read(p: Patched) -> None:
    held = {}

    def read(k, v):
        length = p.model.prompt_lengths[p.seq]
        if not p.decode:
            held[p.seq] = k, v
            return k, v
        k, v = k.clone(), v.clone()
        k[:, :, length:], v[:, :, length:] = k[:, :, length - 1 : length], v[:, :, length - 1 : length]
        return k, v

    p.cache((2,), read=read)
