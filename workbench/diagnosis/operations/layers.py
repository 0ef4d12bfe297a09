"""A whole layer, run again in float64 from what entered it; and those of whose inside nothing was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import LAYER_OUTPUT, STREAM, Operation, operations_of
from lockstep.engine.graph.formula import evaluate, formula_of, numbers_of
from lockstep.engine.taps.flow import near
from lockstep.engine.taps.names import layer_of, local_name
from lockstep.workbench.diagnosis.operations.attention import AttentionPass
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.expected import Lacking, as_read, heads_of, normalised
from lockstep.workbench.diagnosis.operations.experts import expert_matrices, hit
from lockstep.workbench.diagnosis.operations.facts import LARGEST, Facts
from lockstep.workbench.diagnosis.operations.indexer import PASS_WISE
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps, Row
from lockstep.workbench.diagnosis.operations.rotary import frequencies, lengths_of, magnitude
from lockstep.workbench.diagnosis.operations.shares import weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Roundings that a value has behind it after a whole layer: what its noise is taken for.
_ROUNDINGS = 64


def layer_output(facts: Facts, layer: int, stream: Array, rows: tuple[Row, ...]) -> Array | None:
    """The residual stream [N, H] after a layer, of all tokens of every sequence from its first one on; None where
    the checkpoint lacks a weight or the rows do not begin at position 0."""
    model, found = facts.model, np.empty_like(stream)
    positions = np.array([row.position for row in rows])
    for seq in {row.seq for row in rows}:
        mine = np.flatnonzero([row.seq == seq for row in rows])
        order = mine[np.argsort(positions[mine], kind="stable")]
        if not np.array_equal(positions[order], np.arange(len(order))):
            return None
        window = model.windows[layer] if model.windows else None
        after = _run(facts, layer, stream[order], [rows[i] for i in order], window)
        if after is None:
            return None
        found[order] = after
    return found


def normalise(facts: Facts, name: str, x: Array) -> Array | None:
    """RMSNorm by a weight of the checkpoint; None where that lacks, or the model has LayerNorm."""
    weight = None if facts.model.centring else facts.vector(name)
    return None if weight is None else normalised(x, facts.model.rms_eps) * facts.norm_weight(weight)


def _run(facts: Facts, layer: int, stream: Array, rows: Sequence[Row], window: int | None) -> Array | None:
    """What a layer gives for the tokens of one sequence, operation by operation."""
    facts = facts.of_layer(layer)
    made = {STREAM: stream}
    for operation in operations_of(facts.model):
        if not made.keys() >= set(operation.inputs.values()):  # what other layers give
            return None
        read = {role: made[tap] for role, tap in operation.inputs.items()}
        weights = weight_names(f"layers.{layer}.{operation.tap}", operation.kind, facts)
        try:
            held = {role: _held(facts, operation, name, read) for role, name in weights.items()}
        except Lacking:
            return None
        given = {**read, **held}
        own = facts.of_tap(f"layers.{layer}.{operation.tap}")
        made[operation.tap] = _value(operation, own, given, rows, window)
    return made[LAYER_OUTPUT]


def _held(facts: Facts, operation: Operation, name: str, read: Mapping[str, Array]) -> Any:
    """A weight, or those of all experts that a token goes to. Lacking where the checkpoint has none."""
    if operation.kind == "experts":
        return expert_matrices(facts, name, hit(read["ids"]))
    if (found := facts.weight(name)) is None:
        raise Lacking(f"the checkpoint has no {name}")
    return found


def _value(
    operation: Operation, facts: Facts, given: Mapping[str, Any], rows: Sequence[Row], window: int | None
) -> Array:
    model, at = facts.model, np.arange(len(rows))
    if operation.kind in PASS_WISE and operation.kind != "cache":
        return PASS_WISE[operation.kind](AttentionPass(facts, given, at, window))[0]
    whole = operation.kind == "norm" and model.qk_norm_whole
    if model.latent is not None:
        given = {
            role: as_read(operation, x, model) if role in operation.inputs else x for role, x in given.items()
        }
    if operation.form in ("heads", "cache", "cells") and not whole:
        given = {role: heads_of(x, model.head_dim) if x.ndim > 1 else x for role, x in given.items()}
    if operation.kind == "reduce":  # of one rank alone
        given = {**given, "partial": given["partial"][None]}
    more = {
        "whole": given.get("x"),
        "whole_gate": given.get("gate"),
        "bias": 0.0,
        **numbers_of(model, operation),
        "angles": at[:, None, None] * frequencies(model, lengths_of(rows)),
        "factor": magnitude(model),
        "before": _nothing(operation, model, given),
        "position": at[:, None, None],
    }
    return np.asarray(evaluate(formula_of(operation, model), {**more, **given}))


def _nothing(operation: Operation, model: ModelConfig, given: Mapping[str, Any]) -> Array:
    """What linear attention has before a sequence's first token."""
    if operation.kind == "conv":
        return np.zeros((model.conv - 1, given["x"].shape[1]))
    if (mamba := model.mamba) is not None:
        return np.zeros((mamba.heads, mamba.head_dim, mamba.state))
    if (linear := model.linear) is None:
        return np.zeros(0)
    return np.zeros((linear.value_heads, linear.key_dim, linear.value_dim))


