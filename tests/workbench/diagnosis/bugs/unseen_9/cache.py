"""The KV cache: slots, pages, layouts, what is rounded, what is left over."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.patched import Patched

#: Physical page of each page of a sequence.
_TABLE = torch.tensor([1, 0, 3, 2, 5, 4])


def _drawn(*shape, seed=9):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@bug(
    "cache",
    accepted=("cache", "mask"),
    words="row|page|slot|stale|length|too many|more|key|zero|extra|surplus",
    taps=(*CACHES, "attn.scores"),
    step=2,
    model="llama-bias",
)
def page_table_runs_a_page_ahead_where_the_last_is_full(p: Patched) -> None:
    """pegainfer#291: pages of four; the one for the next token is there, and what lies in it is read."""
    left = _drawn(1, 4, 4, 8)

    def read(k, v):
        if not p.decode or k.shape[2] % 4:
            return k, v
        return torch.cat([k, left], 2), torch.cat([v, left.flip(3)], 2)

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache", "precision"),
    words="round|precis|integer|int8|bits|quant|grid|step",
    taps=CACHES,
    model="qwen3",
)
def scale_of_a_cached_token_is_never_less_than_one(p: Patched) -> None:
    """mlxcel#717: eight bits with a scale for each token and head; what is left are whole numbers."""

    def rounded(rows):
        step = (rows.abs().amax(-1, keepdim=True) / 127).clamp(min=1)
        return (rows / step).round() * step

    p.cache(written=lambda k, v: (rounded(k), rounded(v)))


