"""Whether a wrong operation has an effect: its output is put right, and what follows from it computed anew.

An error that is gone at whatever reads it (scores that differ where the probability is zero), or that a later
operation makes up for (a scale folded into another operand, heads in another order, a tap taken before the bias), does
nothing to the model. What reaches the residual stream does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from lockstep.engine.graph import BLOCKS
from lockstep.engine.taps.flow import inputs_of, near
from lockstep.engine.taps.names import layer_of, local_name, operation_at
from lockstep.workbench.diagnosis.findings import WrongOperation
from lockstep.workbench.diagnosis.merging import FindingGroup
from lockstep.workbench.diagnosis.operations.deviation import WRONG, distance
from lockstep.workbench.diagnosis.operations.facts import LARGEST, Facts
from lockstep.workbench.diagnosis.operations.layers import layer_output
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.replaced import expected_of, with_outputs
from lockstep.workbench.diagnosis.operations.site import Site, Unjudged
from lockstep.workbench.diagnosis.operations.sites import sites_of
from lockstep.workbench.diagnosis.recording import Array

#: Share of an error that may be left of it where it has vanished, and of what another operation has made up for.
VANISHED, MADE_UP = 0.01, 0.05
#: Error relative to an operation's output that a layer's own roundings cannot hide.
GROSS = 0.1

#: What is computed between two places of the residual stream.
_BLOCKS = (*BLOCKS, ("final_norm", "logits"))


@dataclass(frozen=True, slots=True)
class Effect:
    """What became of an error: it went through `through`; at `taps` it was gone, or made up for (`by`)."""

    through: tuple[str, ...]
    taps: tuple[str, ...]
    by: tuple[str, ...]


def harmless(groups: list[FindingGroup], taps: RecordedTaps, facts: Facts) -> dict[int, Effect]:
    """Of the groups (by their place in the list) those that do nothing to the model, and what became of them."""
    found: dict[int, Effect] = {}
    for number, group in enumerate(groups):
        effects = [_effect(one, _taps_of(group), taps, facts) for one in _samples(group)]
        if all(effects):
            gone = [effect for effect in effects if effect is not None]
            by = tuple(name for effect in gone for name in effect.by)
            found[number] = Effect(_everywhere(group, gone[0].through), gone[0].taps, by)
    _keep_what_vanishes_together(found, groups, taps, facts)

    @cache
    def right(layer: int) -> bool:
        return _gives_what_it_should(layer, taps, facts)

    for number, group in enumerate(groups):
        layers = sorted({one.layer for one in group.findings if one.layer is not None})
        gross = all(one.rel_l2 >= GROSS and one.layer is not None for one in group.findings)
        if (
            number not in found
            and gross
            and all(_would_show(one, taps, facts) for one in _samples(group))
            and all(right(layer) for layer in layers)
        ):
            ends = tuple(f"layers.{layer}.mlp_residual" for layer in layers)
            inside = (kind for block in _BLOCKS[:2] for kind in block if kind != "mlp_residual")
            through = tuple(f"layers.{layer}.{kind}" for kind in inside for layer in layers)
            found[number] = Effect(through, ends, ())
    for number, effect in list(found.items()):
        if any(_goes_on(groups[number], effect, one) for i, one in enumerate(groups) if i not in found):
            del found[number]
    made_up = {name for effect in found.values() for name in effect.by}
    for number, group in enumerate(groups):
        if number not in found and all(one.tap in made_up for one in _samples(group)):  # by its counterpart
            found[number] = Effect(tuple(one.tap for one in group.findings), (), ())
    return found


def _goes_on(group: FindingGroup, effect: Effect, other: FindingGroup) -> bool:
    """Whether what ends an error does so if it is right alone, and is wrong by the same: rows that a rank should not
    have, which each of its operations computes."""
    if effect.by or _taps_of(other).isdisjoint(effect.taps):
        return False
    return any(
        (one.name, one.edits, one.fitted) == (further.name, further.edits, further.fitted)
        for one in group.chosen
        for further in other.chosen
    )


def _taps_of(group: FindingGroup) -> frozenset[str]:
    return frozenset(one.tap for one in group.findings)


def _keep_what_vanishes_together(
    found: dict[int, Effect], groups: list[FindingGroup], taps: RecordedTaps, facts: Facts
) -> None:
    """Drops the errors that vanish by each other alone: of two zero factors neither has an effect by itself."""
    every = frozenset[str]().union(*(_taps_of(groups[number]) for number in found))
    for number in list(found) if len(found) > 1 else []:
        if not all(_effect(one, every, taps, facts) for one in _samples(groups[number])):
            del found[number]


def _would_show(finding: WrongOperation, taps: RecordedTaps, facts: Facts) -> bool:
    """Whether its error, handed on by its block as large as it is, would stand out of the roundings of a layer: in 16
    bits those are as large as what a whole block adds."""
    block = (
        "mlp.down" if finding.layer is not None and local_name(finding.tap) in _BLOCKS[1] else "attn.o_proj"
    )
    passes = tuple(i for i, one in enumerate(taps.passes) if one.step in finding.steps)
    out = taps.rows(f"layers.{finding.layer}.{block}", finding.ranks[0], passes)
    stream = taps.rows(near("<", finding.layer, facts.model.num_layers), finding.ranks[0], passes)
    if out is None or stream is None:
        return False
    return min(finding.rel_l2, 1.0) * _norm(out) > _layer_rounding(facts) * _norm(stream)


def _layer_rounding(facts: Facts) -> float:
    """The error that a layer's roundings may leave in a row of its output, relative: correct ones of tiny models stay
    below 5 units in 16 bits. Sums round more often than results."""
    return 16 * facts.unit + 160 * facts.sum_unit


def _gives_what_it_should(layer: int, taps: RecordedTaps, facts: Facts) -> bool:
    """Whether a layer as a whole turns what enters it into what it should, on every rank and in all passes: then what
    differs inside it is made up for there, row by row, as where heads or units are in another order throughout."""
    passes = tuple(range(len(taps.passes)))
    rows = tuple(row for one in taps.passes for row in one.rows)
    before, after = near("<", layer, facts.model.num_layers), f"layers.{layer}.mlp_residual"
    for rank in {(taps.lead(before, rank), taps.lead(after, rank)): rank for rank in taps.ranks}.values():
        entered, left = (taps.rows(tap, rank, passes) for tap in (before, after))
        with np.errstate(all="ignore"):
            expected = None if entered is None else layer_output(facts, layer, entered, rows)
        if left is None or expected is None or left.shape != expected.shape:
            return False
        error = distance(left, expected, LARGEST[facts.dtype])
        with np.errstate(all="ignore"):
            of_rows = np.linalg.norm(error, axis=-1) <= _layer_rounding(facts) * np.linalg.norm(
                expected, axis=-1
            )
        if not of_rows.all():
            return False
    return True


def _everywhere(group: FindingGroup, through: Sequence[str]) -> tuple[str, ...]:
    """The taps that the error goes through, in every layer that has it."""
    kinds = [local_name(tap) for tap in through]
    layers = {one.layer for one in group.findings}
    return tuple(kind if layer is None else f"layers.{layer}.{kind}" for layer in layers for kind in kinds)


def _samples(group: FindingGroup) -> list[WrongOperation]:
    """The first of the findings, and the last: what holds of both holds of those between."""
    return (
        [group.first]
        if len(group.findings) == 1
        else [group.first, max(group.findings, key=lambda f: f.order)]
    )


def _effect(
    finding: WrongOperation, together: frozenset[str], taps: RecordedTaps, facts: Facts
) -> Effect | None:
    """Where its error ends, with those of its block at the taps `together`; None where it reaches the end of the block,
    or cannot be followed."""
    block = list(_block(finding.tap, taps))
    first = next((tap for tap in block if tap in together), finding.tap)
    follow = block[block.index(first) + 1 :] if first in block else []
    if not follow or finding.shape:
        return None
    put_right = _put_right(first, taps, facts)
    if put_right is None:
        return None
    right, reached, gone, by = put_right, [first], [], []
    for tap in follow:
        if tap in together:
            put_right = _put_right(tap, right, facts)
            if put_right is None:
                return None
            right = put_right
            reached.append(tap)
            continue
        step = _follow(tap, taps, right, facts, finding.rel_l2)
        if step is None:
            return None
        state, right = step
        if state == "reached":
            reached.append(tap)
        elif state != "untouched":
            gone.append(tap)
            by += [tap] if state == "made up" else []
    ended = all(_is_read(tap, (*reached, *gone), taps) for tap in reached)
    return Effect(tuple(reached), tuple(gone), tuple(by)) if ended else None


def _is_read(tap: str, others: Sequence[str], taps: RecordedTaps) -> bool:
    """Whether one of the others is computed from the tap. The end of a block is read by the next one alone."""
    return any(
        tap in _read_by(other, taps) for other in others if layer_of(other) is not None or other == "logits"
    )


def _read_by(tap: str, taps: RecordedTaps) -> Iterator[str]:
    """What it is computed from; of what a fused attention has inside, and does not show, what that is computed from."""
    for read in inputs_of(tap):
        operation = operation_at(read)
        inside = operation is not None and (operation.form == "cells" or operation.kind == "cache")
        yield from _read_by(read, taps) if inside and not taps.has(read) else (read,)


def _block(tap: str, taps: RecordedTaps) -> Iterator[str]:
    """The taps of its block, as far as they were recorded."""
    kind, layer = local_name(tap), layer_of(tap)
    for name in next((block for block in _BLOCKS if kind in block), ()):
        full = name if layer is None else f"layers.{layer}.{name}"
        if taps.has(full):
            yield full


def _put_right(tap: str, taps: RecordedTaps, facts: Facts) -> RecordedTaps | None:
    """The recording with what the tap should have held."""
    return _replaced(tap, taps, list(sites_of(tap, taps, facts)))


def _replaced(tap: str, taps: RecordedTaps, found: list[Site | Unjudged]) -> RecordedTaps | None:
    judged = [site for site in found if isinstance(site, Site)]
    if len(judged) < len(found):
        return None
    return with_outputs(tap, taps, [(site, expected_of(site)) for site in judged])


def _follow(
    tap: str, taps: RecordedTaps, right: RecordedTaps, facts: Facts, rel_l2: float
) -> tuple[str, RecordedTaps] | None:
    """What the correction does to one operation: "untouched", "vanished" (it gives the same), "made up" (what was seen
    is what right inputs would have given), "reached"; and the recording with its corrected output."""
    before, after = list(sites_of(tap, taps, facts)), list(sites_of(tap, right, facts))
    if any(isinstance(one, Unjudged) for one in (*before, *after)):
        return None
    by_rank = {rank: one for one in before if isinstance(one, Site) for rank in one.ranks}
    moved = left = scale = noise = 0.0
    for site in after:
        assert isinstance(site, Site)
        old = by_rank[site.rank]
        if len(old.parts) != len(site.parts):
            return None
        for a, b in zip(old.parts, site.parts, strict=True):
            if a.expected.shape != b.expected.shape or not b.fits:
                return None
            moved = math.hypot(moved, _norm(distance(a.expected, b.expected, a.largest)))
            left = math.hypot(left, _norm(distance(b.seen, b.expected, b.largest)))
            noise = math.hypot(noise, _norm(np.where(np.isfinite(b.noise), b.noise, 0.0)))
            scale = math.hypot(scale, _norm(np.where(np.isfinite(b.expected), b.expected, 0.0)))
    if moved == 0:
        return "untouched", right
    small = moved <= WRONG * noise and moved <= VANISHED * rel_l2 * scale
    if small and not any(_moves(by_rank[site.rank], site) for site in after if isinstance(site, Site)):
        return "vanished", right
    if math.isfinite(moved) and math.isfinite(left) and left <= MADE_UP * moved:
        return "made up", right
    corrected = _replaced(tap, right, after)
    return None if corrected is None else ("reached", corrected)


def _moves(old: Site, new: Site) -> bool:
    """Whether any row, head or element of what an operation should give is another one by more than rounding: what a
    verdict would show has not vanished, however small it is among all the others."""
    pairs = zip(old.parts, new.parts, strict=True)
    return replace(new, parts=tuple(replace(b, seen=a.expected) for a, b in pairs)).deviation is not None


def _norm(x: Array) -> float:
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(x)) if np.isfinite(x).all() else math.inf
