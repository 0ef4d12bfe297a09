"""What ran instead of attention: edits of the tree, numbers that are solved for, choices, pairs.

Of scores, probabilities and contexts that were recorded by themselves the same, as far as they are made there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations, product

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.attention.choices import Choice, head_choices, query_choices
from lockstep.workbench.diagnosis.hypotheses.attention.masks import (
    hidden_by,
    masks,
    masks_as_numbers,
    overwritten,
)
from lockstep.workbench.diagnosis.hypotheses.attention.numbers import (
    factors_of_caches,
    numbers,
    scales,
    skipped,
    solved_rows,
)
from lockstep.workbench.diagnosis.hypotheses.attention.operands import (
    exchanged_roles,
    in_front,
    in_place,
    of_another_layer,
    other_queries,
    other_rows,
    packed_before,
    queries_of,
    rotations_inside,
    seen_before,
    without_rotation,
)
from lockstep.workbench.diagnosis.hypotheses.attention.scales import paper_slopes
from lockstep.workbench.diagnosis.hypotheses.attention.sinks import Form, sink_forms
from lockstep.workbench.diagnosis.hypotheses.attention.softmaxes import (
    BY_DIFFERENCES,
    coarse_softmaxes,
    softmaxes,
)
from lockstep.workbench.diagnosis.hypotheses.attention.tensors import (
    ROWS,
    coarser,
    head_maps,
    of_rows,
    orders,
    rounding,
    row_ranges,
    spans,
    tensor_edits,
)
from lockstep.workbench.diagnosis.hypotheses.attention.tree import AXES, AttentionTree, Change, Changes, Given
from lockstep.workbench.diagnosis.hypotheses.attention.trials import (
    Trial,
    judged,
    one_edit,
    tried,
    variant_of,
)
from lockstep.workbench.diagnosis.hypotheses.blocks import others
from lockstep.workbench.diagnosis.hypotheses.edits import Detail, Edit, EditKind
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.attention import FUSED, expand
from lockstep.workbench.diagnosis.operations.facts import UNIT
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Hypotheses of which pairs are tried, and of those at one point; with which each mask is, and of those at one point.
_PAIRED, _OF_A_POINT, _MASKED, _MASKED_OF_A_POINT = 24, 6, 6, 3


def likely(site: Site) -> Iterator[Variant]:
    """What engines do: another scale, other rows of the cache, heads, masks, functions; numbers solved for."""
    if judged(site):
        tree = AttentionTree.of(site)
        yield from _all_likely(tree)
        for choice in head_choices(tree):
            yield _chosen(tree, choice)


def unlikely(site: Site) -> Iterator[Variant]:
    """Anything that may be done to any tensor of the tree; then two edits at once."""
    if not judged(site):
        return
    tree = AttentionTree.of(site)
    partly: list[tuple[float, Trial]] = []
    yield from tried(tree, _ranges(tree))
    coarse = _coarse_scores(tree) if site.operation == "scores" else ()  # of others they are tried before
    fused = (
        chain(_cached_heads(tree), _prompts_laid_out(tree), skipped(tree)) if site.operation in FUSED else ()
    )
    yield from tried(tree, chain(_tensors(tree), _coarse_operands(tree), coarse, fused), partly)
    for choice in query_choices(tree) if "allowed" in tree.points else ():
        yield _chosen(tree, choice)
    if _Likely not in site.derived:
        for _ in _all_likely(tree):
            pass  # none of them fits alone: what they leave is what counts
    partly += site.derived[_Likely].partly
    best = _best(partly, _OF_A_POINT)
    yield from tried(tree, _pairs(combinations(best, 2)))
    if tree.cap and "q" in tree.points:
        yield from tried(tree, scales(tree, capped=False))
    if (
        site.operation in FUSED
    ):  # a mask, or a scale, may help where the other mistake is mended, and there alone
        unmasked = [one for one in _best(partly, _MASKED_OF_A_POINT) if "allowed" not in one.changes]
        usual = chain(product(unmasked[:_MASKED], _masks(tree)), product(best, scales(tree)))
        yield from tried(tree, chain(_pairs(usual), factors_of_caches(tree)))


@dataclass(frozen=True, slots=True)
class _Likely:
    """What the likely edits of a site's tree leave, of those that explain some of the sample."""

    partly: list[tuple[float, Trial]]


