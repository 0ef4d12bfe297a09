"""Masks: who sees whom."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "mask",
    accepted=("mask",),
    words="mask|see|hidden|key|allow",
    taps=("attn.scores",),
    model="qwen2-untied",
)
def last_tokens_masked_as_siblings_of_a_draft_tree(p: Patched) -> None:
    """A tree of drafts has been there before: the last three tokens of the prompt do not see each other."""

    def allow(allowed):
        allowed = allowed.clone()
        if allowed.shape[2] > 3:
            allowed[..., -3:, -3:] = torch.eye(3, dtype=torch.bool)
        return allowed

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask", "precision"),
    words="mask|see|future|key|allow|causal",
    taps=("attn.scores",),
    model="llama-long",
)
def mask_compares_positions_in_bfloat16(p: Patched) -> None:
    """Beyond 256 two positions are one number."""

    def allow(allowed):
        rows, keys = allowed.shape[2:]
        at = torch.arange(keys).bfloat16()
        return (at <= at[keys - rows :, None])[None, None]

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|window|head|key|see",
    taps=("attn.scores",),
    layers=(1,),
    heads=(3,),
    model="mistral-full",
)
def one_head_streams_though_it_should_retrieve(p: Patched) -> None:
    """It sees the first key and the last four, as a streaming head does."""

    def allow(allowed):
        rows, keys = allowed.shape[2:]
        at = torch.arange(keys)
        near = (at > at[keys - rows :, None] - 4) | (at == 0)
        allowed = allowed.expand(1, 8, rows, keys).clone()
        allowed[:, 3] &= near
        return allowed

    p.attention((1,), allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|future|transpos|triangle|causal|see",
    taps=("attn.scores",),
    layers=(1,),
    model="llama-mha",
    tp=2,
)
def triangle_the_other_way_round_in_one_layer(p: Patched) -> None:
    """Rows and columns of a square mask exchanged."""

    def allow(allowed):
        square = allowed.shape[2] == allowed.shape[3]
        return allowed.transpose(2, 3) if square else allowed

    p.attention((1,), allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|see|key|tile|diagonal|allow|causal",
    taps=("attn.scores",),
    model="qwen3",
    dtype="bfloat16",
)
def key_tiles_of_the_last_query_tile_rounded_down(p: Patched) -> None:
    """Tiles of four: the last, unfilled one does not see its own keys."""

    def allow(allowed):
        rows, keys = allowed.shape[2:]
        whole = rows // 4 * 4
        if rows < 4 or whole == rows:
            return allowed
        allowed = allowed.clone()
        allowed[..., whole:, keys - rows + whole :] = False
        return allowed

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|see|key|padd|allow|own",
    taps=("attn.scores",),
    step=1,
    model="llama-bias",
)
def decoded_keys_within_the_padded_bucket_stay_masked(p: Patched) -> None:
    """The prompt was padded to a multiple of eight; the slots of the padding are used, but still masked."""

    def allow(allowed):
        if not p.decode:
            return allowed
        prompt = p.model.prompt_lengths[p.seq]
        allowed = allowed.clone()
        allowed[..., prompt : -(-prompt // 8) * 8] = False
        return allowed

    p.attention(allow=allow)
