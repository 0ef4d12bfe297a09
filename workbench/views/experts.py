"""Which experts the tokens of a step went to in one layer: the load of each expert, and each token's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.errors import ConfigError
from lockstep.engine.parallel.shards import placed_experts
from lockstep.engine.taps.names import layer_of, local_name
from lockstep.sessions import layouts
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.layouts import Rebuilt
from lockstep.sessions.text import clean
from lockstep.workbench.views.axes import tap_axes
from lockstep.workbench.views.cached_lengths import runs, span
from lockstep.workbench.views.present_layer import present_layer
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.numbers import number, scalar

#: The taps that it is read from: the choice [T, S], its weights [T, S], the logits of all experts [T, E].
CHOSEN, WEIGHTS, ROUTER = "mlp.topk_ids", "mlp.topk_weights", "mlp.router"
#: Rows of the experts that a rank has: their layout shows how the experts lie on the ranks.
_ROWS = "mlp.experts.up"

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """One expert in one step: how many tokens went to it, its share of all slots, the sum of its weights (None: not
    recorded), the ranks that hold it or a part of it (empty: not known)."""

    expert: int
    tokens: int
    share: float
    weight: float | None
    ranks: range


@dataclass(frozen=True, slots=True)
class ChosenExpert:
    """A slot of a token: the number as recorded, which may be no expert's; its weight and its router logit."""

    number: float
    weight: float | None
    logit: float | None


@dataclass(frozen=True, slots=True)
class TokenExperts:
    """What one token chose. `margin`: the least logit of a chosen expert less the largest of another, `runner_up`.
    `flaws` names what is wrong with it. `golden` are the reference's experts; `differs`: they are others."""

    position: int
    chosen: tuple[ChosenExpert, ...]
    margin: float | None
    runner_up: int | None
    flaws: tuple[str, ...]
    golden: tuple[float, ...] | None
    differs: bool


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """One sequence's tokens in one layer and step, as recorded: experts and weights [T, S], logits [T, E], the
    reference's experts [T, S]."""

    positions: Sequence[int]
    ids: Numbers
    weights: Numbers | None = None
    logits: Numbers | None = None
    golden: Numbers | None = None
    count: int | None = None  # experts of the layer; None: not recorded

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def real(self) -> NDArray[np.bool_]:
        """The slots [T, S] that hold the number of an expert."""
        top = np.inf if self.count is None else self.count
        return np.asarray((self.ids >= 0) & (self.ids < top) & (self.ids == np.floor(self.ids)))

    @property
    def first(self) -> NDArray[np.bool_]:
        """The slots [T, S] that hold an expert which no slot before holds."""
        same = self.ids[:, :, None] == self.ids[:, None, :]  # [T, S, S]
        return np.asarray(self.real & ~np.tril(same, -1).any(-1))

    @property
    def differing(self) -> NDArray[np.bool_]:
        """The tokens [T] whose set of experts is not the reference's."""
        if self.golden is None:
            return np.zeros(len(self), bool)
        if self.golden.shape[1] != self.ids.shape[1]:
            return np.ones(len(self), bool)
        return np.asarray((np.sort(self.ids, -1) != np.sort(self.golden, -1)).any(-1))

    @property
    def flawed(self) -> NDArray[np.bool_]:
        """The tokens [T] with less than their experts, or with a figure that is no number."""
        found = ~self.first.all(-1)
        if self.weights is not None:
            found |= ~np.isfinite(self.weights).all(-1)
        if self.logits is not None:
            found |= np.isnan(self.logits).any(-1)
        return np.asarray(found)

    def token(self, row: int) -> TokenExperts:
        """One token's choice."""
        golden_row = None if self.golden is None else self.golden[row : row + 1]
        alone = replace(
            self, ids=self.ids[row : row + 1], golden=golden_row
        )  # not all rows for the sake of one
        ids, real = alone.ids[0], alone.real[0]
        weights = None if self.weights is None else self.weights[row]
        logits = None if self.logits is None else self.logits[row]
        chosen = tuple(
            ChosenExpert(
                float(one),
                None if weights is None else float(weights[slot]),
                float(logits[int(one)]) if logits is not None and real[slot] else None,
            )
            for slot, one in enumerate(ids)
        )
        margin, runner_up = _margin(logits, ids[real].astype(int))
        golden = None if self.golden is None else tuple(map(float, self.golden[row]))
        flaws = tuple(_flaws(chosen, real, self.count, logits))
        differs = bool(alone.differing[0])
        return TokenExperts(self.positions[row], chosen, margin, runner_up, flaws, golden, differs)


