"""Hypotheses about routing to experts: edits of the formulas of choice, weights and sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any

import numpy as np

from lockstep.engine.graph import Operation, operation_of
from lockstep.engine.graph.formula import Node, numbers_of
from lockstep.engine.graph.routing import added_to_rows
from lockstep.engine.taps.flow import near
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, Place, leaves, nodes, together
from lockstep.workbench.diagnosis.hypotheses.generate import Choices, edits_of
from lockstep.workbench.diagnosis.hypotheses.operands import (
    STEP_BEFORE,
    formula_at,
    of_other_layers,
    operand_name,
    sum_of_ranks,
)
from lockstep.workbench.diagnosis.hypotheses.passes import buffered
from lockstep.workbench.diagnosis.hypotheses.roundings import READ_AS_OTHER
from lockstep.workbench.diagnosis.hypotheses.search import distinct, pairs, single
from lockstep.workbench.diagnosis.hypotheses.solve import Solved, solve
from lockstep.workbench.diagnosis.hypotheses.trial import Lazy, RowTrial, Tried
from lockstep.workbench.diagnosis.hypotheses.variant import PARTLY, Variant
from lockstep.workbench.diagnosis.hypotheses.words import wording
from lockstep.workbench.diagnosis.operations.experts import hit
from lockstep.workbench.diagnosis.operations.mixture import OUTPUT, expert_placements
from lockstep.workbench.diagnosis.operations.shares import weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Operations whose hypotheses are made here.
ROUTED = ("choice", "choice_weights", "combine", "experts", "expert_input")
#: (tap, kind of operation, role) of the parameters that routers have beside their matrix.
OF_ROUTERS = (
    ("mlp.topk_ids", "choice", "correction"),
    ("mlp.topk_weights", "choice_weights", "expert_scale"),
)
#: Leaves that are numbers, and other values that engines have.
_NUMBERS: Mapping[str, tuple[float, ...]] = {
    "groups": (1.0,), "top_groups": (1.0,), "group_best": (1.0, 2.0), "top_k": (1.0,), "routed_factor": (1.0,),
    "ids": (), "jitter": (0.0, 0.001, 0.01, 0.02, 0.05, 0.1),
}  # fmt: skip
#: Functions that take rows of other tokens.
_MIXING = ("rows_before", "rows_after", "rows_before_of_sequence", "rows_before_in_turn")
#: Softmaxes over the tokens of a pass, of one sequence or of all, in place of that over the experts.
_OVER_TOKENS = ("rows_softmax_of_sequence", "rows_softmax_of_step")
#: The same of what weights are divided by.
_SHARES_OVER_TOKENS = ("rows_shares_of_sequence", "rows_shares_of_step")
#: The experts that a rank has where they are divided among so many groups of ranks.
_HELD = "experts of the rank, of {}"
#: What logits of routers are capped at in models that do so.
_CAPS = (30.0, 50.0, 20.0, 15.0, 10.0)
#: Tokens that go through the experts together.
_CHUNKS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
#: Slots of a token up to which fewer are tried.
_SLOTS = 9
#: What the sum over a token's experts may make of their biases.
_BIASES = ("bias_behind_weights", "bias_left_out", "bias_twice")
#: Layers whose tensors are tried in place of an operation's own, the nearest.
_AROUND = 4
#: Hypotheses that are reported of a site.
_SHOWN = 12


def routing_edits(site: Site) -> Iterator[Variant]:
    """Every single edit that explains something of what was seen, the nearest first."""
    return _searched(site, single)


def routing_pairs(site: Site) -> Iterator[Variant]:
    """Two edits at once. Of a choice one alone may leave as much as there was: all are tried with each other."""
    return _searched(site, _every_two if site.operation == "choice" else pairs)


def _every_two(tried: Tried, edits: Iterable[Edit]) -> list[Solved]:
    found = [solve(tried, two) for two in combinations(edits, 2) if _apart(*two)]
    return distinct(tried, [one for one in found if one is not None and one.left <= PARTLY])


def _apart(one: Edit, other: Edit) -> bool:
    """Whether neither is within what the other puts in its own place."""
    paths = [edit.place for edit in (one, other) if isinstance(edit.place, tuple)]
    return len(paths) < 2 or all(a[: len(b)] != b for a, b in (paths, paths[::-1]))


def _searched(site: Site, search: Callable[[Tried, Iterable[Edit]], list[Solved]]) -> Iterator[Variant]:
    if site.seen.shape != site.expected.shape:
        return
    formula, others = formula_at(site), _others(site)
    tokens: dict[str, Callable[[], Any]] = {role: partial(np.asarray, x) for role, x in site.inputs.items()}
    terms = inputs_elsewhere(site, site.declared, site.inputs)
    tokens |= {name: load for role in terms.values() for name, load in role.items()}
    operands = {role: list(found) for role, found in terms.items()}
    for _, _, role in OF_ROUTERS:
        operands[role] = [name for name in others if name.startswith(f"{role} of layer ")]
    results = _choices_of_other_layers(site)
    tokens |= {name: partial(np.asarray, x) for name, x in results.items()}
    tokens |= _biases_of_down(site)
    edits = (
        one
        for one in chain(
            routing_choices(formula, others, operands, site.facts.dtype, list(results)), _experts_seen(site)
        )
        if not (site.operation == "choice" and one.free)
    )
    yield from formula_edits(site, formula, tokens, others, edits, search)


def _experts_seen(site: Site) -> Iterator[Edit]:
    """Only experts between the first and the last that were chosen in the wrong passes are chosen among."""
    experts = site.facts.model.experts
    if site.operation != "choice" or experts is None or site.deviation is None:
        return
    passes = {(row.step, row.seq) for row in site.deviation.rows}
    ids = site.seen[[(row.step, row.seq) in passes for row in site.rows]]
    if np.isfinite(ids).all() and (ids.min() > 0 or ids.max() < experts.count - 1):
        yield Edit((0,), "applied", ("columns_within", float(ids.min()), float(ids.max())))


def formula_edits(
    site: Site,
    formula: Node,
    tokens: Mapping[str, Callable[[], Any]],
    others: Mapping[str, Callable[[], Any]],
    edits: Iterable[Edit],
    search: Callable[[Tried, Iterable[Edit]], list[Solved]] = single,
) -> Iterator[Variant]:
    """Those edits of a row-wise operation's formula that explain something, the nearest first. Its leaves are `tokens`,
    with an axis of them, and `others`."""
    trial = RowTrial(site, formula, Lazy(tokens), Lazy(others))
    for solved in search(trial, edits)[:_SHOWN]:
        tree, words = together(solved.edits, formula), wording(site, solved.edits)
        noise = None if site.operation == "choice" else trial.noise_of(tree)
        yield Variant(
            words.name, words.kind, words.text, words.fitted, trial.whole(tree), solved.cost, noise=noise,
            edits=solved.edits,
        )  # fmt: skip


def _others(site: Site) -> dict[str, Callable[[], Any]]:
    """Leaves without an axis of tokens: the model's numbers, and what its routers have beside their matrix."""
    found: dict[str, Callable[[], Any]] = {
        name: partial(float, value) for name, value in numbers_of(site.facts.model).items()
    }
    if site.facts.model.experts is not None:
        for groups, _, held in expert_placements(site.facts.model, len(site.taps.ranks), site.rank):
            if held is not None:
                found[_HELD.format(groups)] = partial(np.array, held)
    for tap, kind, role in OF_ROUTERS:
        name = weight_names(site.near(tap), kind, site.facts).get(role, "")
        if (values := site.facts.vector(name)) is not None:
            found[role] = partial(np.asarray, values)
            for layer, x in of_other_layers(site, name, values.shape):
                if not np.array_equal(x, values):
                    found[f"{role} of layer {layer}"] = partial(np.asarray, x)
    return found


