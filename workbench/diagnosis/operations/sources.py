"""Which recorded taps go into each operation, and what stands for one that an engine does not show.

Fused kernels leave taps out: no scores and probabilities, no cache, no partial products, no sum before a norm. Then the
operation is judged from what was recorded before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import BLOCKS, LAYER, MULTIPLIED, Operation, instead_of, operation_of
from lockstep.engine.graph.formula import FORMULAS, evaluate, numbers_of
from lockstep.engine.graph.operation import OF_POSITIONS, Kind
from lockstep.engine.taps.flow import UnknownTap, near
from lockstep.engine.taps.names import layer_of, local_name, operation_at
from lockstep.workbench.diagnosis.operations.expected import (
    Lacking,
    heads_of,
    normalised,
    positions_of,
    turned,
)
from lockstep.workbench.diagnosis.operations.facts import UNIT, Facts
from lockstep.workbench.diagnosis.operations.mixture import MIXTURE, ROOTS, read_by
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps, Row
from lockstep.workbench.diagnosis.operations.recurrent import RECURRENT
from lockstep.workbench.diagnosis.operations.rotary import angles_of, magnitude
from lockstep.workbench.diagnosis.operations.shares import module_of
from lockstep.workbench.diagnosis.recording import Array

_Inputs = Mapping[str, tuple[str, ...]]

#: What distinguishes keys and values from what is of this pass alone.
_REMEMBERED = ("k", "v", "written")

#: Where a layer adds to the stream.
_STREAM = tuple(block[-1] for block in BLOCKS)
#: What is made again where it was not recorded, from what went in.
_MADE_AGAIN = ("cache", "rope", "query_scaling")
_NORMED_AGAIN = ("attn.q_norm", "attn.k_norm")
#: What ends the names of norms behind the rotation.
_BEHIND_ROTATION = ("_rope_norm", "_unit_norm")
#: Operations of queries and keys that were rotated.
_OF_ROTATED = ("scores", "weights", "attention", "index_scores", "key_choice")
#: Attention in one kernel, from the operation on which no input of one role was captured.
_FUSED = {"softmax": "weights", "context": "attention"}


def _declared(tap: str, facts: Facts) -> Operation:
    """The operation of a layer at a tap, as the model has it."""
    return (None if facts.model_free else operation_of(facts.model, tap)) or LAYER[tap]


def _instead(tap: str, facts: Facts) -> tuple[str, ...]:
    """What goes into attention at a tap, and what that can be made from, nearest first: of a layer that reads another
    one's cache, what that one wrote."""
    layer, kind = layer_of(tap), local_name(tap)
    operation = _declared(kind, facts) if layer is None else LAYER[kind]
    if operation.kind not in _MADE_AGAIN and operation.part not in ("qk_norm", "unit_qk_norm"):
        return (tap,)
    (read,) = operation.inputs.values()
    return (tap, *_instead(read if layer is None else near(read, layer, 0), facts))


def _with_lengths(tap: str) -> tuple[str, ...]:
    """What linear attention reads, and where heads over their length were not recorded what these are made from."""
    operation = LAYER[tap]
    return (tap, *operation.inputs.values()) if operation.kind == "l2_norm" else (tap,)


def _taken(operation: Operation, facts: Facts) -> _Inputs:
    """Inputs by role: taps of the same layer, of which the first that was captured counts. Of a model that is not
    known, those that stand in for what it may lack."""
    if operation.form == "cached_rows":  # of the new tokens what was written of them
        return {role: _instead(tap, facts) for role, tap in operation.inputs.items()}
    if operation.kind in ("state", "delta"):
        return {role: _with_lengths(tap) for role, tap in operation.inputs.items()}
    if operation.kind == "index_scores":
        return {role: _instead(tap, facts) for role, tap in operation.inputs.items()}
    if operation.form == "cells" or operation.kind == "context":
        return {role: _instead(tap, facts) for role, tap in operation.inputs.items()}
    return {
        role: instead_of(tap) if facts.model_free or tap in _NORMED_AGAIN else (tap,)
        for role, tap in operation.inputs.items()
    }


def _fused(operation: Operation, facts: Facts) -> _Inputs:
    """The same with scores and probabilities left out: what went into them."""
    found: dict[str, tuple[str, ...]] = {}
    for role, tap in operation.inputs.items():
        before = _declared(tap, facts)
        found |= _fused(before, facts) if before.form == "cells" else {role: _instead(tap, facts)}
    return found


@dataclass(frozen=True, slots=True)
class OperationInput:
    """One input by role: a tap of which each rank's own part goes in, or (`gathered`) all ranks'; of several taps
    their sum. `history`: of all tokens of the sequence so far. What was still to be done: `rotate`, `normalise`,
    `shorten` (heads to a length of 1), `finish` (what comes behind the rotation); `made`: the taps are the inputs of an
    operation of this kind, in its order."""

    taps: tuple[str, ...]
    gathered: bool = False
    history: bool = False
    rotate: bool = False
    normalise: bool = False
    shorten: bool = False
    finish: bool = False
    made: Kind | None = None

    @property
    def tap(self) -> str:
        """The one that is named."""
        return self.taps[0]


