"""What else of the same shape was recorded or lies in the checkpoint: what an operation may have read instead.

One list for every operation. A tensor's name is its tap, of another rank `tap @ rank 1`; a weight's is the
checkpoint's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from lockstep.engine.graph import LAYER, LAYER_OUTPUT, final_norm_of, operations_of
from lockstep.engine.graph.formula import FORMULAS, Node, formula_of
from lockstep.engine.taps.names import layer_of, local_name
from lockstep.workbench.diagnosis.hypotheses.edits import node_at, nodes, put
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.mixture import MIXTURE, mixture_formula
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

_RANK = " @ rank "
#: What a tensor of the step before is called, of the tokens at the same places.
STEP_BEFORE = ", of the step before"
#: A weight or bias of a product, and what is read of it.
_OF_PRODUCT = re.compile(r"model\.layers\.\d+\.\w+\.\w+_proj\.((?:weight|bias).*)")
#: What the norm that reads a residual sum gives: one that writes into its input leaves that in place of the sum.
READER = "reader"
#: What a norm of latents may read: the latent with the part of the key that is rotated; the rank's share of the
#: channels, zeros in the others'.
WITH_KEY, OWN_PART = (
    "latent and rotated part of the key",
    "this rank's share of the channels, zeros elsewhere",
)

#: What it may read where a written row is taken to begin with the rotated part, which lies at its end.
BEHIND_KEY = "the last channels of what is written, the rotated part being taken from its front,"

#: What the weight of a norm over the heads of all ranks is where a rank reads it from its beginning.
FIRST_PART = "the weight of the first rank's channels"


def formula_at(site: Site) -> Node:
    """What the operation of a site computes, as its model has it: without a bias that it has not."""
    declared = site.declared
    if site.operation == MIXTURE:
        return mixture_formula(site.facts.model, site.inputs)
    if declared is None or (
        site.operation == "linear" and declared.kind == "reduce"
    ):  # no partials were recorded
        found = FORMULAS[site.operation]  # type: ignore[index]
    else:
        found = formula_of(declared, site.facts.model)
    if declared is not None and declared.kind == "norm" and declared.width == "latent":
        found = FORMULAS["norm"]  # of what it reads (`as_read`)
    if "bias" in site.weights or site.operation not in ("linear", "reduce", "head"):
        return found
    biased = [path for path, node in nodes(found) if node.args[1:] == (Node("bias"),)]
    return put(found, biased[0], node_at(found, (*biased[0], 0))) if biased else found


def recorded(site: Site, shape: tuple[int, ...]) -> dict[str, Callable[[], Array]]:
    """Tensors of these rows whose numbers are as many as those of `shape`, by name, the nearest layers first."""
    found: dict[str, Callable[[], Array]] = {}
    for tap, rank in _places(site):
        value = site.rows_of(tap, rank)
        if value is None or value.size != int(np.prod(shape)) or len(value) != shape[0]:
            continue
        found[tap if rank == site.rank else operand_name(tap, rank)] = partial(np.reshape, value, shape)
    return found


def of_any_width(site: Site) -> Iterator[tuple[str, Array]]:
    """Tensors of these rows, [N, width] each, by name."""
    for tap, rank in _places(site):
        value = site.rows_of(tap, rank)
        if value is not None and len(value) == len(site.expected):
            yield tap if rank == site.rank else operand_name(tap, rank), value.reshape(len(value), -1)


def alike(one: str, layer: int | None, other: str, at: int | None) -> bool:
    """Whether two names are of the same tensor, or of those that stand alike to the layers of two operations."""
    return one == other or (
        layer is not None and at is not None and _seen_from(one, layer) == _seen_from(other, at)
    )


def _seen_from(name: str, layer: int) -> tuple[int | None, str]:
    tap, rank = place_of(name)
    if (of_product := _OF_PRODUCT.match(tap)) is not None:  # whatever module or rank it is of
        own = layer_of(tap.removeprefix("model."))
        return None if own is None else own - layer, of_product[1]
    own = layer_of(tap.removeprefix("model."))
    if tap == "embed" and layer == 0:  # what enters the first layer
        return (-1, LAYER_OUTPUT)
    return (
        None if own is None else own - layer
    ), f"{local_name(tap.removeprefix('model.'))}{'' if rank is None else rank}"


def moved_name(name: str, by: int) -> str:
    """The tensor that stands to an operation so many layers on as this one does here."""
    layer = layer_of(name.removeprefix("model."))
    if layer is None:
        return f"layers.{by - 1}.{LAYER_OUTPUT}" if name == "embed" and by > 0 else name
    return "embed" if layer + by < 0 else name.replace(f"layers.{layer}.", f"layers.{layer + by}.", 1)


def of_other_layers(site: Site, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, Array]]:
    """By layer the vectors of that shape that other layers have under a weight's `name`."""
    for layer in range(site.facts.model.num_layers):
        other = name.replace(f".{site.layer}.", f".{layer}.", 1)
        found = site.facts.vector(other) if layer != site.layer else None
        if found is not None and found.shape == shape:
            yield layer, found


def operand_name(tap: str, rank: int) -> str:
    """What a tensor of another rank is called as a leaf."""
    return f"{tap}{_RANK}{rank}"


def sum_of_ranks(role: str) -> str:
    """What the sum of all ranks' terms is called as a leaf, in place of the rank's own."""
    return f"{role}, summed over the ranks"


def place_of(name: str) -> tuple[str, int | None]:
    """The tap of an operand's name, and the rank where that is another one."""
    tap, found, rank = name.partition(_RANK)
    return tap, int(rank) if found else None


def _places(site: Site) -> Iterator[tuple[str, int]]:
    """Taps that were there before the operation ran, with ranks: all of its layer and the one before, of others the
    stream, what is added to it, and what the operation reads in its own."""
    layers, order = site.facts.model.num_layers, list(LAYER)
    at = layers if site.layer is None else site.layer
    own = order.index(site.kind) if site.kind in LAYER else 0
    read = () if site.declared is None else tuple(site.declared.inputs.values())
    yield "embed", site.rank
    for other in range(at, -1, -1) if at < layers else range(layers - 1, -1, -1):
        for kind, operation in LAYER.items():
            later = other == at and order.index(kind) >= own
            if later or operation.form in ("cache", "cells"):
                continue
            if other >= at - 1 or operation.kind in ("residual", "reduce") or kind in read:
                yield f"layers.{other}.{kind}", site.rank
            if other == at and len(site.taps.ranks) > 1:
                yield from ((f"layers.{other}.{kind}", rank) for rank in site.taps.ranks if rank != site.rank)


def norm_vectors(facts: Facts, own: str, length: int) -> Iterator[str]:
    """The checkpoint's weights of norms of that length, of a bias their biases, the nearest layers first."""
    layer, role = layer_of(own.removeprefix("model.")), own.rpartition(".")[2]
    at = facts.model.num_layers if layer is None else layer
    kinds = [one.module for one in operations_of(facts.model) if one.kind == "norm"]
    names = [
        f"model.layers.{i}.{kind}.{role}"
        for i in sorted(range(facts.model.num_layers), key=lambda i: abs(i - at))
        for kind in kinds
    ]
    for name in (*names, f"{final_norm_of(facts.model)}.{role}"):
        vector = facts.vector(name) if name != own else None
        if vector is not None and vector.shape == (length,):
            yield name
