"""The KV cache in decode: at which position a token stands, and which cached rows attention reads."""

from __future__ import annotations

from lockstep.engine.faults.fault import Fault
from lockstep.engine.faults.needs import all_of, same_sizes, several_layers


def stuck_positions(cached: int, new: int) -> range:
    """Every decode step stands at position 0; the prefill is right."""
    return range(new) if cached else range(cached, cached + new)


def positions_ahead(cached: int, new: int) -> range:
    """Every decode step stands one too far; the prefill is right."""
    start = cached + 1 if cached else cached
    return range(start, start + new)


def new_rows_only(kv_len: int, new: int) -> int:
    """Attention reads the new rows only."""
    return kv_len - new


def first_layers_cache(layer: int) -> int:
    """Rows are kept by position alone: all layers write to, and read, what is the first layer's."""
    return 0


def first_row_lost(kv_len: int, new: int) -> int:
    """A decode step does not see the first token, which much attention rests on."""
    return 1 if kv_len > new else 0


def cache_before(layer: int) -> int:
    """A layer's cache is counted from 1: the first two share one."""
    return max(layer - 1, 0)


FAULTS = (
    Fault(
        id="position-stuck",
        seam="positions",
        value="stuck",
        correct="counted",
        title="decode position stuck at 0",
        group="cache",
        level="step",
        first_tap="layers.*.attn.q_rope",
        step=1,
        symptom="from the first decode step each token is rotated by 0, overwrites slot 0 and sees only itself",
        patch={"positions": stuck_positions},
    ),
    Fault(
        id="position-ahead",
        seam="positions",
        value="ahead",
        correct="counted",
        title="decode positions one too far",
        group="cache",
        level="step",
        first_tap="layers.*.attn.q_rope",
        step=1,
        symptom="the past counts the present token: rotated one too far, and a slot never written is read",
        source="microsoft/onnxruntime-genai#2354",
        patch={"positions": positions_ahead},
    ),
    Fault(
        id="cache-not-reused",
        seam="cache_reuse",
        value="false",
        correct="true",
        title="KV cache ignored in decode",
        group="cache",
        level="step",
        first_tap="layers.*.attn.k_cache",
        step=1,
        symptom="a decode step attends to its own token only",
        patch={"cache_reuse": new_rows_only},
    ),
    Fault(
        id="cache-shared-by-layers",
        seam="cache_layer",
        value="shared",
        correct="own",
        title="all layers write to one layer's cache",
        group="cache",
        level="build",
        first_tap="layers.*.attn.k_cache",
        step=1,
        symptom="the first layer's cache holds what the last one wrote, the others' hold nothing; the prefill is right",
        source="dingodb/DingoCache#116",
        patch={"cache_layer": first_layers_cache},
        needs=all_of(several_layers, same_sizes),
    ),
    Fault(
        id="cache-first-row-lost",
        seam="cache_reuse",
        value="first_lost",
        correct="true",
        title="the first token evicted from the cache",
        group="cache",
        level="step",
        first_tap="layers.*.attn.k_cache",
        step=1,
        symptom="a decode step attends to all but the first token",
        patch={"cache_reuse": first_row_lost},
    ),
    Fault(
        id="cache-of-the-layer-before",
        seam="cache_layer",
        value="previous",
        correct="own",
        title="layers counted from 1 in the cache",
        group="cache",
        level="build",
        first_tap="layers.*.attn.k_cache",
        step=1,
        symptom="the first layer reads what the second has written; the prefill is right",
        patch={"cache_layer": cache_before},
        needs=all_of(several_layers, same_sizes),
    ),
)
