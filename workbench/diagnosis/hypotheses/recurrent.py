"""Hypotheses about linear attention and gates: edits of their formulas, on every pass of a sequence.

A formula may have met another `before` than it should: nothing, what another sequence has left, a convolution's rows
moved by one, what was kept in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.engine.graph.formula import Node, numbers_of
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, nodes, together
from lockstep.workbench.diagnosis.hypotheses.fits import narrower
from lockstep.workbench.diagnosis.hypotheses.functions import FUNCTIONS
from lockstep.workbench.diagnosis.hypotheses.generate import Choices, edits_of
from lockstep.workbench.diagnosis.hypotheses.operands import formula_at
from lockstep.workbench.diagnosis.hypotheses.variant import PARTLY, Variant
from lockstep.workbench.diagnosis.hypotheses.words import told
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.recurrent import GATES, RECURRENT
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Operations whose hypotheses are made here.
STATEFUL = (*GATES, *RECURRENT)
#: What a sequence may begin with instead of what it has, by name.
_NOTHING, _OTHERS, _OTHER_ROWS = "nothing", "state of sequence {}", "the last rows of sequence {}"
#: What a state, which should be float32 whatever the engine's dtype, may be kept in between passes.
_KEPT_IN = ("bfloat16", "float16")
#: What becomes of the rows that a convolution has kept.
_ROWS = ("oldest_row_lost", "newest_row_lost")
#: Leaves that are numbers, and other values that engines have.
_NUMBERS: Mapping[str, tuple[float, ...]] = {
    "l2_eps": (0.0, 1e-5, 1e-12), "eps": (1e-5, 1e-6), "key_scale": (1.0,), "key_dim": (), "value_dim": (),
}  # fmt: skip


def recurrent_edits(site: Site) -> Iterator[Variant]:
    """Every single edit that explains something of what was seen."""
    formula = formula_at(site)
    smallest = min(_wrong(site), key=lambda i: len(site.parts[i].rows), default=None)
    if smallest is None or any(not part.fits for part in site.parts):
        return
    given = [_given(site, part) for part in site.parts]
    for edits in dict.fromkeys(_candidates(site, formula)):
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
            words = told(site, edits)
            yield Variant(words.name, words.kind, words.text, words.fitted, predicted, edits=edits)


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
        vectors=("weight", "A_log", "dt_bias"),
        applied={
            "result": [(dtype,) for dtype in narrower(site.facts.dtype)],
            "weight": [("backwards",), ("plus_one",)],
        },
        orders=False,
        usual=False,
    )  # fmt: skip


def _candidates(site: Site, formula: Node) -> Iterator[tuple[Edit, ...]]:
    """Other pairs of queries and keys with values, other beginnings, and every single edit without a number to solve
    for."""
    pairs = [path for path, node in nodes(formula) if node.name == "paired"]
    if pairs:
        yield tuple(Edit(path, "function", ("paired_in_turn",)) for path in pairs)
    if site.operation in RECURRENT:
        yield (Edit("before", "operand", (_NOTHING,)),)
    others = sorted({one.seq for one in site.taps.passes})
    if site.operation == "conv":
        yield (Edit("before", "operand", ("frozen",)),)
        yield from ((Edit("before", "applied", (one,)),) for one in _ROWS)
        yield from ((Edit("before", "operand", (_OTHER_ROWS.format(seq),)),) for seq in others)
    elif site.operation in RECURRENT:
        yield from ((Edit("before", "operand", (_OTHERS.format(seq),)),) for seq in others)
        yield from ((Edit("before", "applied", (dtype,)),) for dtype in _KEPT_IN)
    yield from ((one,) for one in edits_of(formula, _choices(site, formula)) if not one.free)


def _given(site: Site, part: Part) -> dict[str, Any]:
    """The leaves of a formula, and what they may be exchanged for."""
    given: dict[str, Any] = {**numbers_of(site.facts.model), **part.inputs}
    for role, name in site.weights.items():
        weight = site.facts.weight(name)
        if weight is not None:
            given[role] = weight if site.span is None else weight[site.span]
    if "before" in part.inputs:
        given[_NOTHING] = np.zeros_like(part.inputs["before"])
    if site.operation in ("state", "delta"):
        given |= _of_others(site, part)
    if site.operation == "conv":
        given |= _rows_of_others(site, part)
    return given


def _of_others(site: Site, part: Part) -> dict[str, Array]:
    """The last state that was written of each sequence up to the pass, its own in the same pass left out."""
    tensors = site.taps.tensors(site.near("attn.state"), site.rank)
    return {_OTHERS.format(seq): held[-1][0] for seq, held in _so_far(site, part, tensors).items()}


def _rows_of_others(site: Site, part: Part) -> dict[str, Array]:
    """The last rows that a convolution has read of each sequence up to the pass, zeros before the first."""
    assert site.declared is not None, "a convolution's input is known"
    tensors, before = (
        site.taps.tensors(site.near(site.declared.inputs["x"]), site.rank),
        part.inputs["before"],
    )
    return {
        _OTHER_ROWS.format(seq): np.concatenate([np.zeros_like(before), *held])[-len(before) :]
        for seq, held in _so_far(site, part, tensors).items()
    }


def _so_far(site: Site, part: Part, tensors: Sequence[Array | None]) -> dict[int, list[Array]]:
    """What was captured up to the pass, by sequence; its own in the same pass left out."""
    found: dict[int, list[Array]] = {}
    step, seq = part.rows[-1].step, part.rows[-1].seq
    for one, x in zip(site.taps.passes, tensors, strict=True):
        if x is not None and (one.step < step or (one.step == step and one.seq != seq)):
            found.setdefault(one.seq, []).append(x)
    return found


def _value(tree: Node, given: Mapping[str, Any], part: Part) -> Array | None:
    """The formula on a part, in the shape of what was seen; None of another size."""
    with np.errstate(all="ignore"):
        found = np.asarray(_evaluate(tree, given))
    return found.reshape(part.seen.shape) if found.size == part.seen.size else None


def _evaluate(node: Node, given: Mapping[str, Any]) -> Any:
    if not node.args:
        return given[node.name] if node.name in given else float(node.name)
    return FUNCTIONS[node.name](*(_evaluate(one, given) for one in node.args))
