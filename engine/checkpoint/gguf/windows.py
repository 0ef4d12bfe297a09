"""What single layers have, as GGUF files have it: a list, or every so many-th; sliding windows. Torch-free."""

from __future__ import annotations

from lockstep.engine.checkpoint.gguf.metadata import MetadataArray
from lockstep.engine.checkpoint.gguf.stated_sizes import StatedSizes
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.rope_scaling import Rope

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def windows(fields: Fields, layers: int, window: int, period: int) -> tuple[int | None, ...]:
    """Of each layer: the last of every `period` sees everything, unless the file states which have a window."""
    if (stated := of_layers(fields, PATTERN, layers)) is not None:
        return tuple(window if one else None for one in stated) if window else (None,) * layers
    period = fields.size(PATTERN, period)
    return tuple(window if window and (i + 1) % period else None for i in range(layers))


def rotated_by_windows(of: StatedSizes, own: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
    """Only layers with a window rotate."""
    return tuple(None if window is None else of.rope for window in own) if None in own else ()


def by_layer(fields: Fields, key: str, layers: int, least: int = 1) -> tuple[int, ...]:
    """The key's number for each layer: a list, or one for all."""
    stated = fields.data.get(key)
    if not isinstance(stated, MetadataArray):
        return (fields.size(key, least=least),) * layers
    if stated.count != layers or not stated.is_integer:
        raise fields.error(key, f"expected a whole number for each of {layers} layers")
    return tuple(Fields({key: one}, fields.where).size(key, least=least) for one in stated.numbers())


def of_layers(fields: Fields, key: str, layers: int) -> tuple[bool, ...] | None:
    """The key's truth value for each layer; None where it is no list."""
    stated = fields.data.get(key)
    if not isinstance(stated, MetadataArray):
        return None
    if stated.count != layers or stated.element not in ("BOOL", "UINT32", "INT32"):
        raise fields.error(key, f"expected a truth value for each of {layers} layers")
    return tuple(bool(one) for one in stated.numbers())