def sources_of(tap: str, taps: RecordedTaps, facts: Facts) -> tuple[str, dict[str, OperationInput], str]:
    """The operation at a tap, its inputs by role, and what is missing of them ("": nothing)."""
    kind, layer = local_name(tap), layer_of(tap)
    declared = (None if facts.model_free else operation_of(facts.model, kind)) or operation_at(tap)
    if declared is None:
        raise UnknownTap(f"{tap} is no tap of a decoder")
    operation, wanted = declared.kind, _taken(declared, facts)
    if kind in ROOTS and not facts.model_free and _is_fused(kind, layer, taps):
        return _mixture(kind, layer, taps, facts)
    if operation == "reduce" and not taps.captured(
        f"{tap}.partial"
    ):  # an engine that shows no partial products
        if kind not in MULTIPLIED:
            return _unsummed(declared, layer, taps, facts)
        term = None if facts.model_free else operation_of(facts.model, f"{kind}.partial")
        read = MULTIPLIED[kind] if term is None else term.inputs["x"]
        source = OperationInput((near(read, layer, 0),), gathered=len(taps.ranks) > 1)
        return "linear", {"x": source}, "" if taps.has(source.tap) else f"{source.tap} was not recorded"
    found = _inputs(tap, operation, wanted, taps, facts)
    if operation == "norm" and declared.sharded and facts.model.qk_norm_whole and "x" in found[0]:
        found[0]["whole"] = OperationInput(found[0]["x"].taps, gathered=len(taps.ranks) > 1)
    if operation == "key_choice" and not taps.captured(near(declared.inputs["scores"], layer, 0)):
        return operation, *_inputs(
            tap, operation, _taken(LAYER[declared.inputs["scores"]], facts), taps, facts
        )
    if operation == "gated_norm" and facts.model.mamba is not None and not found[1]:
        gathered = facts.model.mamba.norm_sharers(len(taps.ranks)) > 1
        for role, whole in (("x", "whole"), ("gate", "whole_gate")):
            found[0][whole] = OperationInput(found[0][role].taps, gathered=gathered)
    if operation in _FUSED and not all(
        role in found[0] and taps.captured(found[0][role].tap) for role in wanted
    ):
        fused, wanted = _FUSED[operation], _fused(declared, facts)
        instead = _inputs(tap, fused, wanted, taps, facts)
        if all(role in instead[0] and taps.captured(instead[0][role].tap) for role in wanted):
            return fused, *instead
    return operation, *found


def _is_fused(kind: str, layer: int | None, taps: RecordedTaps) -> bool:
    """Whether what experts give was not recorded, so that their sum is judged from what went in: at the rank's own
    term, where there is one."""
    if taps.captured(near("mlp.experts.down", layer, 0)):
        return False
    return kind == ROOTS[0] or not taps.captured(near(ROOTS[0], layer, 0))


def _mixture(
    kind: str, layer: int | None, taps: RecordedTaps, facts: Facts
) -> tuple[str, dict[str, OperationInput], str]:
    read = read_by(facts.model, lambda tap: taps.captured(near(tap, layer, 0)))
    gathered = kind != ROOTS[0] and len(taps.ranks) > 1
    sources = {tap: OperationInput((near(tap, layer, 0),), gathered) for tap in read}
    missing = next((one.tap for one in sources.values() if not taps.has(one.tap)), None)
    return MIXTURE, sources, "" if missing is None else f"{missing} was not recorded"


def _unsummed(
    reduce: Operation, layer: int | None, taps: RecordedTaps, facts: Facts
) -> tuple[str, dict[str, OperationInput], str]:
    """A sum over the ranks of which no terms were recorded: what gives the terms, of whole inputs."""
    term = operation_of(facts.model, reduce.inputs["partial"]) or LAYER[reduce.inputs["partial"]]
    several = len(taps.ranks) > 1
    sources = {role: OperationInput((near(tap, layer, 0),), several) for role, tap in term.inputs.items()}
    missing = next((one.tap for one in sources.values() if not taps.has(one.tap)), None)
    return term.kind, sources, "" if missing is None else f"{missing} was not recorded"


def _inputs(
    tap: str, operation: str, wanted: _Inputs, taps: RecordedTaps, facts: Facts
) -> tuple[dict[str, OperationInput], str]:
    sources, missing, layer = {}, "", layer_of(tap)
    for role, kinds in wanted.items():
        there = [kind for kind in kinds if taps.has(near(kind, layer, facts.model.num_layers))]
        names = {kind: near(kind, layer, facts.model.num_layers) for kind in kinds}
        best = next((kind for kind in there if taps.captured(names[kind])), None)
        summed = (
            None
            if best
            else next((s for s in _sums(names[kinds[-1]], facts.model) if all(map(taps.captured, s))), None)
        )
        made = None if best else _made_of_latents(kinds[0], layer, taps, facts)
        if summed:
            sources[role] = OperationInput(summed)
        elif made:
            sources[role] = made
        elif best or there:
            sources[role] = _source(operation, role, best or there[0], names, facts)
        else:
            missing = f"{names[kinds[-1]]} was not recorded"
    return sources, missing


