"""What is written into the cache of keys and values, and what is read from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.run.runner import Runner
from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched

#: Slots of a page.
PAGE = 16


def _at_other_slots(
    p: Spoilt, written: Callable[[Tensor], Tensor], read: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Rows are written at other slots of the pool than those of the batch, and read there."""

    def begin(runner: Runner) -> None:
        pool = runner.pool
        write, gather = pool.write, pool.read

        def misplaced(layer: int, batch: Batch, keys: Tensor, values: Tensor) -> None:
            write(layer, replace(batch, slots=written(batch.slots)), keys, values)

        pool.write = misplaced  # type: ignore[method-assign]
        if read is not None:
            pool.read = lambda layer, slots: gather(layer, read(slots))  # type: ignore[method-assign]

    p.running(begin)


@bug(
    "slots", accepted=("cache", "positions"), words="slot|row|early|before|last|overwr|position|index|written|off.by",
    taps=CACHES, step=1, model="llama", ep=1,
)  # fmt: skip
def new_row_is_written_one_slot_early(p: Spoilt) -> None:
    """The slot of a decode step is computed of the length before the token was appended."""
    _at_other_slots(p, lambda slots: slots - 1 if p.decode else slots)


@bug(
    "slots", accepted=("cache", "positions"),
    words="page|block|table|first|overwr|row|slot|written|stale|boundary", taps=CACHES, step=4,
    model="mistral-full", dtype="bfloat16", tp=2, ep=1,
)  # fmt: skip
def page_that_a_decode_step_was_given_is_not_in_its_table(p: Spoilt) -> None:
    """Tables on the device are copied at the prompt; where a new page should stand they have the 0 of their padding."""

    def stale(slots: Tensor) -> Tensor:
        return slots.where(slots < 2 * PAGE, slots - 2 * PAGE)  # two sequences have a page each

    _at_other_slots(p, stale, stale)


@bug(
    "layers", accepted=("cache", "layer", "layers"), words="layer|shar|same|other|overwr|index|another", taps=CACHES,
    layers=(3,), step=1, model="llama-deep", ep=1,
)  # fmt: skip
def first_layer_of_a_stage_writes_where_the_last_one_did(p: Spoilt) -> None:
    """Layers of two pipeline stages are numbered for their caches, and an index is counted twice."""
    p.rules(cache_layer=lambda layer: 3 if layer == 4 else layer)


@bug(
    "layout", accepted=("cache", "heads"),
    words="head|token|row|order|layout|transpos|mix|exchang|shuffl|permut|stride", taps=CACHES, model="qwen3-kv4",
    dtype="bfloat16",
)  # fmt: skip
def rows_of_a_prompt_are_written_as_if_heads_came_first(p: Patched) -> None:
    """New keys and values lie as [tokens, heads, D], the writing kernel takes them for [heads, tokens, D]."""

    def mixed(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().view(x.shape)

    p.cache(written=lambda k, v: (mixed(k), mixed(v)))


@bug(
    "quantisation", accepted=("cache", "scale", "precision"), words="scal|factor|times|multipl|larg|quant|eight|8",
    taps=("attn.v_cache",), model="llama", dtype="bfloat16", tp=2,
)  # fmt: skip
def values_in_eight_bits_are_read_without_their_scale(p: Patched) -> None:
    """The scale of cached values is applied where they are written; the kernel's argument for reading is left at 1."""
    p.cache(written=lambda k, v: (k, (4 * v).to(torch.float8_e4m3fn).to(v.dtype)))


@bug(
    "quantisation", accepted=("cache", "clip", "precision", "scale"),
    words="clip|clamp|satur|limit|range|bound|larg|cut|cap|outlier|precis|quant|round", taps=("attn.k_cache",),
    model="qwen2-large-bias", dtype="bfloat16",
)  # fmt: skip
def large_keys_lie_beyond_the_range_of_their_eight_bits(p: Patched) -> None:
    """Keys in int8 with one scale for all channels: Qwen2's biases lie far beyond what was calibrated."""
    step = 8 / 127
    p.cache(written=lambda k, v: ((k / step).round().clamp(-127, 127) * step, v))


@bug(
    "prefix", accepted=("cache", "input"),
    words="prefix|prompt|sequence|other|row|page|reus|share|hash|hit|stale", taps=CACHES,
    model="llama-three",
)  # fmt: skip
def prefix_cache_hands_out_the_pages_of_another_prompt(p: Patched) -> None:
    """Pages of 4 tokens are found by a hash that leaves the tokens out: the second prompt hits the first one's."""
    for i, _ in p.layers():

        def read(k: Tensor, v: Tensor, i: int = i) -> tuple[Tensor, Tensor]:
            if p.seq != 1:
                return k, v
            hit = p.caches[0].layers[i]
            return tuple(
                torch.cat((a[:, :, :4], b[:, :, 4:]), 2) for a, b in ((hit.keys, k), (hit.values, v))
            )  # type: ignore[return-value]

        p.cache([i], read=read)


@bug(
    "order", accepted=("cache", "keys", "rope"), words="rotat|rope|before|unrotated|without|position|not turned|order",
    taps=("attn.k_cache",), model="qwen2-tied", tp=2,
)  # fmt: skip
def keys_go_into_the_cache_before_they_are_rotated(p: Patched) -> None:
    """The call that writes the cache stands where keys are projected, a line before the rotation."""
    held: dict[str, Any] = {}

    def rotate(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        held["k"] = k
        return apply(q, k, cos, sin)

    p.rotate(rotate)
    p.cache(written=lambda k, v: (held["k"], v))


@bug(
    "chunks", accepted=("cache", "input"), words="row|token|chunk|last|zero|empty|miss|not written|lost|slot|128",
    taps=CACHES, model="llama-long",
)  # fmt: skip
def last_token_of_each_chunk_of_a_prompt_is_not_stored(p: Patched) -> None:
    """A prompt in chunks of 128, whose slots are made for one token too few and filled up with -1."""

    def without(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, :, 127::128] = 0
        return x

    p.cache(written=lambda k, v: (without(k), without(v)))
