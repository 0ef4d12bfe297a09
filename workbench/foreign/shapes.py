"""The shapes that taps have in a session (`engine.taps.names`), whatever an engine's tensors look like."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from lockstep.engine.graph import LAYER, Form
from lockstep.engine.taps.names import local_name, operation_at
from lockstep.sessions.meta import ModelMeta


def _of(form: Form) -> frozenset[str]:
    return frozenset(one.tap for one in LAYER.values() if one.form == form)


#: Taps of [T, heads, head_dim].
HEADS = _of("heads")
#: Taps of [heads, T, K], which dumps have as [T, heads, K].
ATTENTION = _of("cells")
#: Taps of [K, heads, head_dim]: a cache is no row of a pass.
CACHES = _of("cache")
#: Taps of [1, heads, …] of a sequence's last token.
STATES = _of("state")


def is_of_last(tap: str) -> bool:
    """Whether a pass has one row of it, the last token's; of its statistics too."""
    return tap.startswith("logits") or any(local_name(tap).startswith(one) for one in STATES)


def is_canonical(tap: str) -> bool:
    """Whether it is one of the design's taps, not a generic one under the engine's own name."""
    return operation_at(tap) is not None


def head_dim(model: ModelMeta) -> int | None:
    """The width of a head."""
    if model.head_dim is not None or model.hidden_size is None or not model.num_heads:
        return model.head_dim
    return model.hidden_size // model.num_heads


def width(tap: str, model: ModelMeta) -> int | None:
    """How many numbers a row of the whole tap has, over all ranks; None where the model does not state it."""
    operation = operation_at(tap)
    if operation is None or operation.form in ("cells", "cache"):
        return None
    match operation.width:
        case "heads" | "kv_heads" as which:
            heads, size = (model.num_heads if which == "heads" else model.num_kv_heads), head_dim(model)
            return None if heads is None or size is None else heads * size
        case "intermediate":
            return model.intermediate_size
        case "vocab":
            return model.vocab_size
        case "hidden":
            return model.hidden_size
        case _:  # of experts, which a session does not state
            return None


def by_rows(tap: str, array: NDArray[Any], rows: int) -> NDArray[Any]:
    """`array` with one of `rows` tokens along its first axis, where it can be brought to that: a leading axis of one
    goes, and heads that were flattened into the rows come back."""
    if array.ndim > 2 and array.shape[0] == 1 and array.shape[1] == rows:
        array = array[0]
    heads = local_name(tap) in HEADS
    if heads and array.ndim == 2 and rows and array.shape[0] != rows and array.shape[0] % rows == 0:
        array = array.reshape(rows, -1, array.shape[1])
    return array


def shaped(tap: str, array: NDArray[Any], model: ModelMeta) -> NDArray[Any]:
    """Rows [T, …] of one rank in the shape that the tap has in a session (ATTENTION: still rows first)."""
    local = local_name(tap)
    if array.ndim == 0 or array.size == 0:
        return array
    rows = len(array)
    if local in ATTENTION | CACHES | STATES or not is_canonical(tap):
        return array
    if local not in HEADS:
        return array.reshape(rows, -1)
    operation = operation_at(tap)
    if operation is not None and operation.width == "rope_key":  # which all heads share
        return array.reshape(rows, 1, -1)
    size = head_dim(model)
    if array.ndim == 3 or size is None or (array.size // max(rows, 1)) % size:
        return array
    return array.reshape(rows, -1, size)
