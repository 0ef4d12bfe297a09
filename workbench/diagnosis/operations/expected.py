"""What each row-wise operation should have given on recorded inputs, and how far rounding may move it.

The noise of an element is measured by the terms that it is summed of: `unit` for each rounding of a result, and of the
sum inside `sum_unit` times the root of its length, times the root of the sum of the terms' squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import Kind, Operation
from lockstep.engine.graph.formula import FORMULAS, NORMALISED, Node, evaluate, formula_of
from lockstep.workbench.diagnosis.operations.facts import SMALLEST, UNIT, Facts, spread
from lockstep.workbench.diagnosis.operations.recorded import Row
from lockstep.workbench.diagnosis.operations.rotary import frequencies, lengths_of, magnitude
from lockstep.workbench.diagnosis.recording import Array


class Lacking(Exception):
    """Something that the operation needs is not there; the message says what."""


@dataclass(frozen=True, slots=True)
class Operands:
    """What an operation works on. `weights` are checkpoint names by role; `span` and `columns` as in `Site`; `declared`
    is the model's own operation, None where only its kind is known."""

    facts: Facts
    rows: tuple[Row, ...]
    inputs: Mapping[str, Array]
    weights: Mapping[str, str]
    span: slice | None
    columns: slice | None
    declared: Operation | None = None

    def formula(self, kind: Kind) -> Node:
        """What the operation computes: that of its kind, as this model has it."""
        if self.declared is None or self.declared.kind != kind:
            return FORMULAS[kind]
        return formula_of(self.declared, self.facts.model)

    def weight(self, role: str = "weight") -> NDArray[np.floating]:
        """This rank's part of a matrix or vector."""
        found = self.facts.weight(self.weights[role])
        if found is None:
            raise Lacking(f"the checkpoint has no {self.weights[role]}")
        if self.span is not None:
            found = found[self.span]
        return found if self.columns is None else found[:, self.columns]

    def bias(self) -> Array | None:
        """This rank's part of the bias; None of a module without."""
        return self.weight("bias").astype(np.float64) if "bias" in self.weights else None


#: Expected, and the noise of each element.
Result = tuple[Array, Array]


def sum_noise(facts: Facts, length: int) -> float:
    """What the rounding of a sum of `length` terms comes to, over the root of the sum of their squares."""
    return facts.sum_unit * (1 + 0.5 * math.sqrt(length))


def floor(facts: Facts, noise: Array) -> Array:
    """Noise with what the dtype may take for zero."""
    return np.asarray(noise + SMALLEST[facts.dtype])


def embedding(o: Operands) -> Result:
    table = o.weight()
    ids = [row.token for row in o.rows]
    if max(ids, default=0) >= len(table):
        raise Lacking(f"token id {max(ids)} lies outside the table of {len(table)} rows")
    found = evaluate(FORMULAS["embedding"], {"weight": table, "token": ids})
    return found, floor(o.facts, o.facts.unit * np.abs(found))


def linear(o: Operands) -> Result:
    x, weight, bias = o.inputs["x"], o.weight(), o.bias()
    if x.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise Lacking(
            f"its input of shape {list(x.shape)} does not fit a weight of shape {list(weight.shape)}"
        )
    added = np.zeros(1) if bias is None else bias
    out = evaluate(FORMULAS["linear"], {"x": x, "weight": weight, "bias": added})
    size = np.hypot(out - added, spread(x, weight))
    noise = o.facts.unit * (size + np.abs(added)) + sum_noise(o.facts, x.shape[1]) * size
    return out, floor(o.facts, noise)


def reduce(o: Operands) -> Result:
    """The sum over the ranks' partial products [R, N, H], and the bias."""
    parts = o.inputs["partial"]
    bias = o.bias()
    out = evaluate(FORMULAS["reduce"], {"partial": parts, "bias": 0.0 if bias is None else bias})
    size = np.abs(parts).sum(0) + (0.0 if bias is None else np.abs(bias))
    return out, floor(o.facts, o.facts.unit * (size if len(parts) > 1 or bias is not None else np.abs(out)))


def norm(o: Operands) -> Result:
    """RMSNorm over the last axis."""
    x, weight = o.inputs["x"], o.weight().astype(np.float64)
    if x.shape[-1] != len(weight):
        x = x.reshape(len(x), -1, len(weight))
    out = evaluate(o.formula("norm"), {**o.inputs, "x": x, "weight": weight, "eps": o.facts.model.rms_eps})
    if "whole" in o.inputs:
        out = heads_of(out, o.facts.model.head_dim)
    return out, floor(o.facts, 2 * o.facts.unit * np.abs(out))


def normalised(x: Array, eps: float) -> Array:
    """x over its root mean square along the last axis."""
    return np.asarray(evaluate(NORMALISED, {"x": x, "eps": eps}))


def rope(o: Operands) -> Result:
    """Pairs (i, i + D/2) of every head rotated by position times frequency."""
    model = o.facts.model
    x = heads_of(o.inputs["x"], model.head_dim)
    positions = np.array([row.position for row in o.rows], dtype=np.float64)
    angles = positions[:, None, None] * frequencies(model, lengths_of(o.rows))
    factor = magnitude(model)
    out = evaluate(FORMULAS["rope"], {"x": x, "angles": angles, "factor": factor})
    size = np.hypot(*np.split(x, 2, axis=-1)) * factor
    noise = size * (2 * o.facts.unit + 4 * UNIT["float32"] * angles)  # angles are made in float32
    return out, floor(o.facts, np.concatenate([noise, noise], axis=-1))


def heads_of(x: Array, head_dim: int) -> Array:
    """[N, heads * D] as [N, heads, D]."""
    return x if x.ndim == 3 else x.reshape(len(x), -1, head_dim)


def residual(o: Operands) -> Result:
    out = evaluate(FORMULAS["residual"], o.inputs)
    return out, floor(o.facts, o.facts.unit * np.abs(out))


def activation(o: Operands) -> Result:
    gate, up = o.inputs["gate"], o.inputs["up"]
    out = evaluate(FORMULAS["activation"], o.inputs)
    lost = SMALLEST[o.facts.dtype] * (1 + np.abs(gate)) * np.abs(up)  # of a sigmoid that is nearly zero
    return out, floor(o.facts, 3 * o.facts.unit * np.abs(out) + lost)


ROW_WISE: Mapping[str, Callable[[Operands], Result]] = {
    "embedding": embedding,
    "linear": linear,
    "head": linear,
    "reduce": reduce,
    "norm": norm,
    "rope": rope,
    "residual": residual,
    "activation": activation,
}
