"""The KV cache, norms and the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.patched import Patched

Pair = tuple[Tensor, Tensor]


@bug(
    "cache",
    accepted=("cache", "precision"),
    words="cache|quant|round|clamp|saturat|precision|bit",
    taps=("attn.k_cache",),
    model="llama",
)
def keys_quantised_by_the_scale_of_the_first_token(p: Patched) -> None:
    """Eight bits; what is larger than the first token's keys saturates."""
    for i, _ in p.layers():
        scales: dict[int, Tensor] = {}

        def written(k: Tensor, v: Tensor, scales: dict[int, Tensor] = scales) -> Pair:
            if not p.decode:
                scales[p.seq] = k[:, :, :1].abs().amax(-1, keepdim=True) / 127
            scale = scales[p.seq]
            return (k / scale).round().clamp(-127, 127) * scale, v

        p.cache((i,), written=written)


@bug(
    "cache",
    accepted=("cache",),
    words="cache|value|key|row|slot",
    taps=("attn.v_cache",),
    layers=(1,),
    step=1,
    model="qwen2-tied",
)
def decode_stores_the_key_in_both_caches(p: Patched) -> None:
    p.cache((1,), written=lambda k, v: (k, k) if p.decode else (k, v))


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|sequence|other|foreign|cache|overwrit",
    taps=CACHES,
    step=2,
    model="llama",
)
def forked_sequences_write_to_one_page(p: Patched) -> None:
    """No copy on write: the second sequence's new rows lie in the first one's slots when it reads them again."""
    for i, _ in p.layers():
        page: list[Pair] = []

        def read(k: Tensor, v: Tensor, page: list[Pair] = page) -> Pair:
            if p.decode and p.seq == 1:
                page.append((k[:, :, -1].clone(), v[:, :, -1].clone()))
            elif p.decode:
                k, v, begin = k.clone(), v.clone(), p.model.prompt_lengths[0]
                for slot, (key, value) in enumerate(page, begin):
                    k[:, :, slot], v[:, :, slot] = key, value
            return k, v

        p.cache((i,), read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|shift|cache|overwrit",
    taps=CACHES,
    model="mistral-full",
)
def second_chunk_written_from_the_last_slot_of_the_first(p: Patched) -> None:
    """Chunks of eight tokens: from there on each row lies one slot early, and the last slot is empty."""

    def early(rows: Tensor) -> Tensor:
        size = p.model.prompt_lengths[p.seq]
        if size <= 8:
            return rows
        empty = torch.zeros_like(rows[:, :, :1])
        return torch.cat((rows[:, :, :7], rows[:, :, 8:size], empty, rows[:, :, size:]), 2)

    p.cache(read=lambda k, v: (early(k), early(v)))


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="norm|weight|layer",
    taps=("attn.k_norm",),
    layers=(2,),
    step=1,
    model="qwen3",
)
def decode_norms_the_keys_by_the_weight_of_the_layer_before(p: Patched) -> None:
    before = p.attn(1).k_norm.forward

    def around(forward: Any, x: Tensor) -> Tensor:
        normed: Tensor = before(x) if p.decode else forward(x)
        return normed

    p.wrap(p.attn(2).k_norm, around)


@bug(
    "residual",
    accepted=("residual",),
    words="residual|stream|added",
    taps=("attn_residual",),
    layers=(1,),
    model="llama",
)
def residual_added_to_whole_tiles_of_tokens_alone(p: Patched) -> None:
    def attn(residual: Tensor, out: Tensor) -> Tensor:
        if p.decode:
            return residual + out
        whole = out.shape[1] // 4 * 4
        return torch.cat((residual[:, :whole] + out[:, :whole], out[:, whole:]), 1)

    p.residuals(1, attn=attn)


@bug(
    "norm",
    accepted=("norm", "scale"),
    words="norm|scale|factor",
    taps=("final_norm",),
    step=1,
    model="mistral-full",
)
def decode_norms_by_the_root_of_the_token_before(p: Patched) -> None:
    """The buffer of inverse roots is read before this step's are in it."""
    roots: dict[int, Tensor] = {}

    def around(forward: Any, x: Tensor) -> Tensor:
        root = x.square().mean(-1, keepdim=True).sqrt()[:, -1:]
        normed: Tensor = forward(x)
        if p.decode:
            normed = normed * root / roots[p.seq]
        roots[p.seq] = root
        return normed

    p.wrap(p.decoder.norm, around)