@dataclass(frozen=True, slots=True, eq=False)
class LayerExperts:
    """One layer at one step. The loads are of all `tokens` of the step's `sequences`, `choices` of the one at hand.
    Where there is nothing `missing` states why, and `captures` are the taps to capture. `placement` shows how the
    experts lie on the ranks, `dropped` what was not kept, `wrong` what the ranks disagree on."""

    layer: int
    step: int
    choices: RoutedTokens | None = None
    loads: tuple[ExpertLoad, ...] = ()
    tokens: int = 0
    sequences: int = 1
    placement: str = ""
    dropped: str = ""
    wrong: str = ""
    missing: str = ""
    captures: tuple[str, ...] = field(default=())


def expert_number(recorded: float) -> str:
    """The number of an expert as it was recorded, which may be none."""
    return f"{recorded:.0f}" if recorded == np.floor(recorded) and abs(recorded) < 2**53 else scalar(recorded)


def experts(source: SessionSource, where: Where, layer: int | None = None) -> LayerExperts:
    """The experts of a layer (None: the one at `where`) at `where`. SessionError where the file is damaged."""
    layer = present_layer(source, where, CHOSEN) if layer is None else layer
    tap = f"layers.{layer}.{CHOSEN}"
    where = source.passed(where, tap)
    found = LayerExperts(layer, where.step)
    if not source.session.has_tap(tap):
        return replace(found, missing=_why_none(source, layer))
    choices, reported = _choices(source, where, layer)
    if choices is None:
        wanted = tuple(f"layers.{layer}.{name}" for name in (CHOSEN, WEIGHTS, ROUTER))
        missing = f"The experts that layer {layer} chose at step {where.step} were not captured."
        return replace(found, missing=missing, captures=wanted)
    every = [choices, *_others(source, where, layer)]
    count = choices.count or max((int(one.ids[one.real].max(initial=-1)) for one in every), default=-1) + 1
    ranks, placement = _placement(source, layer, count)
    fed = source.sequence(where.step, where.branch, where.seq)
    new = len(choices) if fed is None else len(fed.ids)
    cut = new != len(choices)
    return replace(
        found,
        choices=choices,
        loads=_loads(every, count, ranks),
        tokens=sum(map(len, every)),
        sequences=len(every),
        placement=placement,
        dropped=f"{len(choices)} of {new} tokens were captured" if cut else "",
        wrong=clean(reported.note, limit=300) if reported.disagreeing_ranks else "",
    )


def _why_none(source: SessionSource, layer: int) -> str:
    """Why a layer has no tap of chosen experts."""
    names = (tap.name for tap in source.session.taps if local_name(tap.name) == CHOSEN)
    others = sorted({one for name in names if (one := layer_of(name)) is not None})
    if others:
        ends = [span(others[i], others[j]) for i, j, _ in runs([one - i for i, one in enumerate(others)])]
        named = f"Layers {', '.join(ends)} have" if len(others) > 1 else f"Layer {others[0]} has"
        return f"Layer {layer} is dense: it has no experts. {named} some."
    if source.meta.foreign is None and not source.meta.absent:
        return "The model is dense: no layer has experts."
    return (
        "No layer of this recording has the tap of chosen experts: the model is dense, or its routers were not "
        f"tapped. They are shown here where they are recorded as layers.N.{CHOSEN}, {WEIGHTS} and {ROUTER}."
    )


def _choices(source: SessionSource, where: Where, layer: int) -> tuple[RoutedTokens | None, Rebuilt]:
    """The choices of the sequence at `where`, and how the ranks' came together."""
    reported = _rebuilt(source, where, layer, CHOSEN)
    ids = _matrix(reported)
    if ids is None:
        return None, reported
    weights, logits = (_matrix(_rebuilt(source, where, layer, name)) for name in (WEIGHTS, ROUTER))
    fed = source.sequence(where.step, where.branch, where.seq)
    tap, positions = f"layers.{layer}.{CHOSEN}", () if fed is None else fed.positions
    choices = RoutedTokens(tap_axes(tap, ids.shape, reported.slice, positions)[0].numbers, ids)
    if weights is not None and weights.shape == ids.shape:
        choices = replace(choices, weights=weights)
    if logits is not None and len(logits) == len(ids):
        choices = replace(choices, logits=logits, count=logits.shape[1])
    reference = source.golden(where)
    if reference is not None:
        theirs = _matrix(_rebuilt(reference, replace(where, branch=0), layer, CHOSEN))
        if theirs is not None and len(theirs) >= len(ids):  # of a part of the rows it is the last ones
            choices = replace(choices, golden=theirs[len(theirs) - len(ids) :])
    return choices, reported


