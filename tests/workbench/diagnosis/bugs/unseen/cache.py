"""The KV cache: slots, pages, layouts, dtypes, and rows of somebody else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.patched import Patched

Pair = tuple[Tensor, Tensor]


@bug(
    "cache",
    accepted=("cache",),
    words="slot|row|shift|cache",
    taps=("attn.v_cache",),
    step=1,
    model="qwen2-tied",
)
def value_written_one_slot_early(p: Patched) -> None:
    """In decode; the keys go where they belong."""

    def read(k: Tensor, v: Tensor) -> Pair:
        begin = p.model.prompt_lengths[p.seq]
        if p.decode:
            v = torch.cat((v[:, :, : begin - 1], v[:, :, begin:], torch.zeros_like(v[:, :, :1])), 2)
        return k, v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("precision", "cache"),
    words="precision|fp8|float8|round|quant",
    taps=CACHES,
    model="llama",
)
def cache_kept_in_fp8_unasked(p: Patched) -> None:
    def written(k: Tensor, v: Tensor) -> Pair:
        return k.to(torch.float8_e4m3fn).to(k.dtype), v.to(torch.float8_e4m3fn).to(v.dtype)

    p.cache(written=written)


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|sequence|other|foreign|cache",
    taps=CACHES,
    model="qwen3",
)
def prefix_of_another_prompt_taken_for_one_s_own(p: Patched) -> None:
    """A hash that does not cover the tokens: the second prompt gets the first one's block."""
    for i, _ in p.layers():
        block: list[Tensor] = []

        def read(k: Tensor, v: Tensor, block: list[Tensor] = block) -> Pair:
            if p.seq == 0:
                block[:] = block or [k[:, :, :4].clone(), v[:, :, :4].clone()]
                return k, v
            return torch.cat((block[0], k[:, :, 4:]), 2), torch.cat((block[1], v[:, :, 4:]), 2)

        p.cache((i,), read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|cache|overwrit",
    taps=CACHES,
    step=4,
    model="llama",
)
def ring_of_sixteen_slots_wraps(p: Patched) -> None:
    def wrap(rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[:, :, : max(rows.shape[2] - 16, 0)] = rows[:, :, 16:]
        return rows

    p.cache(read=lambda k, v: (wrap(k), wrap(v)))


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|sequence|other|foreign|cache|overwrit",
    taps=CACHES,
    step=2,
    model="mistral-full",
)
def page_given_away_while_in_use(p: Patched) -> None:
    """From the second decode step on the second page of the first sequence holds the other's rows."""
    for i, _ in p.layers():
        page: list[Tensor] = []

        def read(k: Tensor, v: Tensor, page: list[Tensor] = page) -> Pair:
            if p.seq == 1:
                page[:] = [k[:, :, 4:8].clone(), v[:, :, 4:8].clone()]
            elif p.step >= 2:
                k, v = k.clone(), v.clone()
                for rows, others in zip((k, v), page, strict=True):
                    rows[:, :, 4 : 4 + others.shape[2]] = others
            return k, v

        p.cache((i,), read=read)


@bug(
    "cache",
    accepted=("cache", "rope"),
    words="rotat|rope|before",
    taps=("attn.k_cache",),
    step=1,
    model="qwen2-untied",
)
def decode_caches_the_key_before_its_rotation(p: Patched) -> None:
    for i, _ in p.layers():
        raw: list[Tensor] = []

        def rotate(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, raw: Any = raw) -> Pair:
            raw[:] = [k]
            turned: Pair = apply(q, k, cos, sin)
            return turned

        p.rotate(rotate, (i,))
        p.cache((i,), written=lambda k, v, raw=raw: (raw[0] if p.decode else k, v))


@bug(
    "cache",
    accepted=("cache", "scale"),
    words="scale|factor|head",
    taps=("attn.v_cache",),
    layers=(1,),
    heads=(1,),
    model="qwen2-tied",
)
def scale_of_one_cached_head_not_undone(p: Patched) -> None:
    p.cache((1,), written=lambda k, v: (k, v * torch.tensor([1.0, 0.5])[:, None, None]))


@bug(
    "cache",
    accepted=("cache",),
    words="row|last|new|zero|stale|cache|slot",
    taps=CACHES,
    layers=(2,),
    step=1,
    model="qwen3",
)
def one_layer_reads_before_the_write_has_landed(p: Patched) -> None:
    def read(k: Tensor, v: Tensor) -> Pair:
        if p.decode:
            k, v = k.clone(), v.clone()
            k[:, :, -1], v[:, :, -1] = 0, 0
        return k, v

    p.cache((2,), read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="cache|layout|row|head|slot|order|moved",
    taps=CACHES,
    ranks=(1,),
    model="llama",
    tp=2,
)
def rank_1_reads_rows_of_heads_as_heads_of_rows(p: Patched) -> None:
    """Written as [slots, heads, D], read as [heads, slots, D]."""

    def read(k: Tensor, v: Tensor) -> Pair:
        return k.transpose(1, 2).reshape(k.shape), v.transpose(1, 2).reshape(v.shape)

    if p.rank == 1:
        p.cache(read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="cache|head|row|zero|slot",
    taps=CACHES,
    heads=(3,),
    step=1,
    model="llama-bias",
)
def decode_never_caches_the_last_head(p: Patched) -> None:
    def written(k: Tensor, v: Tensor) -> Pair:
        if p.decode:
            k, v = k.clone(), v.clone()
            k[:, 3], v[:, 3] = 0, 0
        return k, v

    p.cache(written=written)