def _all_likely(tree: AttentionTree) -> Iterator[Variant]:
    partly: list[tuple[float, Trial]] = []
    yield from tried(tree, _likely(tree), partly)
    tree.site.derived[_Likely] = _Likely(partly)


def _best(partly: Sequence[tuple[float, Trial]], of_a_point: int) -> list[Trial]:
    """What leaves least of the sample: of each point a few that do not leave the same."""
    found: dict[tuple[str, ...], dict[float, Trial]] = {}
    for left, trial in sorted(partly, key=lambda one: one[0]):
        alike = found.setdefault(tuple(sorted(trial.changes)), {})
        if len(alike) < of_a_point:
            alike.setdefault(round(left, 9), trial)
    every = [one for alike in found.values() for one in alike.items()]
    return [trial for _, trial in sorted(every, key=lambda one: one[0])[:_PAIRED]]


# --- single edits -------------------------------------------------------------------------------------------


def _likely(tree: AttentionTree) -> Iterator[Trial]:
    if "q" in tree.points:
        yield from scales(tree)
    yield from _rows(tree)
    if "q" in tree.points:
        yield from _masks(tree)
    yield from _of_probabilities(tree) if tree.site.operation == "context" else _softmaxes(tree)
    if tree.site.operation in FUSED:
        yield from _coarse_scores(tree)
    if "q" in tree.points:
        yield from _other_queries(tree)
        yield from _biases(tree)
    for detail, change in orders("context") if "context" in tree.points else ():
        yield one_edit("context", "map", detail, {"context": tree.of_all_queries("context", change)})
    yield from _other_sequences(tree)
    yield from numbers(tree)
    yield from _row_maps(tree)


def _softmaxes(tree: AttentionTree) -> Iterator[Trial]:
    """Other functions of the scores, sinks among them, and roundings within."""
    unit = tree.site.facts.unit
    for detail, form in sink_forms(tree.site):
        yield one_edit("sinks", "function", detail, {"softmax": partial(_of_form, form)})
    for detail, change in softmaxes(tree):
        yield one_edit("softmax", "function", detail, {"softmax": change})
    for detail, change, tolerance in coarse_softmaxes(unit):
        edit = Edit("softmax", "function", detail)
        yield Trial((edit,), {"softmax": change}, 0, tolerance, UNIT[str(detail[2])] / unit)


def _of_probabilities(tree: AttentionTree) -> Iterator[Trial]:
    """Other functions of the scores that recorded probabilities stand for, but for a number a query; the scores."""
    for detail, change in softmaxes(tree):
        if detail[0] in BY_DIFFERENCES:
            yield one_edit("softmax", "function", detail, {"probs": partial(_of_logarithms, change)})
    scores = others(tree.site, "attn.scores")
    if all(x is not None and x.shape == one.raw.shape for x, one in zip(scores, tree.given, strict=True)):
        changes: Changes = {"probs": partial(_recorded, scores)}
        yield one_edit("softmax", "function", ("left_out",), changes)


def _of_logarithms(change: Change, probs: Array, given: Given) -> Array:
    with np.errstate(divide="ignore"):
        return change(np.log(probs), given)


def _recorded(scores: Sequence[Array | None], probs: Array, given: Given) -> Array:
    found = scores[given.part]
    if found is None:
        raise ValueError("no scores here")
    return np.where(np.isfinite(found), found, 0.0)[:, given.rows]


