"""What a formula of layers with a state may read instead: numbers of other heads, what another slot has kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from lockstep.engine.graph import LAYER, operations_of
from lockstep.engine.graph.operation import state_of
from lockstep.engine.taps.flow import sources_in_layer
from lockstep.workbench.diagnosis.hypotheses.head_orders import by_columns, head_width, orders
from lockstep.workbench.diagnosis.hypotheses.operands import of_other_layers
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.recorded import SequencePass
from lockstep.workbench.diagnosis.operations.shares import rank_spans, weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Numbers of each head, which checkpoints of 16 bits have in float32.
TRAINED = ("A_log", "dt_bias", "D")
#: Where a gated norm may take its squares together.
ALL_GROUPS, SINGLE_HEADS = "width of all groups", "width of a head"
OTHER_WIDTH = "{} channels"
#: What a sequence may meet: its own rows in another order; of the batch's next or last slot what that has, and writes
#: back to there, or to its own; where the sequences before it in the batch have written in this step already, or not.
#: At the end of the batch that is the slot at its other end, or one that is nobody's.
NEWEST_FIRST = "its rows, newest first"
SLOTS: Mapping[str, int] = {"next slot": 1, "slot before": -1}
WRITTEN_TO: Mapping[str, bool] = {"read and written": True, "read alone": False}
WITHIN_STEP = ", as this step leaves it"
#: Of a convolution's rows those that a prompt may leave in place of its last ones: its first, or older ones.
KEPT: Mapping[str, Callable[[Array, int], Array]] = {
    "the first rows of the prompt": lambda rows, count: rows[count : 2 * count],
    "the rows before the prompt and its first": lambda rows, count: rows[1 : count + 1],
    **{
        f"the rows of the prompt up to {by} before its last": partial(
            lambda rows, count, by: rows[len(rows) - count - by : len(rows) - by], by=by
        )
        for by in range(1, 9)
    },
}
#: What it met is what the step before the last has left.
LATE = "what the step before the last has left"
#: Begins the name of what sequences meet that were handed the slot of one that is live too.
SLOT_OF = "slot of sequence"
#: The sequence of a slot that is nobody's.
_NOBODY = -1
#: Sequences of a step at most of whose slots that is tried.
_MOST_SHARED = 16


def captured(site: Site, tap: str) -> Iterator[tuple[SequencePass, Array]]:
    """What the rank recorded at a tap of the layer, by pass."""
    tensors = site.taps.tensors(site.near(tap), site.rank)
    yield from ((one, x) for one, x in zip(site.taps.passes, tensors, strict=True) if x is not None)


def other_heads(site: Site, part: Part, given: Mapping[str, object]) -> dict[str, dict[str, Array]]:
    """Leaf -> by name what it may be instead: a trained vector, kernels or the gate, of other heads."""
    found = {leaf: _other_vectors(site, leaf) for leaf in TRAINED if leaf in site.weights}
    if site.operation == "conv" and "weight" in site.weights:
        found["weight"] = _other_kernels(site)
    if "gate" in part.inputs and site.operation in ("gate", "gated_norm"):
        found["gate"] = _other_gates(site, part)
    own = {leaf: np.asarray(given[leaf]) for leaf in found if leaf in given}
    return {leaf: dict(_distinct(others, own[leaf])) for leaf, others in found.items() if leaf in own}


def _distinct(others: Mapping[str, Array], own: Array) -> Iterator[tuple[str, Array]]:
    """Those of the same shape that differ from it, and from those before them."""
    known = [own]
    for name, x in others.items():
        if x.shape == own.shape and not any(np.array_equal(x, one) for one in known):
            known.append(x)
            yield name, x


def _in_other_orders(site: Site, what: str, whole: Array, width: int) -> dict[str, Array]:
    """The rank's rows of a weight, its heads in other orders, or those of all ranks."""
    span, found = slice(0, len(whole)) if site.span is None else site.span, dict[str, Array]()
    for rows, where in ((whole[span], ""), (whole, ", over all ranks")):
        if len(rows) % width:
            continue
        for words, order in orders(len(rows) // width):
            moved = rows[by_columns(order, width)]
            found[f"{what} {words}{where}"] = moved[span] if where else moved
    return found


def _other_kernels(site: Site) -> dict[str, Array]:
    """Kernels of a short convolution of other heads, or of what is convolved beside it."""
    whole = site.facts.weight(site.weights["weight"])
    if whole is None:
        return {}
    found = _in_other_orders(site, "weight", whole, head_width(site))
    for operation in operations_of(site.facts.model):
        tap = site.near(operation.tap)
        if operation.kind != "conv" or tap == site.tap:
            continue
        other = site.facts.weight(weight_names(tap, "conv", site.facts).get("weight", ""))
        span = rank_spans(tap, "conv", site.rank, site.taps, site.facts)[0]
        if other is not None:
            found[f"the kernels of {operation.tap.removeprefix('attn.')}"] = (
                other if span is None else other[span]
            )
    return found


def _other_vectors(site: Site, leaf: str) -> dict[str, Array]:
    """A trained vector of other heads of the rank, of all of them, of another rank's or another layer's."""
    name = site.weights[leaf]
    whole, found = site.facts.weight(name), dict[str, Array]()
    if whole is None:
        return {}
    span = slice(0, len(whole)) if site.span is None else site.span
    for rank in site.taps.ranks:
        other = rank_spans(site.tap, site.operation, rank, site.taps, site.facts)[0]
        if rank != site.rank and other is not None:
            found[f"{leaf} of rank {rank}'s heads"] = whole[other]
    found |= _in_other_orders(site, leaf, whole, 1)
    others = of_other_layers(site, name, whole.shape)
    return found | {f"{leaf} of layer {layer}": vector[span] for layer, vector in others}


def _other_gates(site: Site, part: Part) -> dict[str, Array]:
    """A gate of other heads of the rank, or another rank's."""
    own, found = part.inputs["gate"], dict[str, Array]()
    declared = site.declared
    width = 0 if declared is None else head_width(site, declared.inputs["gate"])
    if width and own.shape[-1] % width == 0:
        for words, order in orders(own.shape[-1] // width):
            found[f"the gate {words}"] = own[:, by_columns(order, width)]
    for rank in site.taps.ranks:
        other = None if declared is None else site.rows_of(site.near(declared.inputs["gate"]), rank)
        if rank != site.rank and other is not None:
            found[f"the gate of rank {rank}'s heads"] = other
    return found


def other_rows(site: Site) -> dict[str, dict[str, list[Array]]]:
    """By role of an input what else the layer has of the same width, which does not follow from the operation: by tap
    its rows in each part."""
    assert site.declared is not None, "what layers with a state read is known"
    found: dict[str, dict[str, list[Array]]] = {}
    for kind, one in LAYER.items():
        tap = site.near(kind)
        if one.form != "rows" or site.tap in sources_in_layer(tap, site.facts.model.num_layers):
            continue
        tensors = site.taps.tensors(tap, site.rank)
        rows = [x for i in site.passes if (x := tensors[i]) is not None]
        for role, read in site.declared.inputs.items():
            own = [part.inputs[role] for part in site.parts if role in part.inputs]
            if kind != read and [x.shape for x in rows] == [x.shape for x in own]:
                found.setdefault(role, {})[tap] = rows
    return found


def other_widths(site: Site, part: Part) -> dict[str, float]:
    """Channels whose squares the gated norm of Mamba-2 may take together: of all groups that the rank has whole, or of
    each head."""
    mamba = site.facts.model.mamba
    if mamba is None or site.operation != "gated_norm":
        return {}
    channels = part.inputs["x"].shape[-1]
    widths = {
        OTHER_WIDTH.format(width): float(width)
        for parts in range(2, 2 * mamba.groups * len(site.taps.ranks) + 1)
        if channels % parts == 0 and (width := channels // parts) != mamba.head_dim
    }
    widths[SINGLE_HEADS] = float(mamba.head_dim)
    if part.inputs["whole"].shape[-1] == channels:
        widths[ALL_GROUPS] = float(channels)
    return {name: width for name, width in widths.items() if width != mamba.norm_width}


class OtherSlot(NamedTuple):
    """Another's slot that is read: `which` is its distance in the batch or the sequence that has it; whether it is
    `written` to as well, whether what this step has written there is read `at_once`, and whether the batch `wraps`."""

    name: str
    which: int
    written: bool
    at_once: bool = False
    wraps: bool = True


def slot_names() -> Iterator[OtherSlot]:
    """By their distance."""
    for slot, by in SLOTS.items():
        for how, written in WRITTEN_TO.items():
            yield OtherSlot(f"{slot}, {how}", by, written)
            yield OtherSlot(f"{slot} or nobody's, {how}", by, written, wraps=False)
        yield OtherSlot(f"{slot}, read alone{WITHIN_STEP}", by, False, at_once=True)


def shared_names(site: Site) -> Iterator[OtherSlot]:
    """Of one sequence, which the wrong ones are handed."""
    wrong = [part.rows[-1] for part in _wrong_parts(site)]
    steps, mine = {one.step for one in wrong}, {one.seq for one in wrong}
    others = sorted({one.seq for one in site.taps.passes if one.step in steps and mine - {one.seq}})
    for seq in others[:_MOST_SHARED]:
        for how, written in WRITTEN_TO.items():
            yield OtherSlot(f"{SLOT_OF} {seq}, {how}", seq, written)
        if seq < max(mine):  # before which it was written in the step
            yield OtherSlot(f"{SLOT_OF} {seq}, read alone{WITHIN_STEP}", seq, False, at_once=True)


def _wrong_parts(site: Site) -> list[Part]:
    assert site.deviation is not None, "what is right needs no hypothesis"
    return [part for part, scope in zip(site.parts, site.deviation.scopes, strict=True) if scope.any()]


def other_slots(site: Site) -> Mapping[tuple[int, int], dict[str, Array]]:
    """(step, sequence) -> by name what a pass meets where, from the first wrong step on, sequences read others'
    slots, all of them or the wrong ones alone; of a convolution also where its rows are kept newest first."""
    wrong = _wrong_parts(site)
    first = min(part.rows[0].step for part in wrong)
    met: dict[tuple[int, int], dict[str, Array]] = {}
    sequences = sorted({one.seq for one in site.taps.passes})
    for one in slot_names():
        same = one.which < 0 and one.wraps and len(sequences) == 2  # as the next
        if len(sequences) < 2 or same:
            continue
        read = np.roll(sequences, -one.which).tolist()
        if not one.wraps:
            read[0 if one.which < 0 else -1] = _NOBODY
        slots = dict(zip(sequences, read, strict=True))
        _meet(site, met, one.name, _Slots(slots, first, one.written, one.at_once))
    for one in shared_names(site):
        handed = dict.fromkeys((part.rows[-1].seq for part in wrong), one.which)
        _meet(site, met, one.name, _Slots(handed, first, one.written, one.at_once))
    if site.operation == "conv":
        _meet(
            site, met, NEWEST_FIRST, _Slots({}, first, False, False), lambda rows, count: rows[-count:][::-1]
        )
        for name, kept in KEPT.items():
            _meet(site, met, name, _Slots({}, 0, False, False), partial(_of_prompt, kept))
    _meet_late(site, met)
    return met


def _meet_late(site: Site, met: dict[tuple[int, int], dict[str, Array]]) -> None:
    """What each pass meets that goes on from the step before the last, where there are two before it."""
    left: dict[int, list[Array]] = {}
    for one, x in _written(site):
        mine = left.setdefault(one.seq, [np.zeros_like(site.parts[0].inputs["before"])])
        before = mine[-2] if len(mine) > 2 else mine[-1]
        met.setdefault((one.step, one.seq), {})[LATE] = before
        mine.append(_behind(site, before, x))


@dataclass(frozen=True, slots=True)
class _Slots:
    """Whose slot each sequence reads from a step on, whether it writes there too, and whether at once."""

    read: Mapping[int, int]
    first: int
    written: bool
    at_once: bool

    def of(self, one: SequencePass) -> int:
        return self.read.get(one.seq, one.seq) if one.step >= self.first else one.seq


def _meet(
    site: Site, met: dict[tuple[int, int], dict[str, Array]], name: str, slots: _Slots,
    kept: Callable[[Array, int], Array] | None = None,
) -> None:  # fmt: skip
    """What each pass finds in its slot, and leaves: the last rows of a convolution, or others of those that it has met
    (`kept`), or a state."""
    nothing = np.zeros_like(site.parts[0].inputs["before"])
    held: dict[int, Array] = {}
    left: dict[int, Array] = {}
    step = -1
    for one, x in _written(site):
        if one.step != step or slots.at_once:  # else the step reads what the one before it has left
            held |= left
            step, left = one.step, {}
        before = held.get(slots.of(one), nothing)
        met.setdefault((one.step, one.seq), {})[name] = before
        behind = _behind(site, before, x) if kept is None else kept(np.concatenate([before, x]), len(before))
        left[slots.of(one) if slots.written else one.seq] = behind


def _of_prompt(kept: Callable[[Array, int], Array], rows: Array, count: int) -> Array:
    """Of what a prompt has met those rows, as far as it has so many; of a token's pass the last."""
    found = kept(rows, count) if len(rows) > count + 1 else rows[-count:]
    return found if len(found) == count else rows[-count:]


def _written(site: Site) -> Iterator[tuple[SequencePass, Array]]:
    """By pass the rows that a convolution has read, or the state that was written."""
    assert site.declared is not None, "what layers with a state read is known"
    convolved = site.operation == "conv"
    yield from captured(site, site.declared.inputs["x"] if convolved else state_of(site.operation))


def _behind(site: Site, before: Array, x: Array) -> Array:
    """What is kept behind a pass that began with `before`: a convolution's last rows, or the state."""
    return np.concatenate([before, x])[-len(before) :] if site.operation == "conv" else np.asarray(x[0])
