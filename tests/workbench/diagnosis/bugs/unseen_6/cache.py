"""The KV cache: slots, heads, what is left of another request."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "cache",
    accepted=("cache",),
    words="slot|row|overwrit|first|zero|chunk|shift|offset|position",
    taps=CACHES,
    model="llama",
    tp=2,
)
def second_chunk_written_over_the_first(p: Patched) -> None:
    """Chunks of eight tokens; the second one's slots begin at zero again."""

    def misplaced(kv):
        over = max(0, kv.shape[2] - 8)
        return torch.cat([kv[:, :, 8:], kv[:, :, over:8], torch.zeros_like(kv[:, :, 8:])], 2) if over else kv

    p.cache(written=lambda k, v: (misplaced(k), misplaced(v)))


@bug(
    "cache",
    accepted=("cache", "heads"),
    words="head|swap|exchang|order|row|other",
    taps=("attn.k_cache",),
    layers=(2,),
    step=1,
    model="qwen3",
)
def decoded_keys_of_two_heads_cached_in_each_other_s_place(p: Patched) -> None:
    p.cache((2,), written=lambda k, v: (k.flip(1) if p.decode else k, v))


@bug(
    "cache",
    accepted=("cache",),
    words="sequence|row|stale|other|first|old|slot|request",
    taps=CACHES,
    model="mistral-full",
)
def first_slot_still_holds_the_request_before(p: Patched) -> None:
    """The second sequence is given a recycled page, of which the first slot is never written."""
    for i, _ in p.layers():
        held = {}

        def written(k, v, held=held):
            if p.decode:
                return k, v
            if p.seq == 0:
                held.update(k=k[:, :, :1], v=v[:, :, :1])
                return k, v
            return torch.cat([held["k"], k[:, :, 1:]], 2), torch.cat([held["v"], v[:, :, 1:]], 2)

        p.cache([i], written=written)


@bug(
    "cache",
    accepted=("cache", "precision", "overflow"),
    words="clamp|clip|satur|limit|range|maxim|round|precis|bound|cap",
    taps=("attn.k_cache",),
    model="qwen2-large-bias",
)
def large_keys_saturate_in_the_cache(p: Patched) -> None:
    """Eight bits, by a scale that was calibrated on other keys."""
    p.cache(written=lambda k, v: (k.clamp(-12, 12), v))


@bug(
    "cache",
    accepted=("cache", "heads"),
    words="head|row|first|copy|other",
    taps=CACHES,
    step=1,
    model="llama",
    dtype="bfloat16",
)
def decoded_row_of_the_first_kv_head_cached_for_all(p: Patched) -> None:
    """Stride 0 along the heads."""

    def first(kv):
        return kv[:, :1].expand_as(kv) if p.decode else kv

    p.cache(written=lambda k, v: (first(k), first(v)))