@bug(
    "cache",
    accepted=("cache", "positions"),
    words="row|zero|empty|roll|shift|drop|lost|slot|moved|window|written",
    taps=CACHES,
    step=2,
    model="mistral-window",
)
def window_cache_rolls_though_a_slot_is_still_free(p: Patched) -> None:
    """transformers#37574: of eight slots seven are filled; the first row goes, and an empty one stays in between."""

    def rolled(rows):
        length = rows.shape[2]
        empty = torch.zeros_like(rows[:, :, :1])
        return torch.cat([rows[:, :, : length - 8], rows[:, :, length - 7 : 7], empty, rows[:, :, 7:]], 2)

    def read(k, v):
        return (rolled(k), rolled(v)) if p.seq == 1 and k.shape[2] >= 8 else (k, v)

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|page|order|permut|stale|zero|moved|block|exchang|other",
    taps=CACHES,
    step=1,
    model="qwen2-untied",
)
def prompt_written_in_pages_of_eight_and_read_in_pages_of_four(p: Patched) -> None:
    """vllm-gaudi#1323: both go through one table of pages."""

    def slots(positions, size):
        return _TABLE[positions // size] * size + positions % size

    def through(rows):
        at = torch.arange(rows.shape[2])
        prompt, decoded = at[: -p.step], at[-p.step :]
        memory = rows.new_zeros(*rows.shape[:2], 48, rows.shape[3])
        memory[:, :, slots(prompt, 8)] = rows[:, :, prompt]
        memory[:, :, slots(decoded, 4)] = rows[:, :, decoded]
        return memory[:, :, slots(at, 4)]

    p.cache(read=lambda k, v: (through(k), through(v)) if p.decode else (k, v))


@bug(
    "cache",
    accepted=("cache",),
    words="row|stride|shift|element|dimension|layout|order|permut|slot|moved",
    taps=CACHES,
    model="llama-mha",
    dtype="bfloat16",
)
def rows_of_the_cache_read_without_the_scale_between_them(p: Patched) -> None:
    """kvcached#424: each row is an element longer, by its scale, than the stride that was computed."""

    def read(rows):
        wide = torch.cat([rows, rows.abs().amax(-1, keepdim=True)], -1).flatten(2)
        return wide[..., : rows.shape[2] * rows.shape[3]].reshape(rows.shape)

    p.cache(read=lambda k, v: (read(k), read(v)))


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|page|order|permut|block|exchang|moved|zero|other",
    taps=CACHES,
    ranks=(1,),
    model="qwen3-kv4",
    tp=2,
)
def prefill_of_rank_1_reads_its_pages_in_the_order_of_memory(p: Patched) -> None:
    """ssd#22: where a prefix was found, the kernel is given the cache and no table of its pages."""
    table = torch.tensor([2, 0, 3, 1])

    def lying(rows):
        at = torch.arange(rows.shape[2])
        memory = rows.new_zeros(*rows.shape[:2], 16, rows.shape[3])
        memory[:, :, table[at // 4] * 4 + at % 4] = rows
        return memory[:, :, at]

    def read(k, v):
        return (lying(k), lying(v)) if p.seq == 0 and not p.decode else (k, v)

    if p.rank == 1:
        p.cache(read=read)


@bug(
    "cache",
    accepted=("cache", "precision", "scale"),
    words="quant|round|precis|satur|clamp|clip|scale|bits|channel|range",
    taps=("attn.k_cache",),
    model="qwen2-untied",
)
def all_keys_take_the_channel_scales_of_the_first_four(p: Patched) -> None:
    """Four bits by channel, in groups of four tokens, as KIVI has it; the scales are those of the first group."""
    for i, _ in p.layers():
        scales = {}

        def written(k, v, scales=scales):
            if not p.decode:
                scales[p.seq] = k[:, :, :4].abs().amax(2, keepdim=True) / 7
            scale = scales[p.seq]
            return (k / scale).round().clamp(-8, 7) * scale, v

        p.cache([i], written=written)


@bug(
    "cache",
    accepted=("cache", "precision"),
    words="round|precis|fp8|float8|bits|quant|e4m3|eight",
    taps=CACHES,
    step=2,
    model="llama-bias",
)
def page_comes_back_from_the_host_in_eight_bits(p: Patched) -> None:
    """The first four rows of the first sequence, which had to make room for a while."""

    def read(k, v):
        if p.step < 2 or p.seq:
            return k, v
        k, v = k.clone(), v.clone()
        for rows in (k, v):
            rows[:, :, :4] = rows[:, :, :4].to(torch.float8_e4m3fn).to(rows.dtype)
        return k, v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache", "positions"),
    words="row|slot|overwrit|zero|page|new|empty|written|lost|missing|last",
    taps=CACHES,
    step=1,
    model="mistral-full",
    dtype="bfloat16",
)
def decoded_rows_land_in_the_first_slot_of_their_page(p: Patched) -> None:
    """The place within the page is lost; pages of four."""

    def read(k, v):
        if not p.decode:
            return k, v
        k, v = k.clone(), v.clone()
        for rows in (k, v):
            for at in range(rows.shape[2] - p.step, rows.shape[2]):
                if at % 4:
                    rows[:, :, at // 4 * 4] = rows[:, :, at]
                    rows[:, :, at] = 0
        return k, v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="row|prefix|page|slot|stale|other|sequence|request|first|block",
    taps=CACHES,
    model="qwen2-three",
)
def prefix_computed_under_an_adapter_serves_a_request_without(p: Patched) -> None:
    """The hash of a page leaves out the adapter's name; pages of four, and the third request."""
    keys, values = (torch.eye(8) + 0.2 * _drawn(8, 8, seed=seed) for seed in (1, 2))

    def written(k, v):
        if p.decode or p.seq < 2:
            return k, v
        k, v = k.clone(), v.clone()
        k[:, :, :4], v[:, :, :4] = k[:, :, :4] @ keys, v[:, :, :4] @ values
        return k, v

    p.cache(written=written)


@bug(
    "cache",
    accepted=("cache",),
    words="row|slot|page|overwrit|first|new|block|stale|other",
    taps=CACHES,
    ranks=(3,),
    step=4,
    model="qwen2-kv8",
    tp=4,
)
def rank_3_is_given_its_own_first_page_again(p: Patched) -> None:
    """Pages of four: the seventeenth row needs a new one, and the first is taken for free."""

    def read(k, v):
        if k.shape[2] < 17:
            return k, v
        k, v = k.clone(), v.clone()
        k[:, :, 0], v[:, :, 0] = k[:, :, 16], v[:, :, 16]
        return k, v

    if p.rank == 3:
        p.cache(read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="row|layout|order|permut|dimension|element|transpos|slot|exchang|moved",
    taps=("attn.k_cache",),
    model="mistral-full",
)
def keys_kept_in_vectors_of_eight_are_read_as_plain_rows(p: Patched) -> None:
    """Within a page of four slots the first eight dimensions of all stand before the others."""

    def plain(rows):
        length = rows.shape[2]
        pages = (
            torch.nn.functional.pad(rows, (0, 0, 0, -length % 4)).unflatten(2, (-1, 4)).unflatten(4, (2, 8))
        )
        return pages.transpose(3, 4).flatten(3).reshape(*rows.shape[:2], -1, 16)[:, :, :length]

    p.cache(read=lambda k, v: (plain(k), v))
