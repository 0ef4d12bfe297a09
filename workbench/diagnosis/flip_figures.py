"""A flip in figures, of routing or of an indexer's choice of keys: by how little the reference chose as it did, and
what moved the engine's choice.

The row of a token that flips is followed from the stream that enters the model on: what the error that it has there
does to the router's logits shows whether the choice would be the engine's already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.engine.graph import STREAM, operation_of
from lockstep.engine.graph.formula import evaluate, formula_of, numbers_of
from lockstep.engine.graph.routing import chosen
from lockstep.engine.taps.flow import near
from lockstep.engine.taps.names import layer_of
from lockstep.workbench.diagnosis.judgement import TapVerdict
from lockstep.workbench.diagnosis.operations.facts import UNIT, Facts
from lockstep.workbench.diagnosis.operations.shares import weight_names
from lockstep.workbench.diagnosis.recording import Array, Recording
from lockstep.workbench.judgements.golden_event import RoutingFlip

#: Steps of the search for a margin.
_HALVINGS = 48
#: Flips of a run that are reported one by one.
MOST = 64


def flips_in_figures(
    found: Sequence[TapVerdict], engine: Recording, golden: Recording, facts: Facts
) -> tuple[RoutingFlip, ...]:
    """Each token that went to other experts at the taps `found`, as far as both sides have its tensors."""
    reported = (
        flip for one in found for flip in _of_tap(one, engine, golden, facts.of_layer(layer_of(one.tap)))
    )
    return tuple(flip for flip, _ in zip(reported, range(MOST), strict=False))


def _of_tap(one: TapVerdict, engine: Recording, golden: Recording, facts: Facts) -> Iterator[RoutingFlip]:
    place, keys = (one.step, one.seq), ".attn." in one.tap
    ours, theirs = (side.whole_or_none(one.tap, *place) for side in (engine, golden))
    scored = near("attn.index_scores" if keys else "mlp.router", layer_of(one.tap), 0)
    logits = golden.whole_or_none(scored, *place)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return
    choice = None if logits is None or keys or facts.model_free else _Choice.of(one.tap, facts)
    positions = engine.sequences(one.step)[one.seq].positions
    for row in np.flatnonzero((np.sort(ours, -1) != np.sort(theirs, -1)).any(-1)).tolist():
        taken, lost = (sorted(set(a[row]) - set(b[row])) for a, b in ((ours, theirs), (theirs, ours)))
        margin = rounding = None
        origin = ""
        if choice is not None and logits is not None:
            margin, rounding = choice.margin(logits[row], lost, taken, UNIT[engine.dtype])
            origin = _origin(choice, _FlippedRow(engine, golden, one, row), set(ours[row]))
        elif keys and logits is not None:
            margin, rounding = _margin_of_keys(logits[0, row], lost, taken, UNIT[engine.dtype])
        yield RoutingFlip(
            one.tap,
            one.step,
            one.seq,
            int(positions[row]) if row < len(positions) else row,
            tuple(map(int, taken)),
            tuple(map(int, lost)),
            margin,
            rounding,
            origin,
        )


def _margin_of_keys(
    scores: Array, lost: Sequence[float], taken: Sequence[float], unit: float
) -> tuple[float, float]:
    """By how much the best of the lost keys scored more than the worst of those that were taken, [K] in all; and by how
    much one rounding moves both together, where they are as large as the largest score."""
    best, worst = (
        np.array([scores[int(one)] for one in keys if 0 <= one < len(scores)] or [0.0])
        for keys in (lost, taken)
    )
    seen = scores[np.isfinite(scores)]
    return float(best.max() - worst.min()), 2 * unit * float(np.abs(seen).max(initial=0.0))


@dataclass(frozen=True, slots=True)
class _FlippedRow:
    """A token's row at a tap at which its choice flips."""

    engine: Recording
    golden: Recording
    at: TapVerdict
    row: int

    def sides(self, tap: str) -> tuple[Array, Array] | None:
        """What both sides have at another tap of the pass; None where one of them has nothing."""
        ours, theirs = (
            side.whole_or_none(tap, self.at.step, self.at.seq) for side in (self.engine, self.golden)
        )
        if ours is None or theirs is None or ours.shape != theirs.shape or self.row >= len(ours):
            return None
        return ours[self.row].ravel(), theirs[self.row].ravel()


