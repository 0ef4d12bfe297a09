"""What each row-wise operation should have given on recorded inputs, and how far rounding may move it.

The noise of an element is measured by the terms that it is summed of: `unit` for each rounding of a result, and of the
sum inside `sum_unit` times the root of its length, times the root of the sum of the terms' squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import Kind, Operation
from lockstep.engine.graph.formula import (
    FORMULAS,
    NORMALISED,
    Node,
    evaluate,
    formula_of,
    numbers_of,
    rotation_of,
    swish,
)
from lockstep.engine.graph.recurrence import softplus
from lockstep.engine.parallel import shards
from lockstep.workbench.diagnosis.operations.facts import SMALLEST, UNIT, Facts, chunks_of, spread
from lockstep.workbench.diagnosis.operations.recorded import Row
from lockstep.workbench.diagnosis.operations.rotary import angles_of, magnitude
from lockstep.workbench.diagnosis.operations.weights import StoredMatrix
from lockstep.workbench.diagnosis.recording import Array


class Lacking(Exception):
    """Something that the operation needs is not there; the message names it."""


@dataclass(frozen=True, slots=True)
class Operands:
    """What an operation works on. `weights` are checkpoint names by role; `span` and `columns` as in `Site`; `declared`
    is the model's own operation, None where only its kind is known; `held` are the experts that the rank has, None:
    all."""

    facts: Facts
    rows: tuple[Row, ...]
    inputs: Mapping[str, Array]
    weights: Mapping[str, str]
    span: slice | None
    columns: slice | None
    declared: Operation | None = None
    held: range | None = None

    def formula(self, kind: Kind) -> Node:
        """What the operation computes: that of its kind, as this model has it."""
        if self.declared is None or self.declared.kind != kind:
            return FORMULAS[kind]
        return formula_of(self.declared, self.facts.model)

    def value(self, kind: Kind, **leaves: Any) -> Array:
        """The operation's value in float64; `leaves` beside its inputs and the model's numbers."""
        given = {**numbers_of(self.facts.model, self.declared), **self.inputs, **leaves}
        return np.asarray(evaluate(self.formula(kind), given))

    def weight(self, role: str = "weight") -> NDArray[np.floating]:
        """This rank's part of a matrix or vector."""
        found = self.facts.weight(self.weights[role])
        if found is None:
            raise Lacking(f"the checkpoint has no {self.weights[role]}")
        if self.span is not None:
            found = found[self.span]
        return found if self.columns is None else found[:, self.columns]

    def matrix(self) -> NDArray[np.floating] | StoredMatrix:
        """The same of a matrix, not read yet where that can be."""
        found = self.facts.matrix(self.weights["weight"])
        return found.part(self.span, self.columns) if isinstance(found, StoredMatrix) else self.weight()

    def weight_rows(self, ids: Sequence[int]) -> NDArray[np.floating]:
        """Some rows of a matrix that every rank has whole. IndexError where it has fewer."""
        found = self.facts.rows(self.weights["weight"], ids)
        if found is None:
            raise Lacking(f"the checkpoint has no {self.weights['weight']}")
        return found

    def norm_weight(self) -> Array:
        """That of a norm; ones of one that has none."""
        if "weight" not in self.weights:
            return np.ones(self.inputs["x"].shape[-1])
        return self.weight().astype(np.float64)

    def bias(self) -> Array | None:
        """This rank's part of the bias; None of a module without."""
        return self.weight("bias").astype(np.float64) if "bias" in self.weights else None


_Number = TypeVar("_Number", bound=np.generic)
#: Expected, and the noise of each element.
Result = tuple[Array, Array]


def sum_noise(facts: Facts, length: int) -> float:
    """What the rounding of a sum of `length` terms comes to, over the root of the sum of their squares."""
    return facts.sum_unit * (1 + 0.5 * math.sqrt(length))


def floor(facts: Facts, noise: Array) -> Array:
    """Noise with what the dtype may take for zero."""
    return np.asarray(noise + SMALLEST[facts.dtype])


