"""Which taps each tap is computed from: what distinguishes an inherited error from one of its own (torch-free)."""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache

from lockstep.engine.errors import EngineError
from lockstep.engine.graph import LAYER, LAYER_OUTPUT, OUTSIDE, STREAM, instead_of
from lockstep.engine.graph.layer_inputs import LAST_SUM
from lockstep.engine.taps.names import layer_of, local_name, operation_at
from lockstep.engine.text import printable

#: The stream between the two blocks of a layer.
_BETWEEN = "attn_residual"


class UnknownTap(EngineError):
    """A name that is none of ours: what it is computed from is not known."""


def is_known(tap: str) -> bool:
    """Whether the data flow has a place for the tap. A stranger's session may name its taps anyhow."""
    return operation_at(tap) is not None


def remembers(tap: str) -> bool:
    """Whether the tap also holds what earlier steps have written."""
    operation = operation_at(tap)
    return operation is not None and operation.remembers


def near(name: str, layer: int | None, num_layers: int) -> str:
    """`attn.q_proj`, 3 -> `layers.3.attn.q_proj`; STREAM is what enters the layer, or the last norm. A whole name is
    itself."""
    if name == STREAM:
        above = num_layers if layer is None else layer
        return f"layers.{above - 1}.{LAYER_OUTPUT}" if above else "embed"
    return (
        name if layer is None or name in OUTSIDE or layer_of(name) is not None else f"layers.{layer}.{name}"
    )


@lru_cache(1 << 12)
def sources_in_layer(tap: str, num_layers: int = 0) -> frozenset[str]:
    """All taps of its layer that `tap` is computed from, on whichever way, and itself."""
    layer, reached, left = layer_of(tap), {tap}, [tap]
    while left:
        new = [
            one for one in inputs_of(left.pop(), num_layers) if layer_of(one) == layer and one not in reached
        ]
        reached.update(new)
        left += new
    return frozenset(reached)


def inputs_of(tap: str, num_layers: int = 0, known: Container[str] = ()) -> tuple[str, ...]:
    """The taps that `tap` is computed from, nearest first, and those that take the place of what not every model has
    (q_norm, partial sums): skip those that a session does not know. `known`: of those it knows, nothing takes the place
    of a norm of the stream.

    `num_layers` matters for `final_norm` alone. UnknownTap for a name that is none of ours."""
    operation = operation_at(tap)
    if operation is None:
        raise UnknownTap(
            f"{printable(tap, 120)} is no tap of a decoder: what it is computed from is not known"
        )
    layer = layer_of(tap)
    found = [near(one, layer, 0) for one in LAST_SUM.values()] if local_name(tap) == LAYER_OUTPUT else []
    for one in operation.inputs.values():
        if one == _BETWEEN and known and near(one, layer, num_layers) not in known:
            # a layer of one block alone, which reads what entered it
            found.append(near(STREAM, layer, num_layers))
            if local_name(tap) == LAYER_OUTPUT:
                read = LAYER[_BETWEEN].inputs["y"]
                found += [near(name, layer, num_layers) for name in instead_of(read)]
            continue
        for name in instead_of(one):
            found.append(near(name, layer, num_layers))
            if name in LAYER and LAYER[name].kind == "norm" and found[-1] in known:
                break
    if operation.kind == "cache" and layer and not any(one in known for one in found):
        # another layer's, and which one no name shows
        before = (f"layers.{i}.{local_name(tap)}" for i in reversed(range(layer)))
        found += [one for one in before if one in known]
    if operation.kind == "shared_choice" and layer:  # that of the last layer before it that chooses itself
        chosen = (f"layers.{i}.{one}" for i in reversed(range(layer)) for one in operation.inputs.values())
        found += [one for one in chosen if one in known][:1]
    return tuple(found)