def _choices_of_other_layers(site: Site) -> dict[str, Array]:
    """What other layers have chosen for the same tokens, by name."""
    found = dict[str, Array]()
    if site.operation != "choice" or site.layer is None:
        return found
    for layer in range(site.facts.model.num_layers):
        tap = site.tap.replace(f"layers.{site.layer}.", f"layers.{layer}.", 1)
        rows = site.rows_of(tap, site.rank) if layer != site.layer else None
        if rows is not None and rows.shape == site.seen.shape:
            found[f"the choice of layer {layer}"] = rows
    return found


def _biases_of_down(site: Site) -> dict[str, Callable[[], Any]]:
    """What the experts' down adds to each of the rows that are summed up, [N, S, H], where it has biases."""
    name = weight_names(site.near(OUTPUT), "experts", site.facts).get("bias", "")
    ids = site.rows_of(site.near("mlp.topk_ids")) if name and site.operation == "combine" else None
    if ids is None:
        return {}
    held = {one: site.facts.vector(name.format(one)) for one in hit(ids, site.held)}
    there = {one: x for one, x in held.items() if x is not None}
    return {"bias": lambda: added_to_rows(np.zeros_like(site.inputs["x"]), there, ids)}


def inputs_elsewhere(
    site: Site, operation: Operation | None, inputs: Mapping[str, Array]
) -> dict[str, dict[str, Callable[[], Array]]]:
    """By role of an input what may have been read instead, as leaves: what a buffer holds, the same of the layers
    around, or of the step before; of a rank's term of a sum also the sum, and the terms of other ranks."""
    found: dict[str, dict[str, Callable[[], Array]]] = {}
    count, own = site.facts.model.num_layers, site.layer or 0
    layers = sorted((one for one in range(count) if one != own), key=lambda one: abs(one - own))
    every, before = np.arange(len(site.rows)), buffered(site)
    for role, tap in ({} if operation is None else operation.inputs).items():
        if role not in inputs:
            continue
        held = [(layer, "", every) for layer in layers[:_AROUND]]
        held += [(layer, STEP_BEFORE, before) for layer in dict.fromkeys((own, count - 1))]
        found[role] = {
            f"{name}{when}": partial(np.asarray, x[rows])
            for name, when, rows in ((near(tap, layer, count), when, rows) for layer, when, rows in held)
            if (x := site.rows_of(name)) is not None and x.shape == inputs[role].shape
        }
        read = operation_of(site.facts.model, tap)
        if read is None or not read.summed or len(site.taps.ranks) == 1:
            continue
        of_ranks = {rank: site.rows_of(site.near(tap), rank) for rank in site.taps.ranks}
        terms = {rank: x for rank, x in of_ranks.items() if x is not None and x.shape == inputs[role].shape}
        if len(terms) == len(of_ranks):
            found[role] |= {sum_of_ranks(role): partial(np.sum, list(terms.values()), axis=0)} | {
                operand_name(tap, rank): partial(np.asarray, x)
                for rank, x in terms.items()
                if rank != site.rank
            }
    return found


