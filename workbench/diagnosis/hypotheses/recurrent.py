"""Hypotheses about linear attention, Mamba-2 and gates: edits of their formulas, on every pass of a sequence.

A formula may have met another `before` than it should: nothing, what another sequence has left, a convolution's rows
moved by one, what was kept in 16 bits. Or what a sequence has is lost within a pass, where chunks of a prompt meet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lockstep.engine.graph.formula import Node, numbers_of, silu
from lockstep.engine.graph.operation import READ_FROM, STATES, state_of
from lockstep.engine.graph.recurrence import mean_of_groups
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, leaves, nodes, together
from lockstep.workbench.diagnosis.hypotheses.fits import GivenBefore, factor_of, narrower, resolution
from lockstep.workbench.diagnosis.hypotheses.functions import edited_value
from lockstep.workbench.diagnosis.hypotheses.generate import Choices, edits_of
from lockstep.workbench.diagnosis.hypotheses.operands import formula_at
from lockstep.workbench.diagnosis.hypotheses.pass_trial import PassTrial, passed
from lockstep.workbench.diagnosis.hypotheses.recurrent_coarse import (
    KEPT_IN,
    coarse_edits,
    in_16_bits,
    shares_of,
)
from lockstep.workbench.diagnosis.hypotheses.recurrent_kept import kept_otherwise
from lockstep.workbench.diagnosis.hypotheses.recurrent_operands import (
    KEPT,
    LATE,
    NEWEST_FIRST,
    TRAINED,
    captured,
    other_heads,
    other_rows,
    other_slots,
    other_widths,
    shared_names,
    slot_names,
)
from lockstep.workbench.diagnosis.hypotheses.recurrent_orders import ORDERS, OTHER_ORDERS
from lockstep.workbench.diagnosis.hypotheses.recurrent_rules import BY_RULES, RULES
from lockstep.workbench.diagnosis.hypotheses.recurrent_words import NORM_FIRST
from lockstep.workbench.diagnosis.hypotheses.search import single
from lockstep.workbench.diagnosis.hypotheses.variant import PARTLY, Variant
from lockstep.workbench.diagnosis.hypotheses.words import wording
from lockstep.workbench.diagnosis.operations.deviation import WRONG_SINGLE, Part
from lockstep.workbench.diagnosis.operations.recurrent import GATES, RECURRENT
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Operations whose hypotheses are made here.
STATEFUL = (*GATES, *RECURRENT)
#: What a sequence may begin with instead of what it has, by name.
_NOTHING, _OTHERS, _LEFT = "nothing", "state of sequence {}", "what sequence {} has left"
_LEFT_BEFORE = "what the sequence before it has left"
#: Tokens of a chunk, as kernels cut a prompt.
_CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256)
#: The last tokens of a pass from which on a state is tried to have begun.
_MOST_STARTS = 256
#: Rows in front of the first wrong token that are tried to be lost.
_MOST_LOST = 64
#: Tokens by which a convolution's rows may be moved.
_MOVED = (1, 2, 3, -1, -2, -3)
#: What becomes of the rows that a convolution has kept.
_ROWS = ("oldest_row_lost", "newest_row_lost")
#: Leaves that are numbers, and other values that engines have.
_NUMBERS: Mapping[str, tuple[float, ...]] = {
    "l2_eps": (0.0, 1e-5, 1e-12), "eps": (1e-5, 1e-6), "key_scale": (1.0,), "key_dim": (), "value_dim": (),
    "ssm_dim": (), "state_dim": (), "norm_width": (), "least_step": (0.0,), "largest_step": (math.inf, 0.1),
}  # fmt: skip


def recurrent_edits(site: Site) -> Iterator[Variant]:
    """Every single edit that explains something of what was seen."""
    formula = formula_at(site)
    smallest = min(_wrong(site), key=lambda i: len(site.parts[i].rows), default=None)
    if smallest is None or any(not part.fits for part in site.parts):
        return
    left = _left(site) if site.operation in RECURRENT else {}
    given = [_given(site, part, left) for part in site.parts]
    # The same vectors in all parts; gates have one part alone.
    others = other_heads(site, site.parts[0], given[0])
    read = {name: x for named in others.values() for name, x in named.items()}
    given = [one | read for one in given]
    rows: dict[str, dict[str, list[Array]]] = {}
    if site.operation in RECURRENT:
        rows, met = other_rows(site), other_slots(site)
        for i, known_there in enumerate(given):
            known_there.update({name: x[i] for named in rows.values() for name, x in named.items()})
        given = [
            known | met.get((part.rows[-1].step, part.rows[-1].seq), {})
            for known, part in zip(given, site.parts, strict=True)
        ]
    given_before = GivenBefore()
    for edits in dict.fromkeys(_candidates(site, formula, given, others, rows)):
        try:
            tree = together(edits, formula)
            first = _value(tree, given[smallest], site.parts[smallest])
            if first is None or not _explains(site, smallest, first):
                continue
            wrong = set(_wrong(site))
            found = [
                part.expected if i not in wrong else _value(tree, given[i], part)
                for i, part in enumerate(site.parts)
            ]
        except (IndexError, ValueError, KeyError):  # it has no such place, or no such form
            continue
        predicted = [one for one in found if one is not None]
        if len(predicted) == len(found):
            again = given_before(predicted)
            if not again or edits[0].kind == "operand":  # of other tensors each is an answer of its own
                yield _variant(site, edits, predicted)
    yield from _scaled(site)
    if site.operation in RECURRENT:
        yield from _lost_within(site, formula, given)
    if site.operation in READ_FROM:
        for edit, states in kept_otherwise(site, formula, given, _CHUNKS):
            yield _variant(site, (edit,), states)
    if site.operation == "conv":
        yield from _rows_not_kept(site, formula, given)


def pass_edits(site: Site) -> Iterator[Variant]:
    """What may be done to any value of the formula as well, numbers that are solved for among it."""
    if any(not part.fits for part in site.parts) or not _wrong(site):
        return
    formula = formula_at(site)
    choices = replace(
        _choices(site, formula), usual=True, orders=True, dtypes=tuple(narrower(site.facts.dtype))
    )
    trial = PassTrial(site, formula, [_given(site, part, {}) for part in site.parts])
    yield from passed(trial, single(trial, edits_of(formula, choices)))


def _variant(site: Site, edits: tuple[Edit, ...], predicted: Sequence[Array]) -> Variant:
    words = wording(site, edits)
    return Variant(words.name, words.kind, words.text, words.fitted, predicted, edits=edits)


def _scaled(site: Site) -> Iterator[Variant]:
    """The result times a number that is fitted."""
    assert site.deviation is not None, "what is right needs no hypothesis"
    parts = list(zip(site.parts, site.deviation.scopes, strict=True))
    by = factor_of(
        np.concatenate([part.expected[scope] for part, scope in parts]),
        np.concatenate([part.seen[scope] for part, scope in parts]),
    )
    if not math.isfinite(by):
        return
    nearest = round(2 * by) / 2
    by = nearest if abs(by - nearest) <= resolution(site) * max(1.0, abs(by)) else by
    edits = (Edit((), "applied", ("scaled", by)),)
    words = wording(site, edits)
    scaled = [by * part.expected for part in site.parts]
    yield Variant(words.name, words.kind, words.text, words.fitted, scaled, 1, edits=edits)


def _lost_within(site: Site, formula: Node, given: Sequence[Mapping[str, Any]]) -> Iterator[Variant]:
    """Tokens of a pass that go on as if nothing had come before them, and so do those after them."""
    found, at = [part.expected for part in site.parts], set[int]()
    for i in _wrong(site):
        value = partial(_restarted, formula, given[i], site.parts[i])
        if site.operation in READ_FROM:
            best = _last_start(value, site.parts[i])
        else:
            begun = (
                _starts(partial(value, before), site.parts[i]) for before in _befores(site, site.parts[i])
            )
            best = next((one for one in begun if one is not None), None)
        if best is None:
            return
        found[i], starts = best
        at |= set(starts)
    if at:
        yield _variant(site, (Edit((), "map", ("restarted",), tuple(map(float, sorted(at)))),), found)


def _rows_not_kept(site: Site, formula: Node, given: Sequence[Mapping[str, Any]]) -> Iterator[Variant]:
    """The rows of some tokens are not kept for those behind them, which meet older ones: of a chunk that ends where
    tokens begin to be wrong."""
    wrong = _wrong(site)
    ends: dict[int, int] = {}  # by sequence
    for i in wrong:
        rows, scope = site.parts[i].rows, site.deviation.scopes[i]  # type: ignore[union-attr]
        first = rows[int(np.argmax(scope.any(tuple(range(1, scope.ndim)))))]
        ends[first.seq] = min(first.position, ends.get(first.seq, first.position))
    history = _history(site)
    for count in range(1, _MOST_LOST + 1):
        if any(end < count for end in ends.values()):
            return
        found = [part.expected for part in site.parts]
        for i in wrong:
            part, end = site.parts[i], ends[site.parts[i].rows[-1].seq]
            found[i] = _without_rows(formula, given[i], part, history[part.rows[-1].seq], (end - count, end))
            if i == wrong[0] and not _explains(site, i, found[i]):
                break
        else:
            at = tuple(float(one) for _, one in sorted(ends.items()))
            yield _variant(site, (Edit((), "map", ("rows_not_kept", float(count)), at),), found)


def _history(site: Site) -> dict[int, Array]:
    """By sequence the rows that a convolution has read, from its first token on."""
    found: dict[int, list[Array]] = {}
    for i in range(len(site.parts)):
        found.setdefault(site.parts[i].rows[-1].seq, []).append(site.parts[i].inputs["x"])
    return {seq: np.concatenate(rows) for seq, rows in found.items()}


def _without_rows(
    formula: Node, given: Mapping[str, Any], part: Part, history: Array, lost: tuple[int, int]
) -> Array:
    """The formula on a pass whose tokens from the end of `lost` on do not have the rows of the positions in it."""
    width, pieces = len(part.inputs["before"]), []
    first, end = part.rows[0].position, part.rows[0].position + len(part.rows)
    for start, stop in ((first, min(lost[1], end)), (max(first, lost[1]), end)):
        if stop <= start:
            continue
        kept = (
            history[:start]
            if start < lost[1]
            else np.concatenate([history[: lost[0]], history[lost[1] : start]])
        )
        before = np.concatenate([np.zeros((width, history.shape[1])), kept])[-width:]
        rows = part.inputs["x"][start - first : stop - first]
        pieces.append(np.asarray(edited_value(formula, {**given, "x": rows, "before": before})))
    return np.concatenate(pieces).reshape(part.seen.shape)


def _befores(site: Site, part: Part) -> Iterator[Array]:
    """What comes before a pass; of a convolution also without its oldest rows, as behind a short pass."""
    before = part.inputs["before"]
    yield before
    for lost in range(1, 1 + len(before)) if site.operation == "conv" else ():
        yield np.concatenate([np.zeros_like(before[:lost]), before[lost:]])


def _starts(value: Callable[[Sequence[int]], Array], part: Part) -> tuple[Array, list[int]] | None:
    """What comes out, and the tokens that nothing comes before, each the first that is wrong yet; None where that does
    not help."""
    starts: list[int] = []
    while True:
        predicted = value(starts)
        off = (np.abs(part.seen - predicted) > WRONG_SINGLE * part.noise).reshape(len(part.seen), -1).any(-1)
        if not off.any():
            return predicted, starts
        first = int(np.argmax(off))
        if first <= max(starts, default=0):
            return None
        starts.append(first)


def _last_start(value: Callable[[Array, Sequence[int]], Array], part: Part) -> tuple[Array, list[int]] | None:
    """Of a state, the last token that nothing comes before: the last one whose state is what was seen, else that with
    the nearest."""
    count, nearest = len(rates_of(part)), np.inf
    best: tuple[Array, list[int]] | None = None
    for start in range(count - 1, max(1, count - _MOST_STARTS) - 1, -1):
        found = value(part.inputs["before"], [start])
        off = np.abs(part.seen - found)
        if (off <= WRONG_SINGLE * part.noise).all():
            return found, [start]
        if (distance := float(np.linalg.norm(off))) < nearest:
            nearest, best = distance, (found, [start])
    return best


def _restarted(
    formula: Node, given: Mapping[str, Any], part: Part, before: Array, starts: Sequence[int]
) -> Array:
    """The formula on the tokens up to the first of `starts`, and from each of them on, from nothing, up to the next."""
    tokens = [role for role in part.inputs if role not in ("before", "frozen")]
    pieces = []
    for start, end in itertools.pairwise([0, *starts, len(part.inputs[tokens[0]])]):
        leaves = {role: part.inputs[role][start:end] for role in tokens}
        first = given[_NOTHING] if start else before
        pieces.append(np.asarray(edited_value(formula, {**given, **leaves, "before": first})))
    whole = pieces[-1] if pieces[-1].ndim == 3 else np.concatenate(pieces)
    return np.asarray(whole.reshape(part.seen.shape))


def _wrong(site: Site) -> list[int]:
    """The parts that something is wrong in."""
    return [] if site.deviation is None else [i for i, s in enumerate(site.deviation.scopes) if s.any()]


def _explains(site: Site, index: int, predicted: Array) -> bool:
    """Whether it leaves less of a part's error than it would have to, were it no explanation."""
    assert site.deviation is not None, "what is right needs no hypothesis"
    part, scope = site.parts[index], site.deviation.scopes[index]
    with np.errstate(all="ignore"):
        error, left = (np.linalg.norm((part.seen - one)[scope]) for one in (part.expected, predicted))
    return bool(left <= PARTLY * error)