def _masks(tree: AttentionTree) -> Iterator[Trial]:
    """Other masks, and masks that are numbers."""
    recorded = tree.site.operation == "scores"
    for detail, changes in masks_as_numbers() if recorded or 0 in tree.wrong else ():
        yield one_edit("hidden", "number", detail, changes)
    if recorded:  # they show which cells are seen, and what stands in the others
        for how, number in _hidden_numbers(tree):
            yield one_edit("hidden", "number", (how, number), hidden_by(how, number), 1)
        return
    for detail, change in masks(max(len(one.key_at) for one in tree.given)):
        yield one_edit("allowed", "map", detail, {"allowed": change})
    for detail, change in overwritten(tree.given):
        yield one_edit("allowed", "map", detail, {"allowed": change})
    yield from _packed_together(tree)


def _hidden_numbers(tree: AttentionTree) -> Iterator[tuple[str, float]]:
    """The finite numbers that hidden scores have, or that were added to them."""
    hidden = [~one.allowed for one in tree.given]
    seen = np.concatenate([one.seen[cells] for one, cells in zip(tree.given, hidden, strict=True)])
    plain = np.concatenate([one.raw[cells] for one, cells in zip(tree.given, hidden, strict=True)])
    if (finite := np.isfinite(seen)).any():
        yield "filled", float(np.median(seen[finite]))
        yield "added", float(np.median((seen - plain)[finite]))


def _of_form(form: Form, scores: Array, given: Given) -> Array:
    return form(scores)


def _coarse_scores(tree: AttentionTree) -> Iterator[Trial]:
    """Queries, keys and their products in fewer bits, before the products are scaled or after that."""
    scale = tree.site.facts.model.scale
    for dtype in coarser(tree.site.facts.unit):
        if dtype not in UNIT:
            continue
        low, grown = rounding(dtype), UNIT[dtype] / tree.site.facts.unit
        ways: Mapping[str, Changes] = {
            "computed": {"q": low, "k": low, "scores": low},
            "not_scaled": {"q": low, "k": low, "products": low},
            "products": {"products": low},
            "queries_scaled": {"q": partial(_scaled_in, low, scale), "k": low},
            "added_up": {"q": low, "k": low, "products": partial(_added_up, low)},
        }
        for how, changes in ways.items():
            yield Trial((Edit("scores", "throughout", (how, dtype)),), changes, grown=grown)


def _scaled_in(low: Change, scale: float, q: Array, given: Given) -> Array:
    """Queries that are scaled in fewer bits, as they would be before their scale."""
    return low(low(q, given) * scale, given) / scale


def _added_up(low: Change, products: Array, given: Given) -> Array:
    """The sum of each product of a query and a key, rounded after every term."""
    q, k = (low(x, given).swapaxes(0, 1) for x in (given.q, expand(given.k, given.heads)))
    total = np.zeros(products.shape)
    for at in range(q.shape[2]):
        total = low(total + q[:, :, None, at] * k[:, None, :, at], given)
    return total


def _rows(tree: AttentionTree) -> Iterator[Trial]:
    """Other rows than were written: of keys and values alike, of keys, of values; all, or those of earlier steps."""
    operands = {role: dict(other_rows(tree.site, role)) for role in tree.roles}
    for detail in dict.fromkeys(detail for role in operands for detail in operands[role]):
        changes = {role: in_place(operands[role][detail]) for role in operands if detail in operands[role]}
        yield from _of_roles("operand", detail, changes, ROWS)
    if len(tree.roles) > 1:
        yield one_edit("k+v", "operand", ("role", "exchanged"), exchanged_roles(tree.site))


def _row_maps(tree: AttentionTree) -> Iterator[Trial]:
    """Rows of the cache in another order, lost, or scaled."""
    index = {role: _key_maps(role, tree) for role in tree.roles}
    for detail in dict.fromkeys(detail for role in index for detail in index[role]):
        yield from _of_roles("map", detail, {role: index[role][detail] for role in index}, ROWS)
    for role in index if tree.site.operation in FUSED else ():
        for rows in ROWS:
            yield from solved_rows(tree, role, rows)