def embedding(o: Operands) -> Result:
    ids = [row.token for row in o.rows]
    read = sorted(set(ids))
    try:
        table = o.weight_rows(read)
    except IndexError as error:
        raise Lacking(f"a token id lies outside the table: {error}") from error
    found = o.value("embedding", weight=table, token=np.searchsorted(read, ids))
    plain = o.formula("embedding") == FORMULAS["embedding"]
    roundings = 1 if plain else 2  # of the multiplier too
    return found, floor(o.facts, roundings * o.facts.unit * np.abs(found))


def linear(o: Operands) -> Result:
    x, weight, bias = o.inputs["x"], o.matrix(), o.bias()
    if x.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise Lacking(
            f"its input of shape {list(x.shape)} does not fit a weight of shape {list(weight.shape)}"
        )
    added, first = np.zeros(weight.shape[0]) if bias is None else bias, 0
    parts: list[Result] = [(np.zeros((len(x), 0)), np.zeros((len(x), 0)))]
    for some in chunks_of(weight):
        here = added[first : first + len(some)]
        out = evaluate(FORMULAS["linear"], {"x": x, "weight": some, "bias": here})
        size = np.hypot(out - here, spread(x, some))
        parts.append((out, o.facts.unit * (size + np.abs(here)) + sum_noise(o.facts, x.shape[1]) * size))
        first += len(some)
    out, noise = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
    return out, floor(o.facts, noise)


def head(o: Operands) -> Result:
    """The output head: a product, divided and capped where the model's is."""
    model = o.facts.model
    product, noise = linear(o)
    divided, noise = product / model.logit_divisor, noise / abs(model.logit_divisor)
    if model.logit_divisor != 1:
        noise = noise + o.facts.unit * np.abs(divided)
    bias = 0.0 if (held := o.bias()) is None else held
    out = o.value("head", weight=o.weight(), bias=bias) if model.logit_cap else divided
    return out, floor(o.facts, capped_noise(o.facts, divided, noise, model.logit_cap))


def capped_noise(facts: Facts, x: Array, noise: Array, cap: float) -> Array:
    """What the noise of x comes to behind a soft cap, which rounds thrice itself; 0: there is none."""
    if not cap:
        return noise
    out = np.tanh(x / cap)
    return np.asarray((noise + facts.unit * np.abs(x)) * (1 - out**2) + 2 * facts.unit * np.abs(cap * out))


def reduce(o: Operands) -> Result:
    """The sum over the ranks' partial products [R, N, H], and the bias."""
    parts = o.inputs["partial"]
    bias = o.bias()
    out = evaluate(FORMULAS["reduce"], {"partial": parts, "bias": 0.0 if bias is None else bias})
    size = np.abs(parts).sum(0) + (0.0 if bias is None else np.abs(bias))
    return out, floor(o.facts, o.facts.unit * (size if len(parts) > 1 or bias is not None else np.abs(out)))


def norm(o: Operands) -> Result:
    """RMSNorm or LayerNorm over the last axis."""
    weight = o.norm_weight()
    x = as_normalised(o.inputs["x"], weight)
    out = o.value("norm", x=x, weight=weight, bias=0.0 if (bias := o.bias()) is None else bias)
    if "whole" in o.inputs:
        out = heads_of(out, o.facts.model.head_dim)
    if o.facts.model.centring:  # the mean, and what is left of x without it, are sums of float32
        added = np.zeros(1) if bias is None else bias
        terms = np.abs(out - added) + np.abs(added)
        largest, deviation = np.abs(x).max(-1, keepdims=True), np.maximum(x.std(-1, keepdims=True), 1e-30)
        sums = o.facts.sum_unit * np.abs(o.facts.norm_weight(weight)) * largest / deviation
        return out, floor(o.facts, 2 * (o.facts.unit * terms + sums))
    return out, floor(o.facts, 2 * o.facts.unit * np.abs(out))


def as_normalised(x: Array, weight: Array) -> Array:
    """x [N, …] with heads apart where each is normalised by itself: of as many channels as the weight."""
    return x if x.shape[-1] == len(weight) else x.reshape(len(x), -1, len(weight))