def _choices(site: Site, formula: Node) -> Choices:
    leaves = {one.name for _, one in nodes(formula) if not one.args}
    return Choices(
        numbers={name: values for name, values in _NUMBERS.items() if name in leaves},
        vectors=("weight", "A_log", "dt_bias", "D", "bias"),
        applied={
            "result": [(dtype,) for dtype in narrower(site.facts.dtype)],
            "weight": [("backwards",), ("plus_one",)],
            **{leaf: [("exp",), ("minus_exp",)] for leaf in TRAINED},
            **({"gate": [("silu",), ("sigmoid",)]} if site.operation == "times" else {}),
        },
        orders=False,
        usual=False,
    )  # fmt: skip


def _key_heads(
    site: Site, formula: Node, pairs: Sequence[tuple[int, ...]], given: Sequence[Mapping[str, Any]]
) -> tuple[float, ...] | None:
    """By value head the key head, or -1 for zeros, that leaves least of the smallest wrong part; None where that is
    each head's own."""
    index = min(_wrong(site), key=lambda i: len(site.parts[i].rows))
    part, heads = site.parts[index], rates_of(site.parts[index]).shape[1]
    role, dim = ("k", "key_dim") if "k" in part.inputs else ("b", "state_dim")
    keys = part.inputs[role].shape[1] // int(given[index][dim])
    own = [float(head * keys // heads) for head in range(heads)]
    left = []
    for one in range(-1, keys):
        edits = [Edit(path, "function", ("paired_as", *[float(one)] * heads)) for path in pairs]
        found = _value(together(edits, formula), given[index], part)
        if found is None:
            return None
        left.append(_of_heads(site, part.seen - found, heads))
    allowed = np.array(left)
    best = [float(one) - 1 for one in allowed.argmin(0)]
    return None if best == own else tuple(best)


def _of_heads(site: Site, x: Array, heads: int) -> Array:
    """The norm of each head of what a state is, or of what is read from it."""
    parted = (
        x.reshape(heads, -1) if site.operation in READ_FROM else x.reshape(len(x), heads, -1).swapaxes(0, 1)
    )
    return np.asarray(np.linalg.norm(parted.reshape(heads, -1), axis=-1))


def _candidates(
    site: Site,
    formula: Node,
    given: Sequence[Mapping[str, Any]],
    others: Mapping[str, Mapping[str, Array]],
    rows: Mapping[str, Mapping[str, list[Array]]],
) -> Iterator[tuple[Edit, ...]]:
    """Other pairs of queries and keys with values, other beginnings, and every single edit without a number to solve
    for."""
    pairs = [path for path, node in nodes(formula) if node.name == "paired"]
    if pairs:
        yield tuple(Edit(path, "function", ("paired_in_turn",)) for path in pairs)
        if (heads := _key_heads(site, formula, pairs, given)) is not None:
            yield tuple(Edit(path, "function", ("paired_as", *heads)) for path in pairs)
    if site.operation in RECURRENT:
        yield from ((one,) for one in _other_befores(site))
        yield from ((one,) for one in _other_orders(formula))
    if site.operation in STATES:
        yield from coarse_edits(formula)
        raw = (path for path, node in nodes(formula) if node.name == "exp" and node.args == (Node("A_log"),))
        yield from ((Edit(path, "left_out", (0.0,)),) for path in raw)
        for path in shares_of(formula):
            yield from ((Edit(path, "applied", ("kept_at_chunks", float(size))),) for size in _CHUNKS)
    trained = [leaf for leaf in TRAINED if leaf in leaves(formula)]
    for dtype in KEPT_IN if trained else ():  # cast with all others of the model
        yield tuple(Edit(leaf, "applied", (dtype,)) for leaf in trained)
        yield from ((Edit(leaf, "applied", (dtype,)),) for leaf in trained)
    if site.operation == "gated_norm" and "whole_gate" in given[0]:
        yield (Edit((), "operands", ("whole", "x", "whole_gate", "gate")),)
        yield (Edit((), "operand", (NORM_FIRST,)),)
        yield from ((Edit("norm_width", "operand", (name,)),) for name in other_widths(site, site.parts[0]))
    elif site.operation == "gated_norm":
        yield (Edit((), "before", ("x",)),)
    for leaf, named in others.items():
        yield from ((Edit(leaf, "operand", (name,)),) for name in named)
    if len(trained) > 1:  # all in the same order
        alike = [[name.removeprefix(leaf) for name in others.get(leaf, ())] for leaf in trained]
        for words in (one for one in alike[0] if all(one in names for names in alike[1:])):
            yield tuple(Edit(leaf, "operand", (f"{leaf}{words}",)) for leaf in trained)
    choices = replace(_choices(site, formula), operands={role: list(named) for role, named in rows.items()})
    yield from ((one,) for one in edits_of(formula, choices) if not one.free)


def _other_orders(formula: Node) -> Iterator[Edit]:
    """Decay, update and reading in another order, and chunks that hand a state on which does not decay."""
    for path, node in nodes(formula):
        yield from (
            Edit(path, "function", (node.name + order,))
            for order in ORDERS
            if node.name + order in OTHER_ORDERS
        )
        yield from (
            Edit(path, "function", (node.name + ending,))
            for ending in RULES
            if node.name + ending in BY_RULES
        )
        if node.name == "convolved":
            yield from (Edit(path, "function", ("convolved_by", float(by))) for by in _MOVED)
        if f"{node.name}_handed_on" in OTHER_ORDERS:
            yield from (Edit(path, "function", (f"{node.name}_handed_on", float(size))) for size in _CHUNKS)


def _other_befores(site: Site) -> Iterator[Edit]:
    """What a sequence may begin with instead of what it has."""
    yield Edit("before", "operand", (_NOTHING,))
    others = sorted({one.seq for one in site.taps.passes})
    if site.operation == "conv":
        yield Edit("before", "operand", ("frozen",))
        yield from (Edit("before", "applied", (one,)) for one in _ROWS)
        yield from (Edit("before", "operand", (name,)) for name in KEPT)
    else:
        yield from (Edit("before", "operand", (_OTHERS.format(seq),)) for seq in others)
        yield from (Edit("before", "applied", (one,)) for one in (*KEPT_IN, "axes_exchanged"))
    slots = (name for names in (slot_names(), shared_names(site)) for name, *_ in names)
    yield from (Edit("before", "operand", (name,)) for name in (NEWEST_FIRST, LATE, *slots))
    yield Edit("before", "operand", (_LEFT_BEFORE,))
    yield from (Edit("before", "operand", (_LEFT.format(seq),)) for seq in others)


def _given(site: Site, part: Part, left: Mapping[int, Array]) -> dict[str, Any]:
    """The leaves of a formula, and what they may be exchanged for. `left`: what each sequence had at its end."""
    given: dict[str, Any] = {**numbers_of(site.facts.model), **part.inputs}
    for role, name in site.weights.items():
        weight = site.facts.weight(name)
        if weight is not None:
            given[role] = weight if site.span is None else weight[site.span]
    if "before" in part.inputs:
        given[_NOTHING] = np.zeros_like(part.inputs["before"])
    if site.operation in STATES:
        given |= _of_others(site, part)
    if site.operation in ("state", "delta"):
        coarse = in_16_bits(site, part, given["l2_eps"], int(given["key_dim"]))
        given |= {f"{leaf} {name}": x for leaf, name, x in coarse}
    if "whole_gate" in part.inputs and "weight" in given:
        given[NORM_FIRST] = _norm_first(given)
    given |= other_widths(site, part)
    if not left:
        return given
    own = part.rows[-1].seq
    given |= {_LEFT.format(seq): x for seq, x in left.items() if seq != own}
    return given | ({_LEFT_BEFORE: left[own - 1]} if own - 1 in left else {})


def _of_others(site: Site, part: Part) -> dict[str, Array]:
    """The last state that was written of each sequence up to the pass, its own in the same pass left out."""
    found: dict[str, Array] = {}
    step, seq = part.rows[-1].step, part.rows[-1].seq
    for one, x in captured(site, state_of(site.operation)):
        if one.step < step or (one.step == step and one.seq != seq):
            found[_OTHERS.format(one.seq)] = x[0]
    return found


def _left(site: Site) -> dict[int, Array]:
    """What each sequence had at its end: its state, or a convolution's last rows, zeros before the first."""
    if site.operation != "conv":
        return {one.seq: x[0] for one, x in captured(site, state_of(site.operation))}
    assert site.declared is not None, "what linear attention reads is known"
    before, found = site.parts[0].inputs["before"], dict[int, Array]()
    for one, x in captured(site, site.declared.inputs["x"]):
        rows = np.concatenate([found.get(one.seq, np.zeros_like(before)), x])
        found[one.seq] = rows[-len(before) :]
    return found


def rates_of(part: Part) -> Array:
    """What each head has of each token, [T, H]."""
    return part.inputs["beta" if "beta" in part.inputs else "step"]


def _norm_first(given: Mapping[str, Any]) -> Array:
    """What a norm gives whose gate is multiplied after it, not before."""
    mean = mean_of_groups(np.square(given["whole"]), given["x"], given["norm_width"])
    return np.asarray(given["x"] / np.sqrt(mean + given["eps"]) * given["weight"] * silu(given["gate"]))


def _value(tree: Node, given: Mapping[str, Any], part: Part) -> Array | None:
    """The formula on a part, in the shape of what was seen; None of another size."""
    with np.errstate(all="ignore"):
        found = np.asarray(edited_value(tree, given))
    return found.reshape(part.seen.shape) if found.size == part.seen.size else None