def _others(source: SessionSource, where: Where, layer: int) -> list[RoutedTokens]:
    """The choices of the other sequences that the step fed."""
    reported = source.under_way(where.branch, where.step) or source.record(where.step, where.branch)
    beside = (replace(where, seq=one.seq) for one in reported.sequences if one.seq != where.seq)
    found = (_choices(source, there, layer)[0] for there in beside)
    return [one for one in found if one is not None]


def _rebuilt(source: SessionSource, where: Where, layer: int, name: str) -> Rebuilt:
    tap = f"layers.{layer}.{name}"
    if not source.session.has_tap(tap):
        return Rebuilt(None)
    return source.session.rebuilt(tap, step=where.step, seq=where.seq, branch=where.branch)


def _matrix(rebuilt: Rebuilt) -> Numbers | None:
    """As float64, in which every number of an expert is itself; None for what has not two dimensions."""
    array = rebuilt.array
    return array.astype(np.float64) if array is not None and array.ndim == 2 and array.size else None


def _loads(every: Sequence[RoutedTokens], count: int, ranks: Sequence[range]) -> tuple[ExpertLoad, ...]:
    tokens, slots, weight = np.zeros(count, int), np.zeros(count, int), np.zeros(count)
    weighed = all(one.weights is not None for one in every)
    for one in every:
        real, first = one.real & (one.ids < count), one.first & (one.ids < count)
        slots += np.bincount(one.ids[real].astype(int), minlength=count)
        tokens += np.bincount(one.ids[first].astype(int), minlength=count)
        if one.weights is not None:
            weight += np.bincount(one.ids[real].astype(int), one.weights[real], minlength=count)
    total = max(1, int(slots.sum()))
    return tuple(
        ExpertLoad(
            expert,
            int(tokens[expert]),
            float(slots[expert] / total),
            float(weight[expert]) if weighed else None,
            ranks[expert] if expert < len(ranks) else range(0),
        )
        for expert in range(count)
    )


def _placement(source: SessionSource, layer: int, count: int) -> tuple[list[range], str]:
    """The ranks that hold each expert, and how that is in words; nothing where it was not recorded."""
    ranks, tap = source.session.ranks, f"layers.{layer}.{_ROWS}"
    if ranks == 1:
        return [range(1)] * count, ""
    try:
        layout = layouts.parse(source.session.tap(tap).layout) if source.session.has_tap(tap) else None
        if layout is None or layout.kind == "partial":
            return [], "which rank holds which expert was not recorded"
        if layout.kind == "replicate":
            return [range(ranks)] * count, f"every rank holds every expert ({ranks})"
        size = max(1, ranks // layout.groups)
        held = [placed_experts(count, ranks, rank, layout.groups) for rank in range(0, ranks, size)]
    except (ConfigError, LayoutError):
        return [], "the recorded layout of the experts does not fit the ranks"
    place = [
        range(group * size, (group + 1) * size) for group, one in enumerate(held) for _ in range(one.size)
    ]
    if layout.groups == 1:
        return place, f"every expert is cut over all {ranks} ranks"
    parts = "" if size == 1 else f", each cut over {size}"
    return place, f"experts divided among {layout.groups} groups of ranks (EP){parts}"


def _margin(logits: Numbers | None, chosen: NDArray[Any]) -> tuple[float | None, int | None]:
    """How far the last chosen expert's logit is above the best other one's, and that one; None where there is none."""
    if logits is None or not chosen.size:
        return None, None
    rest = np.setdiff1d(np.arange(len(logits)), chosen)
    if not rest.size:
        return None, None
    best = int(rest[np.argmax(logits[rest])])
    with np.errstate(invalid="ignore"):  # ∞ - ∞ is NaN, and shown as such
        return float(logits[chosen].min() - logits[best]), best


def _flaws(
    chosen: Sequence[ChosenExpert], real: NDArray[np.bool_], count: int | None, logits: Numbers | None
) -> list[str]:
    """What is wrong with a token's choice, in clauses."""
    experts_of = [int(one.number) for one, good in zip(chosen, real, strict=True) if good]
    found = [
        f"id {expert_number(one.number)} is no expert's" + ("" if count is None else f" (0–{count - 1})")
        for one, good in zip(chosen, real, strict=True)
        if not good
    ]
    times = {one: experts_of.count(one) for one in experts_of}
    found += [f"expert {one} {many} times" for one, many in times.items() if many > 1]
    if len(times) < len(chosen):
        found.append(f"{len(times)} of {len(chosen)} experts")
    found += [
        f"weight {number(one.weight)} of expert {expert_number(one.number)}"
        for one in chosen
        if one.weight is not None and not np.isfinite(one.weight)
    ]
    if logits is not None and (broken := int(np.isnan(logits).sum())):
        found.append(f"NaN in {broken} of {len(logits)} router logits")
    return found
