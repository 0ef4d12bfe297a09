"""Who sees whom: triangle, window, chunks, padding, documents."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _places(allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the queries [T, 1] and of the keys [K]."""
    new, keys = allowed.shape[-2:]
    return torch.arange(keys - new, keys)[:, None], torch.arange(keys)


@bug(
    "mask",
    accepted=("mask",),
    words="window|mask|key|sliding|chunk",
    taps=("attn.scores",),
    model="mistral-long",
)
def window_of_the_second_chunk_measured_from_its_first_row(p: Patched) -> None:
    """lalamo#200: chunks of 96, a window of 64; behind the first chunk 96 keys more are seen than should be."""

    def allow(allowed):
        queries, keys = _places(allowed)
        return allowed if p.decode else (keys <= queries) & (keys > queries % 96 - 64)

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|key|document|earlier|prefix|before|past|old",
    taps=("attn.scores",),
    model="llama",
    dtype="bfloat16",
)
def text_behind_an_end_token_sees_nothing_before_it(p: Patched) -> None:
    """Packed documents are kept apart as in training; the first prompt has the token before its last."""

    def allow(allowed):
        queries, keys = _places(allowed)
        return allowed & ~((queries >= 12) & (keys < 12)) if p.seq == 0 else allowed

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask", "heads"),
    words="mask|key|head|spars|every|distance|stride|pattern",
    taps=("attn.scores",),
    layers=(1,),
    heads=(4, 5, 6, 7),
    model="qwen3",
)
def dilated_heads_of_a_sparse_run_see_every_other_key(p: Patched) -> None:
    def allow(allowed):
        queries, keys = _places(allowed)
        even = ((queries - keys) % 2 == 0)[None, None]
        return torch.cat([allowed.expand(1, 4, -1, -1), (allowed & even).expand(1, 4, -1, -1)], 1)

    p.attention((1,), allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|diagonal|itself|own|key|last|causal|triangle",
    taps=("attn.scores",),
    model="qwen2-kv8",
    dtype="bfloat16",
    tp=2,
)
def last_query_of_each_tile_does_not_see_itself(p: Patched) -> None:
    """Tiles of four: the key's index is compared with one less than the tile's end."""

    def allow(allowed):
        queries, keys = _places(allowed)
        return allowed & ~((queries % 4 == 3) & (keys == queries)) if not p.decode else allowed

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask", "cache"),
    words="mask|length|key|last|new|short|late|other|behind|hidden",
    taps=("attn.scores",),
    step=1,
    model="mistral-full",
    dtype="bfloat16",
)
def first_sequence_decodes_with_the_length_of_the_second(p: Patched) -> None:
    def allow(allowed):
        _, keys = _places(allowed)
        return allowed & (keys < p.model.prompt_lengths[1] + p.step) if p.decode and not p.seq else allowed

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|chunk|key|block|window|local",
    taps=("attn.scores",),
    ranks=(2,),
    model="llama-mha",
    tp=4,
)
def rank_2_attends_within_chunks_of_eight(p: Patched) -> None:
    """Its worker has read `attention_chunk_size` from the defaults of another family."""

    def allow(allowed):
        queries, keys = _places(allowed)
        return allowed & (queries // 8 == keys // 8)

    if p.rank == 2:
        p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="mask|key|padd|token|second|hidden|column",
    taps=("attn.scores",),
    model="qwen3",
    dtype="bfloat16",
)
def token_with_the_id_of_padding_is_masked_as_such(p: Patched) -> None:
    """The mask is made of `ids != 3`, which here is also a word."""
    words = {}

    def around(forward, ids):
        known = words.get(p.seq, ids[:, :0]) if p.decode else ids[:, :0]
        words[p.seq] = torch.cat([known, ids], 1)
        return forward(ids)

    p.wrap(p.decoder.embed_tokens, around)
    p.attention(allow=lambda allowed: allowed & (words[p.seq][0] != 3))


@bug(
    "mask",
    accepted=("mask",),
    words="mask|key|row|last|causal|triangle|newer|own|behind|hidden",
    taps=("attn.scores",),
    model="llama-bias",
    tp=2,
)
def rows_behind_a_captured_mask_of_eight_take_its_last(p: Patched) -> None:
    """The index of the row is clamped: later tokens see the first eight, and not themselves."""

    def allow(allowed):
        _, keys = _places(allowed)
        return allowed & (keys < 8) | (allowed & (torch.arange(p.new)[:, None] < 8))

    p.attention(allow=lambda allowed: allowed if p.decode else allow(allowed))


@bug(
    "mask",
    accepted=("mask",),
    words="mask|causal|future|later|tile|block|triangle|key|next",
    taps=("attn.scores",),
    model="qwen3-bias",
)
def triangle_ends_with_the_whole_tile(p: Patched) -> None:
    """Tiles of four by four; the one on the diagonal is not masked inside."""

    def allow(allowed):
        queries, keys = _places(allowed)
        return allowed if p.decode else (keys <= queries // 4 * 4 + 3)[None, None]

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask",),
    words="window|mask|key|sliding",
    taps=("attn.scores",),
    model="mistral-window",
    tp=2,
)
def window_is_divided_among_the_ranks(p: Patched) -> None:
    """With all the sizes of the configuration: four keys in place of eight."""

    def allow(allowed):
        queries, keys = _places(allowed)
        return allowed & (keys > queries - 8 // p.tp)

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask", "cache"),
    words="mask|key|column|hidden|prefix|missing|row|skipp",
    taps=("attn.scores",),
    step=1,
    model="llama-three",
)
def key_behind_the_shared_prefix_belongs_to_no_part(p: Patched) -> None:
    """Cascade attention over a common prefix of four: the suffix begins one too late."""

    def allow(allowed):
        _, keys = _places(allowed)
        return allowed & (keys != 4) if p.decode else allowed

    p.attention(allow=allow)


@bug(
    "mask",
    accepted=("mask", "softmax"),
    words="mask|causal|triangle|align|diagonal|key|early|nothing|offset|own",
    taps=("attn.scores",),
    model="qwen2-untied",
)
def triangle_aligned_at_the_end_of_padded_queries(p: Patched) -> None:
    """A multiple of eight: of 13 queries each sees three keys too few, the first three none."""

    def allow(allowed):
        queries, keys = _places(allowed)
        return allowed if p.decode else (keys <= queries - -p.new % 8)[None, None]

    p.attention(allow=allow)