#: What a layer that ran leaves at least one of.
_INSIDE = (
    "attn_norm",
    "attn.q_proj",
    "attn.o_proj",
    "attn.in_proj_q",
    "attn.conv_x",
    "attn.ssm_x",
    "attn.out_proj",
    "mlp_norm",
    "mlp.gate",
    "mlp.down",
)


def missing_layers(tap: str, taps: RecordedTaps, facts: Facts) -> Iterator[Site]:
    """A layer of whose inside nothing was recorded, no statistics either, though of others it was: its output (`tap`),
    or where that lacks as well the norm that reads it, held against what the layer should have given. The site stands
    at the layer."""
    at, norm = layer_of(tap), local_name(tap) in ("attn_norm", "final_norm")
    last = (facts.model.num_layers if at is None else at) - 1 if norm else at
    if last is None or last < 0 or (norm and _captured(taps, f"layers.{last}.mlp_residual")):
        return
    first = last
    while norm and first and not _captured(taps, near("<", first, 0)):
        first -= 1
    entered, within = near("<", first, 0), range(first, last + 1)
    passes = tuple(range(len(taps.passes)))
    x, out = taps.rows(entered, 0, passes), taps.rows(tap, 0, passes)
    others = (layer for layer in range(facts.model.num_layers) if layer not in within)
    if (
        x is None
        or out is None
        or any(_ran(taps, i) for i in within)
        or not any(_ran(taps, i) for i in others)
    ):
        return
    rows = tuple(row for one in taps.passes for row in one.rows)
    weights = weight_names(tap, "norm", facts) if norm else {}
    expected: Array | None = x
    for layer in within:
        expected = None if expected is None else layer_output(facts, layer, expected, rows)
    if expected is not None and norm:
        expected = normalise(facts, weights.get("weight", ""), expected)
    if expected is not None and out.shape == expected.shape:
        part = Part(rows, {"x": x}, out, expected, layer_noise(facts, expected), LARGEST[facts.dtype])
        name = f"layers.{last}.mlp_residual"
        yield Site(
            name, "layer", 0, tuple(taps.ranks), (part,), facts, taps, passes, weights, slice(first, last + 1)
        )


def _ran(taps: RecordedTaps, layer: int) -> bool:
    names = [f"layers.{layer}.{kind}" for kind in _INSIDE]
    return any(_captured(taps, name) or taps.measured(name) for name in names)


def _captured(taps: RecordedTaps, tap: str) -> bool:
    return taps.has(tap) and any(x is not None for x in taps.tensors(tap, 0))


def layer_noise(facts: Facts, x: Array) -> Array:
    """The rounding that the stream [N, H] may have behind it after a layer."""
    size = np.sqrt((x**2).mean(-1, keepdims=True))
    return np.asarray(_ROUNDINGS * facts.unit * size + np.zeros_like(x))