def _ranges(tree: AttentionTree) -> Iterator[Trial]:
    """Single rows, or ranges of them, that hold what is another layer's, sequence's, or nothing."""
    every: dict[str, dict[Detail, Change]] = {}
    for role in tree.roles:
        found = {detail: in_place(tensors) for detail, tensors in other_rows(tree.site, role)}
        every[role] = {**found, ("scaled", 0.0): lambda x, g: 0 * x}
        for by in (1, -1, 2, -2):
            every[role]["rolled", "key", float(by)] = partial(_rolled, by)
    keys = max(len(one.key_at) for one in tree.given)
    for detail in dict.fromkeys(detail for role in every for detail in every[role]):
        changes = {role: every[role][detail] for role in every if detail in every[role]}
        kind: EditKind = "map" if detail[0] in ("scaled", "rolled") else "operand"
        yield from _of_roles(kind, detail, changes, list(row_ranges(keys)))
        for rows in spans(keys) if tree.site.operation in FUSED else ():
            some = {role: of_rows(change, rows) for role, change in changes.items()}
            yield one_edit("+".join(some), kind, (*detail, rows), some)


def _rolled(by: int, x: Array, given: Given) -> Array:
    return np.roll(x, -by, axis=0)


def _key_maps(role: str, tree: AttentionTree) -> Mapping[Detail, Change]:
    every = tensor_edits(role, tree.site.facts.unit)
    return {detail: change for detail, change in every if detail[0] == "scaled" or detail[1] == "key"}


def _of_roles(
    kind: EditKind, detail: Detail, changes: Mapping[str, Change], ranges: Sequence[str]
) -> Iterator[Trial]:
    sides = [tuple(changes), *((role,) for role in changes)] if len(changes) > 1 else [tuple(changes)]
    for roles in sides:
        for rows in ranges:
            some = {role: of_rows(changes[role], rows) for role in roles}
            yield one_edit("+".join(roles), kind, (*detail, rows), some)


def _other_queries(tree: AttentionTree) -> Iterator[Trial]:
    """Queries, or queries and keys, rotated otherwise, of elsewhere, in each other's place, of length 1."""
    for place, detail, changes in rotations_inside(tree):
        yield one_edit(place, "applied", detail, changes)
    yield one_edit("q+k", "operand", ("stage", "unrotated"), without_rotation(tree.site))
    turned = tree.of_all_queries("products", lambda x, g: x.swapaxes(1, 2))
    yield one_edit("products", "map", ("transposed",), {"products": turned})
    for roles in (("q", "k"), ("q",), ("k",)):
        yield one_edit("+".join(roles), "function", ("unit",), dict.fromkeys(roles, _of_length_one))
    for detail, tensors in other_queries(tree.site):
        yield one_edit("q", "operand", detail, {"q": queries_of(tensors)})
    for detail, changes in of_another_layer(tree.site):
        yield one_edit("q+k", "operand", detail, changes)


def _of_length_one(x: Array, given: Given) -> Array:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12))


def _other_sequences(tree: AttentionTree) -> Iterator[Trial]:
    """The context of another sequence's tokens of the same step."""
    passes = [tree.site.taps.passes[i] for i in tree.site.passes]

    def of(seq: int) -> Change:
        def change(x: Array, given: Given) -> Array:
            step = passes[given.part].step
            other = next((i for i, one in enumerate(passes) if one.step == step and one.seq == seq), None)
            theirs = x if other is None else tree.site.parts[other].expected.reshape(-1, *x.shape[1:])
            at = given.rows[given.rows < len(theirs)] if other is not None else given.rows[:0]
            return np.concatenate([theirs[at], x[len(at) :]]) if len(at) else x

        return change

    if "context" in tree.points:
        for seq in sorted({one.seq for one in passes}):
            yield one_edit("context", "map", ("other_sequence", float(seq)), {"context": of(seq)})