def normalised(x: Array, eps: float) -> Array:
    """x over its root mean square along the last axis."""
    return np.asarray(evaluate(NORMALISED, {"x": x, "eps": eps}))


def rope(o: Operands) -> Result:
    """Pairs (i, i + D/2) of every head rotated by position times frequency."""
    model = o.facts.model
    x = heads_of(o.inputs["x"], model.head_dim)
    angles = angles_of(model, o.rows)
    factor = magnitude(model)
    out = turned(model, x, angles, factor)
    first, second = pairs_of(model, x)
    size = np.hypot(first, second) * factor
    noise = size * (2 * o.facts.unit + 4 * UNIT["float32"] * angles)  # angles are made in float32
    spread = np.zeros_like(out)
    for half in pairs_of(model, spread):
        half[...] = noise
    return out, floor(o.facts, spread)


def turned(model: ModelConfig, x: Array, angles: Array, factor: float) -> Array:
    """x [N, heads, D] as the model's layers rotate it."""
    return np.asarray(evaluate(rotation_of(model), {"x": x, "angles": angles, "factor": factor}))


def pairs_of(model: ModelConfig, x: NDArray[_Number]) -> tuple[NDArray[_Number], NDArray[_Number]]:
    """The two channels of every pair that is rotated together, as views [N, heads, rotary_dim / 2]."""
    width = model.rotary_dim
    if model.rotary_last:
        x = x[..., x.shape[-1] - width :]
    if model.neighbours:
        return x[..., :width:2], x[..., 1:width:2]
    return x[..., : width // 2], x[..., width // 2 : width]


def as_read(operation: Operation, x: Array, model: ModelConfig) -> Array:
    """What an operation of latent attention reads of what was recorded [N, …]; else as it is."""
    if (latent := model.latent) is None:
        return x
    match operation.kind, operation.width:
        case "norm", "latent":
            return x[:, : latent.kv_rank]
        case "rope", "rope_key":
            return heads_of(x, x.shape[-1])[..., -latent.rope_dim :]
        case "cache", _:
            return heads_of(x, x.shape[-1])
        case "linear", _:
            return x.reshape(len(x), -1)
        case (("keys" | "values"), _):
            return heads_of(x, latent.expanded_dim)
        case _:
            return x


def expanded(o: Operands) -> Result:
    """Each head's key or value, of what the latents give: nothing is computed."""
    out = o.value("keys" if "rope" in o.inputs else "values")
    return out, floor(o.facts, o.facts.unit * np.abs(out))


def heads_of(x: Array, head_dim: int) -> Array:
    """[N, heads * D] as [N, heads, D]."""
    return x if x.ndim == 3 else x.reshape(len(x), -1, head_dim)


def residual(o: Operands) -> Result:
    scalar = o.weight("layer_scalar").astype(np.float64) if "layer_scalar" in o.weights else np.ones(1)
    out = o.value("residual", layer_scalar=scalar)
    multiplied = o.facts.model.residual_multiplier
    # Rounded by itself; or, where a product is summed onto the stream, not as it was recorded: by a quarter at a guess.
    added = np.abs(multiplied * o.inputs["y"]) * (0.25 if multiplied == 1 else 1.0)
    if "layer_scalar" in o.weights:  # the sum is rounded before
        added = np.abs(scalar) * added + np.abs(out)
    return out, floor(o.facts, o.facts.unit * (np.abs(out) + added))


def unit_norm(o: Operands) -> Result:
    """Each head, or row, over its root mean square."""
    x, declared = o.inputs["x"], o.declared
    rows = declared is not None and declared.form == "rows"
    out = o.value("unit_norm", x=x if rows else heads_of(x, o.facts.model.head_dim))
    return out, floor(o.facts, 2 * o.facts.unit * np.abs(out))


def channel_scale(o: Operands) -> Result:
    """Each channel times a number of its own, and all times one."""
    out = o.value("channel_scale", weight=o.weight().astype(np.float64))
    return out, floor(o.facts, 3 * o.facts.unit * np.abs(out))


def clip(o: Operands) -> Result:
    """Within a limit: nothing is rounded but the limit."""
    out = o.value("clip")
    return out, floor(o.facts, o.facts.unit * np.abs(out))


def multiplier(o: Operands) -> Result:
    """Times a number of the model, which may have been rounded itself."""
    out = o.value("multiplier")
    return out, floor(o.facts, 2 * o.facts.unit * np.abs(out))


def mixed(o: Operands) -> Result:
    """The sum of what two blocks give."""
    out = o.value("mixed")
    return out, floor(o.facts, o.facts.unit * np.abs(out))


def query_scaling(o: Operands) -> Result:
    """Queries times a factor of where they stand."""
    out = o.value(
        "query_scaling", x=heads_of(o.inputs["x"], o.facts.model.head_dim), position=positions_of(o.rows)
    )
    return out, floor(o.facts, 2 * o.facts.unit * np.abs(out))


def positions_of(rows: Sequence[Row]) -> Array:
    """Where tokens stand, [N, 1, 1]."""
    return np.array([row.position for row in rows], dtype=np.float64)[:, None, None]


def layer_inputs(o: Operands) -> Result:
    """The inputs of all layers: a product that is normalised layer by layer, and the embedding's."""
    out = o.value("layer_inputs", weight=o.weight().astype(np.float64))
    factor = numbers_of(o.facts.model)["input_factor"]
    terms = np.abs(out) + factor * np.abs(o.inputs["embedded"])
    return out, floor(o.facts, 4 * o.facts.unit * terms)


def layer_input(o: Operands) -> Result:
    """One layer's part of them: nothing is computed."""
    out = o.value("layer_input")
    return out, floor(o.facts, np.zeros_like(out))


def activation(o: Operands) -> Result:
    if o.facts.model.activation == "xielu":
        return _xielu(o)
    up, clamp = o.inputs["up"], o.facts.model.clamp
    gate, up = (o.inputs["gate"], up) if o.facts.model.gated else (up, np.ones(1))
    out = o.value("activation")
    if clamp is not None:  # the sum of 1 and up may be far smaller than either
        gate, up = np.minimum(gate, clamp.limit), 1 + np.clip(np.abs(up), 0, clamp.limit)
        return out, floor(o.facts, 4 * o.facts.unit * np.abs(swish(gate, clamp.slope) * up))
    lost = SMALLEST[o.facts.dtype] * (1 + np.abs(gate)) * np.abs(up)  # of a sigmoid that is nearly zero
    return out, floor(o.facts, 3 * o.facts.unit * np.abs(out) + lost + _of_tanh(o.facts, gate, up))


def _xielu(o: Operands) -> Result:
    """Its terms may be far larger than their sum."""
    numbers = {role: o.weight(role).astype(np.float64) for role in shards.XIELU}
    out, x = o.value("activation", **numbers), o.inputs["up"]
    line, below = numbers["xielu_beta"] * x, np.minimum(x, 0.0)
    slope = numbers["xielu_beta"] + softplus(numbers["alpha_n"])
    size = np.abs(out - line) + np.abs(line) + slope * (np.abs(np.expm1(below)) + np.abs(below))
    return out, floor(o.facts, 4 * o.facts.unit * size)


def _of_tanh(facts: Facts, gate: Array, up: Array) -> Array | float:
    """GELU multiplies by a sum that comes near zero, each of whose terms is about 1."""
    return (
        0.0
        if facts.model.activation in ("silu", "relu2")
        else np.asarray(4 * facts.sum_unit * np.abs(gate * up))
    )


ROW_WISE: Mapping[str, Callable[[Operands], Result]] = {
    "embedding": embedding,
    "linear": linear,
    "head": head,
    "reduce": reduce,
    "norm": norm,
    "rope": rope,
    "residual": residual,
    "activation": activation,
    "keys": expanded,
    "values": expanded,
    "unit_norm": unit_norm,
    "layer_inputs": layer_inputs,
    "layer_input": layer_input,
    "query_scaling": query_scaling,
    "clip": clip,
    "channel_scale": channel_scale,
    "multiplier": multiplier,
    "mixed": mixed,
}