@dataclass(frozen=True, slots=True)
class _Choice:
    """How a layer of the model chooses experts. `norm` and `matrix`: the weights between stream and logits."""

    facts: Facts
    layer: int
    correction: Array | float
    matrix: Array
    norm: Array | None

    @classmethod
    def of(cls, tap: str, facts: Facts) -> _Choice | None:
        """At the tap of a choice; None where the checkpoint lacks a weight."""
        layer = layer_of(tap)
        router, norm = near("mlp.router", layer, 0), near("mlp_norm", layer, 0)
        matrix = facts.weight(weight_names(router, "linear", facts)["weight"])
        named = weight_names(tap, "choice", facts).get("correction")
        correction = facts.vector(named) if named is not None else 0.0
        if layer is None or matrix is None or correction is None:
            return None
        if facts.model.experts is not None and facts.model.experts.beside_mlp:
            name = weight_names(near("mlp.router_input", layer, 0), "channel_scale", facts)["weight"]
            weight = facts.vector(name)
            weight = None if weight is None else weight * facts.model.hidden_size**-0.5
        else:
            declared = operation_of(facts.model, "mlp_norm")
            weight = (
                facts.vector(weight_names(norm, "norm", facts)["weight"]) if declared is not None else None
            )
            weight = None if weight is None else facts.norm_weight(weight)
        return cls(facts, layer, correction, matrix.astype(np.float64), weight)

    @property
    def read(self) -> str:
        """The tap of what the router reads."""
        router = operation_of(self.facts.model, "mlp.router")
        return near("mlp_norm" if router is None else router.inputs["x"], self.layer, 0)

    def _evaluated(self, logits: Array, chosen: bool) -> Array:
        declared = operation_of(self.facts.model, "mlp.topk_ids")
        assert declared is not None, "a model with experts chooses them"
        formula = formula_of(declared, self.facts.model)
        given = {**numbers_of(self.facts.model), "logits": logits[None], "correction": self.correction}
        found: Array = np.asarray(evaluate(formula if chosen else formula.args[0], given))[0]
        return found

    def margin(
        self, logits: Array, lost: Sequence[float], taken: Sequence[float], unit: float
    ) -> tuple[float, float]:
        """By how much the scores of the experts that were taken, against those that were lost, fall short of being
        chosen, be it alone or with their groups; and by how much one rounding of their logits moves both together."""
        ours, theirs = [int(one) for one in taken], [int(one) for one in lost]
        scores, right = self._evaluated(logits, chosen=False), set(self._evaluated(logits, chosen=True))
        wanted, half = (right - set(theirs)) | set(ours), np.zeros_like(scores)
        half[ours], half[theirs] = 0.5, -0.5
        least, most = 0.0, 2 * float(np.ptp(scores))
        for _ in range(_HALVINGS):
            middle = (least + most) / 2
            found = set(self._of_scores(scores + middle * half)) == wanted
            least, most = (least, middle) if found else (middle, most)
        rounding = 0.0
        for group in (ours, theirs):
            moved = logits.copy()
            moved[group] += unit * np.abs(logits[group])
            rounding += float(np.abs(self._evaluated(moved, chosen=False) - scores)[group].max())
        return most, rounding

    def _of_scores(self, scores: Array) -> Array:
        """The experts that these scores choose."""
        experts = self.facts.model.experts
        assert experts is not None, "a model with experts chooses them"
        how = experts.top_k, experts.groups, experts.top_groups, experts.group_best
        found: Array = chosen(scores[None], *how)[0]
        return found

    def turned(self, logits: Array, to: set[float]) -> bool:
        """Whether these logits choose those experts."""
        return set(self._evaluated(logits, chosen=True)) == to

    def from_stream(self, stream: Array, off: Array) -> Array:
        """How far an error of the stream moves the logits, to first order of all but the norm's own scale."""
        if self.norm is None:
            return self.matrix @ off
        scale = np.sqrt(np.square(stream).mean() + self.facts.model.rms_eps)
        moved = np.sqrt(np.square(stream + off).mean() + self.facts.model.rms_eps)
        return np.asarray(self.matrix @ (self.norm * ((stream + off) / moved - stream / scale)))


def _origin(choice: _Choice, row: _FlippedRow, to: set[float]) -> str:
    """The operation from which on what the row is off by turns the choice: "" where not even the logits do."""
    router = near("mlp.router", choice.layer, 0)
    logits = row.sides(router)
    if logits is None:
        return ""
    found = "" if not choice.turned(logits[0], to) else router
    for tap in reversed([*_before(choice.layer), choice.read]):
        sides = row.sides(tap)
        if sides is None or not found:
            continue
        ours, theirs = sides
        off = ours - theirs
        moved = choice.matrix @ off if tap == choice.read else choice.from_stream(theirs, off)
        if not choice.turned(logits[1] + moved, to):
            return found
        found = tap
    return found or row.at.tap


def _before(layer: int) -> Iterator[str]:
    """The stream before a layer's router, in the order of execution."""
    yield near(STREAM, 0, 0)
    for one in range(layer + 1):
        yield near("attn_residual", one, 0)
        if one < layer:
            yield near(STREAM, one + 1, 0)
