"""Any operation of tokens that reads something else: another tensor that was recorded near it, the sum of two, or
either behind a norm of the checkpoint that stands nearby.

Blocks that are wired in another order (a norm before what it should stand behind, an MLP behind attention and not
beside it, a router that reads what its experts read) come to this, whatever the operation is. It is evaluated anew on a
few of its wrong rows, and on all of them where that explains most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import LAYER, STREAM, Operation, operations_of
from lockstep.engine.graph.formula import FORMULAS, evaluate
from lockstep.engine.taps.flow import sources_in_layer
from lockstep.workbench.diagnosis.hypotheses.setting import Setting
from lockstep.workbench.diagnosis.hypotheses.trial import Indices, evenly
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.hypotheses.words import tensor_in_words
from lockstep.workbench.diagnosis.operations.deviation import Mask
from lockstep.workbench.diagnosis.operations.expected import Lacking, Operands, norm, normalised
from lockstep.workbench.diagnosis.operations.shares import weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import ROW_WISE
from lockstep.workbench.diagnosis.recording import Array

#: Wrong rows that each input is tried on, and columns of a product.
_ROWS, _COLUMNS = 6, 24
#: What an input may leave of these rows' error; how many inputs are evaluated whole.
_LEFT, _BEST = 0.2, 3
#: What has banks of its own for this, or reads no rows of one tensor.
_ELSEWHERE = (
    "embedding", "reduce", "layer_inputs", "layer_input", "choice", "choice_weights", "combine", "keys", "values",
)  # fmt: skip
#: What the routed experts give together is called, which no tap has.
_ROUTED = "what the routed experts give together"
#: Kinds of cause by operation; "input" of any other.
_KINDS: Mapping[str, str] = {"norm": "norm", "unit_norm": "norm", "rope": "rope", "residual": "residual"}


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm that an input may have gone through: of this operation, with that weight; None and "" of one without."""

    of: Operation | None = None
    weight: str = ""

    def __call__(self, site: Site, x: Array) -> Array | None:
        """[n, width] through it; None where it does not fit."""
        if self.of is None:
            return normalised(x, site.facts.model.rms_eps)
        weight = site.facts.vector(self.weight)
        if weight is None or x.shape[1] % len(weight):
            return None
        weights, bias = {"weight": self.weight}, f"{self.weight.removesuffix('weight')}bias"
        if site.facts.vector(bias) is not None:
            weights["bias"] = bias
        facts = site.facts.of_tap(f"layers.0.{self.of.tap}")
        found, _ = norm(Operands(facts, (), {"x": x}, weights, None, None, self.of))
        return found.reshape(x.shape)


@dataclass(frozen=True, slots=True)
class _Input:
    """A sum of recorded tensors, perhaps behind a norm."""

    terms: tuple[str, ...]
    norm: _Norm | None

    @property
    def name(self) -> str:
        """What it is, by names of taps and weights."""
        behind = "" if self.norm is None else f" behind {self.norm.weight or 'a norm without weight'}"
        return " + ".join(self.terms) + behind

    def value(self, site: Site, tensors: Mapping[str, Array]) -> Array:
        """All of its rows, [N, width]."""
        x = np.sum([tensors[name] for name in self.terms], axis=0)
        found = x if self.norm is None else self.norm(site, x)
        assert found is not None, "what has some rows has all"
        return np.asarray(found)


def other_inputs(site: Site) -> Iterator[Variant]:
    """Each that explains most of what was seen, for each of the operation's inputs."""
    if site.operation not in ROW_WISE or site.operation in _ELSEWHERE or site.deviation is None:
        return
    part = site.parts[0]
    if len(site.parts) > 1 or not part.fits or not np.isfinite(part.seen).all():
        return
    for role, x in site.inputs.items():
        if x.ndim in (2, 3) and len(x) == len(part.seen) and np.isfinite(x).all():
            yield from _of_role(site, role, x)


def _of_role(site: Site, role: str, x: Array) -> Iterator[Variant]:
    tensors = dict(_tensors(site, int(np.prod(x.shape[1:]))))
    for one in _best(site, role, tensors):
        given = {role: one.value(site, tensors).reshape(x.shape)}
        predicted, noise = ROW_WISE[site.operation](_operands(site, given))
        fitted: dict[str, object] = {"input": one.name}
        kind = _KINDS.get(site.operation, "input")
        yield Variant("other_input", kind, _in_words(site, role, one), fitted, predicted, 0, noise=noise)


def _best(site: Site, role: str, tensors: Mapping[str, Array]) -> list[_Input]:
    """The inputs that leave least of a few wrong rows: single tensors, of the stream's also sums of two, which engines
    have of nothing else; each as it is and behind each norm that fits."""
    stream = _is_stream(site, role)
    terms = [*combinations(tensors, 1), *(combinations(tensors, 2) if stream else ())]
    scope = site.deviation.scopes[0]  # type: ignore[union-attr]
    rows = evenly(np.flatnonzero(scope.any(tuple(range(1, scope.ndim)))), _ROWS)
    if not terms:
        return []
    plain = np.concatenate([np.sum([tensors[name][rows] for name in names], axis=0) for names in terms])
    norms = [_Norm(one, name) for one, name in _norms(site) if (one.width == "hidden") == stream]
    found, tried = [], _Sample.of(site, role, rows)
    for one in (None, _Norm(), *norms):
        x = plain if one is None else one(site, plain)
        left = None if x is None else tried.left(x, len(terms))
        if left is None:
            continue
        for at in np.flatnonzero(left <= _LEFT):
            found.append((float(left[at]), len(terms[at]), _Input(terms[at], one)))
    return [one for *_, one in sorted(found, key=lambda each: each[:2])[:_BEST]]


