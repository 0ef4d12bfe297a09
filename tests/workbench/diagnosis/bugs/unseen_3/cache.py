"""The KV cache: block tables, strides, growth, scales, what is stored too early, one rank's copy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.patched import Patched

Pair = tuple[Tensor, Tensor]


@bug(
    "cache",
    accepted=("cache",),
    words="row|stale|slot|another|token|position|differ",
    taps=CACHES,
    step=2,
    model="llama",
)
def row_of_a_rejected_draft_stays_in_the_cache(p: Patched) -> None:
    """The first decoded token keeps what the draft wrote into its slot."""

    def read(k: Tensor, v: Tensor) -> Pair:
        if p.step >= 2:
            slot = p.model.prompt_lengths[p.seq]
            k, v = k.clone(), v.clone()
            k[:, :, slot], v[:, :, slot] = k[:, :, slot - 2], v[:, :, slot - 2]
        return k, v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="page|block|row|slot|repeat|first|another|position",
    taps=CACHES,
    step=1,
    model="qwen3",
    dtype="bfloat16",
)
def unfilled_entry_of_the_block_table_reads_the_first_page(p: Patched) -> None:
    """Pages of four slots; the entry of the third page is still zero."""

    def read(k: Tensor, v: Tensor) -> Pair:
        if p.decode and k.shape[2] >= 12:
            k, v = k.clone(), v.clone()
            k[:, :, 8:12], v[:, :, 8:12] = k[:, :, :4], v[:, :, :4]
        return k, v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="transpos|layout|order|permut|shuffl",
    taps=("attn.v_cache",),
    layers=(2,),
    step=1,
    model="llama",
)
def values_stored_transposed_are_read_as_rows(p: Patched) -> None:
    p.cache((2,), read=lambda k, v: (k, v.transpose(2, 3).reshape(v.shape) if p.decode else v))


@bug(
    "cache",
    accepted=("cache", "scale"),
    words="scale|factor|times|multipl|1\\.6|0\\.6",
    taps=CACHES,
    step=1,
    model="mistral-full",
)
def scales_of_cached_keys_and_values_exchanged(p: Patched) -> None:
    """An 8-bit cache whose scale of keys is 1.6 times smaller than that of values."""
    p.cache(read=lambda k, v: (k * 1.6, v / 1.6) if p.decode else (k, v))


@bug(
    "cache",
    accepted=("cache", "bias"),
    words="bias",
    taps=("attn.v_cache",),
    model="qwen2-untied",
)
def values_cached_before_their_bias(p: Patched) -> None:
    for i, layer in p.layers():
        bias = layer.self_attn.v_proj.bias.view(4, 1, -1)
        p.cache((i,), written=lambda k, v, bias=bias: (k, v - bias))


@bug(
    "cache",
    accepted=("cache", "norm"),
    words="norm",
    taps=("attn.k_cache",),
    layers=(2,),
    model="qwen3",
)
def keys_of_the_last_layer_cached_before_their_norm(p: Patched) -> None:
    held: dict[str, Tensor] = {}

    def norm(forward: Any, x: Tensor) -> Tensor:
        held["raw"] = x.transpose(1, 2)
        normed: Tensor = forward(x)
        return normed

    def rotate(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        held["k"] = apply(held["raw"], held["raw"], cos, sin)[1]
        turned: Pair = apply(q, k, cos, sin)
        return turned

    p.wrap(p.attn(2).k_norm, norm)
    p.rotate(rotate, (2,))
    p.cache((2,), written=lambda k, v: (held["k"], v))


@bug(
    "cache",
    accepted=("cache",),
    words="zero|lost|row|empty|missing|slot",
    taps=CACHES,
    step=4,
    model="qwen2-tied",
)
def growth_of_the_cache_copies_half_of_the_rows(p: Patched) -> None:
    """It holds 16 rows; the seventeenth makes it grow."""

    def read(k: Tensor, v: Tensor) -> Pair:
        if k.shape[2] > 16:
            k, v = k.clone(), v.clone()
            k[:, :, 8:16], v[:, :, 8:16] = 0, 0
        return k, v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache", "heads", "positions"),
    words="shift|head|stride|slot|row|offset",
    taps=CACHES,
    heads=(1, 2, 3),
    step=1,
    model="llama",
)
def head_stride_of_the_cache_is_one_row_short(p: Patched) -> None:
    def short(rows: Tensor) -> Tensor:
        length, dim = rows.shape[2:]
        return rows.reshape(-1).as_strided(rows.shape, (0, (length - 1) * dim, dim, 1)).clone()

    p.cache(read=lambda k, v: (short(k), short(v)) if p.decode else (k, v))


@bug(
    "cache",
    accepted=("cache", "sharding"),
    words="sequence|row|rank|another|other|page|block",
    taps=CACHES,
    ranks=(1,),
    step=1,
    model="llama",
    tp=2,
)
def block_table_of_rank_1_gives_the_second_sequence_the_first_one_s_pages(p: Patched) -> None:
    if p.rank == 1:
        for i, _ in p.layers():

            def read(k: Tensor, v: Tensor, i: int = i) -> Pair:
                if p.decode and p.seq == 1:
                    other, old = p.caches[0].layers[i], slice(0, p.past)
                    k, v = k.clone(), v.clone()
                    k[:, :, old], v[:, :, old] = other.keys[:, :, old], other.values[:, :, old]
                return k, v

            p.cache((i,), read=read)


@bug(
    "cache",
    accepted=("cache", "sharding"),
    words="rank|replica|zero|row|new|never|missing|empty",
    taps=CACHES,
    ranks=(1, 3),
    step=1,
    model="qwen2-tied",
    tp=4,
)
def replicas_of_a_kv_head_never_store_the_decoded_rows(p: Patched) -> None:
    """Two KV heads on four ranks: the first of each pair writes alone."""

    def read(k: Tensor, v: Tensor) -> Pair:
        k, v = k.clone(), v.clone()
        prompt = p.model.prompt_lengths[p.seq]
        k[:, :, prompt:], v[:, :, prompt:] = 0, 0
        return k, v

    if p.rank in (1, 3):
        p.cache(read=read)