def _packed_together(tree: AttentionTree) -> Iterator[Trial]:
    """The keys and values of the sequences of the step before one's own, as in a row that has no mask between them."""
    if len(tree.roles) < 2 or len({one.seq for one in tree.site.taps.passes}) < 2:
        return
    before = {role: packed_before(tree.site, role) for role in ("k", "v")}
    if any(x is not None and np.isfinite(x).all() for x in before["k"]):
        changes = {role: in_front(tensors) for role, tensors in before.items()}
        changes["allowed"] = seen_before(before["k"])
        yield one_edit("allowed", "map", ("other_sequences",), changes)


def _biases(tree: AttentionTree) -> Iterator[Trial]:
    """What may be added to the scores: linear in the distance (ALiBi, arXiv:2108.12409), in positions."""
    slopes = np.array(paper_slopes(tree.site, tree.given[0].heads))[:, None, None]
    yield one_edit("scores", "applied", ("alibi",), {"scores": lambda s, g: s - slopes * g.far})
    for sign in (1.0, -1.0):
        yield one_edit("scores", "applied", ("distance", sign), {"scores": partial(_plus_distance, sign)})


def _plus_distance(by: float, scores: Array, given: Given) -> Array:
    return np.asarray(scores + by * given.far)


def _tensors(tree: AttentionTree) -> Iterator[Trial]:
    """Anything that may be done to a tensor."""
    points = ("context", "values", "v", "probs", "scores", "keys", "k", "q")
    for point in (one for one in points if one in tree.points):
        for detail, change in tensor_edits(point, tree.site.facts.unit):
            if point in ("keys", "values") and (
                detail[0] == "rounded" or (detail[0] == "reread" and "head" not in str(detail[1]))
            ):
                continue  # as those that are cached
            if "query" in AXES[point] and ("query" in detail or detail[0] in ("reread", "transposed")):
                change = tree.of_all_queries(point, change)
            grown = UNIT.get(str(detail[-1]), 0.0) / tree.site.facts.unit if detail[0] == "rounded" else 1.0
            yield Trial((Edit(point, "map", detail),), {point: change}, grown=max(grown, 1.0))


def _cached_heads(tree: AttentionTree) -> Iterator[Trial]:
    """Heads of some rows of a cache that is not recorded in each other's place."""
    for detail, change in head_maps(tree.given[0].k.shape[1]):
        yield from _of_roles("map", detail, dict.fromkeys(tree.roles, change), ROWS[1:])


def _prompts_laid_out(tree: AttentionTree) -> Iterator[Trial]:
    """The rows of a prompt alone, in another layout than they are read in."""
    for detail, change in orders("k"):
        yield from _of_roles("map", detail, dict.fromkeys(tree.roles, change), ("prompt_alone",))


def _coarse_operands(tree: AttentionTree) -> Iterator[Trial]:
    """Several operands in fewer bits."""
    for dtype in coarser(tree.site.facts.unit):
        low, grown = rounding(dtype), UNIT.get(dtype, 0.0) / tree.site.facts.unit
        for points in (("q", "k"), ("k", "v"), ("q", "k", "v"), ("probs", "v")):
            edit = Edit("+".join(points), "map", ("rounded", dtype))
            yield Trial((edit,), dict.fromkeys(points, low), grown=max(grown, 1.0))


def _pairs(pairs: Iterable[tuple[Trial, Trial]]) -> Iterator[Trial]:
    """Two edits at different points, a mask as the second."""
    for pair in pairs:
        one, two = sorted(pair, key=lambda trial: "allowed" in trial.changes)
        if not one.changes.keys() & two.changes.keys():
            changes = {**one.changes, **two.changes}
            yield Trial((*one.edits, *two.edits), changes, one.numbers + two.numbers)


def _chosen(tree: AttentionTree, choice: Choice) -> Variant:
    edit, outs, noises, numbers = choice
    return variant_of(tree.site, Trial((edit,), {}, numbers), outs, noises)