def _tensors(site: Site, width: int) -> Iterator[tuple[str, Array]]:
    """What was recorded of these rows in the layer and the one before, and does not follow from the operation."""
    layers = site.facts.model.num_layers
    at = layers if site.layer is None else site.layer
    names = ["embed"] if at <= 1 else []
    for layer in (at - 1, at):
        names += [
            f"layers.{layer}.{kind}" for kind, one in LAYER.items() if one.form not in ("cache", "cells")
        ]
    for name in names:
        x = None if name == site.tap else site.rows_of(name)
        if x is None or len(x) != len(site.seen) or x.size != len(x) * width:
            continue
        if np.isfinite(x).all() and site.tap not in sources_in_layer(name, layers):
            yield name, x.reshape(len(x), width)
    routed = _routed(site)
    if routed is not None and routed.shape == (len(site.seen), width):
        yield _ROUTED, routed


def _routed(site: Site) -> Array | None:
    """What the layer's routed experts give together, where the operation does not precede them."""
    if site.layer is None:
        return None
    outputs, weights = (site.near(f"mlp.{one}") for one in ("experts.down", "topk_weights"))
    if any(site.tap in sources_in_layer(one, site.facts.model.num_layers) for one in (outputs, weights)):
        return None
    x, by = site.rows_of(outputs), site.rows_of(weights)
    if x is None or by is None or x.shape[:2] != by.shape:
        return None
    return np.asarray(evaluate(FORMULAS["combine"], {"x": x, "weights": by}))


def _is_stream(site: Site, role: str) -> bool:
    """Whether the operation reads something of the stream's width."""
    read = None if site.declared is None else site.declared.inputs.get(role)
    return read == STREAM or (read is not None and read in LAYER and LAYER[read].width == "hidden")


def _norms(site: Site) -> Iterator[tuple[Operation, str]]:
    """The norms of this layer and its neighbours, with their weights."""
    layers = site.facts.model.num_layers
    at = layers - 1 if site.layer is None else site.layer
    for layer in (at, at - 1, at + 1):
        for one in operations_of(site.facts.model) if 0 <= layer < layers else ():
            if one.kind == "norm" and not (one.sharded and site.facts.model.qk_norm_whole):
                name = weight_names(f"layers.{layer}.{one.tap}", "norm", site.facts).get("weight", "")
                if site.facts.vector(name) is not None:
                    yield one, name


def _operands(site: Site, inputs: Mapping[str, Array], rows: Indices = None) -> Operands:
    """What the operation works on, with other inputs; of some rows alone, any of them several times."""
    every = range(len(site.rows)) if rows is None else rows
    own = {role: x if rows is None else x[rows] for role, x in site.inputs.items()}
    return Operands(
        site.facts, tuple(site.rows[i] for i in every), {**own, **inputs}, site.weights, site.span, site.columns,
        site.declared, site.held,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """A few wrong rows, and of a product a few columns, by which many inputs are tried at once."""

    site: Site
    role: str
    rows: NDArray[np.intp]
    columns: Indices
    seen: Array
    scope: Mask
    error: float
    product: Mapping[str, Array]

    @classmethod
    def of(cls, site: Site, role: str, rows: NDArray[np.intp]) -> Self:
        scope, seen, expected = site.deviation.scopes[0][rows], site.seen[rows], site.expected[rows]  # type: ignore[union-attr]
        columns = evenly(np.flatnonzero(scope.any(0)), _COLUMNS) if site.operation == "linear" else None
        if columns is not None:
            scope, seen, expected = scope[:, columns], seen[:, columns], expected[:, columns]
        error = max(float(np.linalg.norm((seen - expected)[scope])), 1e-300)
        product = {} if columns is None else _product(_operands(site, {}, rows), columns)
        return cls(site, role, rows, columns, seen, scope, error, product)

    def left(self, x: Array, count: int) -> Array | None:
        """The share of the error that each of so many inputs leaves, whose rows [count * n, width] stand one below the
        other; None where they give no such tensor."""
        try:
            with np.errstate(all="ignore"):
                found = self._value(x, count)
        except (Lacking, ValueError, IndexError):
            return None
        if found.shape != (count * len(self.rows), *self.seen.shape[1:]):
            return None
        rest = np.where(self.scope, found.reshape(count, *self.seen.shape) - self.seen, 0.0)
        return np.asarray(np.linalg.norm(rest.reshape(count, -1), axis=1) / self.error)

    def _value(self, x: Array, count: int) -> Array:
        if self.product:
            return np.asarray(evaluate(FORMULAS["linear"], {"x": x, **self.product}))
        given = {self.role: x.reshape(len(x), *self.site.inputs[self.role].shape[1:])}
        return ROW_WISE[self.site.operation](_operands(self.site, given, np.tile(self.rows, count)))[0]


def _product(operands: Operands, columns: Indices) -> dict[str, Array]:
    """Weight [n, in] and bias of some of a product's columns, float64."""
    bias = operands.bias()
    return {
        "weight": operands.weight()[columns].astype(np.float64),
        "bias": np.zeros(1) if bias is None else bias[columns],
    }


def _in_words(site: Site, role: str, one: _Input) -> str:
    at = Setting.of(site)
    what = " plus ".join(name if name == _ROUTED else tensor_in_words(at, name) for name in one.terms)
    if one.norm is not None:
        weight = f" with {one.norm.weight}" if one.norm.weight else " without a weight"
        what = f"the norm{weight} of {what}"
    read = {} if site.declared is None else site.declared.inputs
    own = tensor_in_words(at, site.near(read[role])) if role in read else f"its {role}"
    return f"{what} is read instead of {own}"
