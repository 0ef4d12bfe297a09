"""The KV cache: what is written, where, and what is read."""

from __future__ import annotations

from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _decoded_rows_zero(p):
    def read(k, v):
        k, v = k.clone(), v.clone()
        prompt = p.model.prompt_lengths[p.seq]
        k[:, :, prompt:], v[:, :, prompt:] = 0, 0
        return k, v

    return read


@bug(
    "cache",
    accepted=("cache", "precision"),
    words="round|precis|int4|4.bit|four|quant|bits",
    taps=CACHES,
    model="mistral-full",
)
def cache_kept_in_four_bits(p: Patched) -> None:
    def rounded(x):
        step = x.abs().amax(-1, keepdim=True) / 7
        return (x / step).round() * step

    p.cache(written=lambda k, v: (rounded(k), rounded(v)))


@bug(
    "cache",
    accepted=("cache", "precision"),
    words="round|precis|float16|half|fp16|bits",
    taps=("attn.v_cache",),
    ranks=(1,),
    model="llama",
    tp=2,
)
def values_of_rank_1_cached_in_half(p: Patched) -> None:
    if p.rank == 1:
        p.cache(written=lambda k, v: (k, v.half().float()))


@bug(
    "cache",
    accepted=("cache", "positions"),
    words="slot|row|overwrit|first|zero|offset|position|shift|old|new",
    taps=CACHES,
    step=1,
    model="qwen2-untied",
    dtype="bfloat16",
)
def decode_writes_from_the_first_slot_again(p: Patched) -> None:
    """The decoded rows lie over the first of the prompt, and their own slots stay empty."""

    def read(k, v):
        prompt = p.model.prompt_lengths[p.seq]
        moved = []
        for rows in (k, v):
            new = rows.clone()
            new[:, :, : rows.shape[2] - prompt] = rows[:, :, prompt:]
            new[:, :, prompt:] = 0
            moved.append(new)
        return moved[0], moved[1]

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="current|new|own|written|row|zero|stale|missing|decod",
    taps=CACHES,
    step=1,
    layers=(2,),
    model="llama-bias",
)
def loop_over_the_caches_ends_a_layer_early_in_decode(p: Patched) -> None:
    p.cache((2,), read=_decoded_rows_zero(p))


@bug(
    "cache",
    accepted=("cache",),
    words="zero|page|lost|row|old|block|slot|missing",
    taps=CACHES,
    step=2,
    model="qwen2-tied",
)
def page_swapped_out_comes_back_empty(p: Patched) -> None:
    """The first four rows of the first sequence, from the second decode step on."""

    def read(k, v):
        k, v = k.clone(), v.clone()
        if p.seq == 0 and p.step >= 2:
            k[:, :, :4], v[:, :, :4] = 0, 0
        return k, v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="layer|row|new|current|other",
    taps=("attn.k_cache",),
    step=1,
    layers=(2,),
    model="qwen3",
)
def decoded_key_of_the_layer_below_is_cached(p: Patched) -> None:
    p.cache((1,))
    p.cache((2,), written=lambda k, v: (p.attn(1).fresh if p.decode else k, v))


@bug(
    "cache",
    accepted=("cache",),
    words="256|row|slot|zero|missing|written|beyond|last",
    taps=CACHES,
    model="llama-long",
)
def slots_beyond_256_never_written(p: Patched) -> None:
    def read(k, v):
        k, v = k.clone(), v.clone()
        k[:, :, 256:], v[:, :, 256:] = 0, 0
        return k, v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="sequence|row|new|current|own|other|slot|batch",
    taps=CACHES,
    step=1,
    model="llama",
)
def second_sequence_caches_the_row_of_the_first(p: Patched) -> None:
    for i, _ in p.layers():
        held = {}

        def written(k, v, held=held):
            if p.decode and p.seq == 0:
                held["rows"] = k, v
            return held["rows"] if p.decode else (k, v)

        p.cache((i,), written=written)


@bug(
    "cache",
    accepted=("cache",),
    words="layer|row|old|share|other",
    taps=CACHES,
    step=1,
    model="mistral-full",
    dtype="bfloat16",
)
def all_layers_share_the_cache_of_one(p: Patched) -> None:
    """Each writes over the one before, so that the last layer's rows are what decode finds."""

    def read(k, v):
        if not p.decode:
            return k, v
        last = p.caches[p.seq].layers[-1]
        k, v = k.clone(), v.clone()
        k[:, :, : p.past], v[:, :, : p.past] = last.keys[:, :, : p.past], last.values[:, :, : p.past]
        return k, v

    p.cache((0, 1), read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="current|new|own|written|row|zero|stale|missing|decod",
    taps=CACHES,
    ranks=(3,),
    step=1,
    model="qwen2-kv8",
    tp=4,
)
def rank_3_never_caches_its_decoded_rows(p: Patched) -> None:
    if p.rank == 3:
        p.cache(read=_decoded_rows_zero(p))


@bug(
    "cache",
    accepted=("cache", "heads", "positions"),
    words="head|slot|row",
    taps=CACHES,
    heads=(3,),
    step=1,
    model="llama",
)
def decoded_row_of_the_last_kv_head_lands_a_slot_early(p: Patched) -> None:
    def read(k, v):
        k, v = k.clone(), v.clone()
        if p.decode:
            for rows in (k, v):
                rows[:, 3, -2], rows[:, 3, -1] = rows[:, 3, -1].clone(), 0
        return k, v

    p.cache(read=read)