def _made_of_latents(kind: str, layer: int | None, taps: RecordedTaps, facts: Facts) -> OperationInput | None:
    """Keys or values of all that is cached, by what each token's latent gave when it was new and by the rotated part of
    its key; None of other taps, and where these were not recorded."""
    operation = LAYER.get(kind)
    if operation is None or operation.kind not in ("keys", "values"):
        return None
    read = [LAYER[tap] for tap in operation.inputs.values()]
    written = (one.inputs["written"] if one.kind == "cache" else one.tap for one in read)
    names = tuple(near(tap, layer, facts.model.num_layers) for tap in written)
    recorded = all(map(taps.captured, names))
    return OperationInput(names, history=True, made=operation.kind) if recorded else None


def _source(operation: str, role: str, kind: str, names: Mapping[str, str], facts: Facts) -> OperationInput:
    turned = operation in _OF_ROTATED and role in ("q", "k")
    unturned = turned and kind.endswith(("_proj", "_norm")) and not kind.endswith(_BEHIND_ROTATION)
    normalise = (
        facts.model.qk_norm
        and local_name(kind) in ("attn.q_proj", "attn.k_proj")
        and (unturned or operation == "rope")
    )
    remembered = operation not in RECURRENT and role in _REMEMBERED
    history = remembered and LAYER[local_name(kind)].form not in OF_POSITIONS
    shorten = operation in ("state", "delta") and role in ("q", "k") and LAYER[kind].kind != "l2_norm"
    finish = turned and kind.endswith(
        ("q_proj", "q_b_proj", "k_proj", "q_norm", "k_norm", "q_rope", "k_rope")
    )
    return OperationInput(
        (names[kind],), operation == "reduce", history, unturned, normalise, shorten, finish
    )


def made_ready(source: OperationInput, x: Array, rows: Sequence[Row], facts: Facts) -> Array:
    """What was recorded [N, …] with what was still to be done to it, as [N, heads, D] then. Lacking without the norm's
    weight."""
    if source.normalise:
        norm = f"layers.{layer_of(source.tap)}.attn.{local_name(source.tap)[5]}_norm"
        name = f"{module_of(norm, facts.model)}.weight"
        by_hand = facts.model.qk_norm_whole or facts.model.centring
        weight = None if by_hand else facts.vector(name)
        if by_hand:
            raise Lacking(f"{source.tap.replace('_proj', '_norm')} was not recorded")
        if weight is None:
            raise Lacking(f"the checkpoint has no {name}")
        x = normalised(heads_of(x, facts.model.head_dim), facts.model.rms_eps) * facts.norm_weight(weight)
    if source.shorten:
        x = np.asarray(evaluate(FORMULAS["l2_norm"], {**numbers_of(facts.model), "x": x}))
    if source.rotate:
        heads = heads_of(x, facts.model.head_dim)
        x = turned(facts.model, heads, angles_of(facts.model, rows), magnitude(facts.model))
    return _finished(local_name(source.tap), x, rows, facts) if source.finish else x


def _finished(tap: str, x: Array, rows: Sequence[Row], facts: Facts) -> Array:
    """Rotated queries or keys with what the model does behind the rotation."""
    model = facts.model
    if model.unit_qk_norm:
        x = normalised(heads_of(x, model.head_dim), model.rms_eps)
    if model.query_scaling is not None and tap.startswith("attn.q"):
        given = {**numbers_of(model), "position": positions_of(rows), "x": heads_of(x, model.head_dim)}
        x = np.asarray(evaluate(FORMULAS["query_scaling"], given))
    return x


def slack_of(source: OperationInput, rows: Sequence[Row], facts: Facts) -> float:
    """The roundings that `made_ready` leaves out, relative."""
    angle = max((row.position for row in rows), default=0) * UNIT["float32"] if source.rotate else 0.0
    steps = source.normalise + source.rotate + source.finish
    return facts.unit * 2 * steps + 4 * angle


def _sums(tap: str, model: ModelConfig) -> Iterator[tuple[str, ...]]:
    """What the residual stream at a tap is the plain sum of: an earlier stream, the nearest first, and what came after
    it."""
    layer, kind = layer_of(tap), local_name(tap)
    if (
        layer is None
        or kind not in _STREAM
        or model.residual_multiplier != 1
        or model.layer_scalar
        or model.blocks
    ):
        return
    added: tuple[str, ...] = ()
    for place in range(2 * layer + _STREAM.index(kind), -1, -1):
        operation = operation_of(model, _STREAM[place % 2])
        assert operation is not None, "every layer adds to the stream twice"
        read, term = (near(operation.inputs[role], place // 2, 0) for role in "xy")
        added = (term, *added)
        yield read, *added
