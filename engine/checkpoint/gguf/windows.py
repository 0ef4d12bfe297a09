"""Which layers have a sliding window, as GGUF files have it. Torch-free."""

from __future__ import annotations

from lockstep.engine.checkpoint.gguf.metadata import MetadataArray
from lockstep.engine.config.fields import Fields

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def windows(fields: Fields, layers: int, window: int, period: int) -> tuple[int | None, ...]:
    """Of each layer: the last of every `period` sees everything, unless the file states which have a window."""
    pattern = fields.data.get(PATTERN)
    if isinstance(pattern, MetadataArray):
        if pattern.count != layers or pattern.element not in ("BOOL", "UINT32", "INT32"):
            raise fields.error(PATTERN, f"expected a truth value for each of {layers} layers")
        return tuple(window if one else None for one in pattern.numbers()) if window else (None,) * layers
    period = fields.size(PATTERN, period)
    return tuple(window if window and (i + 1) % period else None for i in range(layers))