def routing_choices(
    formula: Node,
    others: Mapping[str, object],
    operands: Mapping[str, Sequence[str]],
    dtype: str,
    results: Sequence[str] = (),
) -> Iterator[Edit]:
    """What routers get wrong, and every single edit of the formula. `operands` and `results` as in `Choices`; `dtype`
    is the engine's."""
    for leaf in leaves(formula):
        if leaf in ("correction", "logits"):
            yield from (Edit(leaf, "applied", (to,)) for to in ("bfloat16", "float16"))
    for path, node in nodes(formula):
        match node.name:
            case "softmax" | "sigmoid" if node.args == (Node("logits"),):
                yield from (Edit(path, "applied", (to,)) for to in ("bfloat16", "float16"))
                yield from (
                    Edit(path, "function", (f"{node.name}_in_{to}",)) for to in ("bfloat16", "float16")
                )
                yield Edit(path, "function", ("sigmoid" if node.name == "softmax" else "softmax",))
                yield from (Edit((*path, 0), "applied", ("capped", cap)) for cap in _CAPS)
                if "correction" in others:
                    yield Edit(path, "applied", ("plus", "correction", 1.0))
                if "groups" in others and formula.name != "chosen":
                    yield Edit(
                        path, "function", ("softmax_within_groups", "groups", "top_groups", "group_best")
                    )
            case "taken":
                yield Edit(path, "applied", ("least_dropped",))
                if node.args[0].name != "softmax":  # of which these are the shares
                    yield Edit(path, "function", ("softmax_of_chosen", "logits"))
                if not any(one.name == "shares" for _, one in nodes(formula)):
                    yield Edit(path, "applied", ("shares",))
            case "shares":
                if node.args[0].args[:1] == (Node("sigmoid", (Node("logits"),)),):
                    yield Edit(path, "function", ("shares_of_all", "logits"))
                held = (name for name in others if name.startswith(_HELD.format("")))
                yield from (Edit(path, "function", ("shares_within", "ids", name)) for name in held)
                yield Edit(path, "function", ("shares_and_more", None))
                if "correction" in others:
                    yield Edit(path, "function", ("shares_of_corrected", "correction", "ids"))
                yield from (Edit(path, "function", (over,)) for over in _SHARES_OVER_TOKENS)
            case "chosen" if node.args[0].name == "add" and Node("correction") in node.args[0].args:
                yield Edit(path, "function", ("chosen_in_groups_before", "correction"))
            case "add" if Node("sigmoid", (Node("gate"),)) in node.args[1].args:
                yield Edit(path, "function", ("gated_together", "gate"))
            case "times_of_experts":
                yield Edit(path, "function", ("times_of_slots",))
                yield Edit((*path, 1), "applied", ("squared",))
                yield from (Edit((*path, 1), "applied", ("columns_moved", by)) for by in (1.0, -1.0))
                yield Edit(path, "applied", ("shares",))
            case "mixed":
                yield from (Edit(path, "function", (other,)) for other in ("softmax_taken", "mixed_beside"))
            case "weighed":
                yield Edit(path, "function", ("unweighed",))
            case "plain_sum":
                yield from _of_slots((*path, 0))
            case "weighed_sum":
                yield Edit(path, "function", ("unweighted_sum",))
                yield from (Edit(path, "function", (one, "bias")) for one in _BIASES)  # where there is one
                yield from _of_slots((*path, 1))
                yield Edit((*path, 1), "applied", ("first_of_row",))
                yield from (Edit((*path, 1), "applied", (one,)) for one in ("shares", "squared", "backwards"))
                if "routed_factor" in others:
                    yield Edit((*path, 1), "applied", ("multiply", "routed_factor"))
                yield from (Edit((*path, 1), "applied", ("rows_of_first_chunk", size)) for size in _CHUNKS)
    if any(node.name in ("taken", "mixed") for _, node in nodes(formula)):
        yield Edit((), "applied", ("falling",))
    if any(node.name == "routed_factor" for _, node in nodes(formula)):
        yield Edit((), "applied", ("multiply", "routed_factor"))
    choices = Choices(operands, results, numbers=_NUMBERS, orders=False, rows=_MIXING)
    yield from (one for one in edits_of(formula, choices) if not (one.kind == "number" and one.free))
    yield from _otherwise(formula, dtype)


def _of_slots(place: Place) -> Iterator[Edit]:
    """Only some of a token's slots have anything, the first or the others: of more than there are it is no edit."""
    for count in range(1, _SLOTS):
        yield from (
            Edit(place, "applied", (which, float(count))) for which in ("first_slots", "slots_behind")
        )


def _otherwise(formula: Node, dtype: str) -> Iterator[Edit]:
    """What gives quite other numbers; last, since a few wrong choices may be those of any."""
    for path, node in nodes(formula):
        match node.name:
            case "softmax" | "sigmoid":
                if formula.name == "chosen" and node.args == (Node("logits"),):
                    yield from (Edit(path, "function", (one,)) for one in ("by_bits", "negative", "size"))
                if node.name == "softmax":
                    yield from (Edit(path, "function", (over,)) for over in _OVER_TOKENS)
            case "chosen":
                yield Edit(path, "function", ("chosen_in_turn",))
                yield Edit(path, "function", ("chosen_overwriting", "logits"))
            case "logits" if dtype in READ_AS_OTHER:
                yield Edit(path, "applied", (READ_AS_OTHER[dtype],))
