"""What ran instead of attention in one kernel: edits of the tree, numbers that are solved for, choices, pairs.

Each hypothesis is tried on a few wrong queries; those that leave little there are made whole. Of several that give the
same numbers the first is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np

from lockstep.workbench.diagnosis.hypotheses import fits
from lockstep.workbench.diagnosis.hypotheses.attention.choices import Choice, head_choices, query_choices
from lockstep.workbench.diagnosis.hypotheses.attention.masks import masks, masks_as_numbers, overwritten
from lockstep.workbench.diagnosis.hypotheses.attention.operands import (
    exchanged_roles,
    in_front,
    in_place,
    other_queries,
    other_rows,
    packed_before,
    queries_of,
    rotations_inside,
    seen_before,
)
from lockstep.workbench.diagnosis.hypotheses.attention.scales import meanings, paper_slopes
from lockstep.workbench.diagnosis.hypotheses.attention.sinks import Form, sink_forms
from lockstep.workbench.diagnosis.hypotheses.attention.softmaxes import (
    coarse_softmaxes,
    softmax_with,
    softmaxes,
)
from lockstep.workbench.diagnosis.hypotheses.attention.tensors import (
    ROWS,
    coarser,
    of_rows,
    rounding,
    row_ranges,
    spans,
    tensor_edits,
)
from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Change, Changes, Given
from lockstep.workbench.diagnosis.hypotheses.attention.words import told
from lockstep.workbench.diagnosis.hypotheses.blocks import by_head
from lockstep.workbench.diagnosis.hypotheses.edits import Detail, Edit, EditKind
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.attention import expand, soft_capped, uncapped
from lockstep.workbench.diagnosis.operations.facts import UNIT
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Share of the error that a hypothesis may leave in the sample to be made whole, and to be one of a pair.
_NEAR, _PARTLY = 0.5, 0.97
#: Hypotheses of which pairs are tried.
_PAIRED = 24


@dataclass(frozen=True, slots=True)
class Trial:
    """An edit with what it changes, and the numbers that were solved for it."""

    edits: tuple[Edit, ...]
    changes: Changes
    numbers: int = 0
    tolerance: float = 0.0
    grown: float = 1.0


def _one(place: str, kind: EditKind, detail: Detail, changes: Changes, numbers: int = 0) -> Trial:
    return Trial((Edit(place, kind, detail),), changes, numbers)


def likely(site: Site) -> Iterator[Variant]:
    """What engines do: another scale, other rows of the cache, heads, masks, functions; numbers solved for."""
    if _judged(site):
        tree = AttentionTree(site)
        yield from _tried(tree, _likely(tree), [])
        for choice in head_choices(tree):
            yield _chosen(tree, choice)


def unlikely(site: Site) -> Iterator[Variant]:
    """Anything that may be done to any tensor of the tree; then two edits at once."""
    if not _judged(site):
        return
    tree = AttentionTree(site)
    partly: list[tuple[float, Trial]] = []
    yield from _tried(tree, _ranges(tree), [])
    yield from _tried(tree, _tensors(tree), partly)
    for choice in query_choices(tree):
        yield _chosen(tree, choice)
    for _ in _tried(tree, _likely(tree), partly):
        pass  # none of them fits alone: what they leave is what counts
    partly.sort(key=lambda one: one[0])
    yield from _tried(tree, _pairs([trial for _, trial in partly[:_PAIRED]]), [])


def _judged(site: Site) -> bool:
    return site.deviation is not None and all(part.fits for part in site.parts)


def _tried(
    tree: AttentionTree, trials: Iterable[Trial], partly: list[tuple[float, Trial]]
) -> Iterator[Variant]:
    known: list[Array] = []
    for trial in trials:
        outs = tree.outs(trial.changes, _PARTLY)
        if outs is None:
            continue
        left = tree.left_by(outs)
        if not left < _PARTLY:
            continue
        partly.append((left, trial))
        if left > _NEAR:
            continue
        flat = np.concatenate([np.nan_to_num(out).ravel() for out in outs])
        if any(np.allclose(flat, one, rtol=1e-7, atol=1e-12) for one in known):
            continue
        known.append(flat)
        if (made := tree.whole(trial.changes, trial.grown)) is not None:
            unseen = "allowed" in trial.changes and any(_hides_all(trial.changes, one) for one in tree.sample)
            yield _variant(tree.site, replace(trial, numbers=trial.numbers + unseen), *made)


def _hides_all(changes: Changes, one: Given) -> bool:
    """Whether some query sees no key, so that what it gives is taken from what came out."""
    allowed = changes["allowed"](one.allowed.astype(np.float64), one)
    return bool((one.allowed.any(-1) & ~allowed.any(-1)).any())


def _variant(site: Site, trial: Trial, outs: list[Array], noises: list[Array]) -> Variant:
    words = told(site, trial.edits)
    return Variant(
        words.name, words.kind, words.text, words.fitted, outs, trial.numbers, trial.tolerance, noises
    )


# --- single edits -------------------------------------------------------------------------------------------


def _likely(tree: AttentionTree) -> Iterator[Trial]:
    site, unit = tree.site, tree.site.facts.unit
    yield from _scales(tree)
    yield from _rows(tree)
    for detail, changes in masks_as_numbers() if 0 in tree.wrong else ():
        yield _one("hidden", "number", detail, changes)
    for detail, change in masks(max(len(one.key_at) for one in tree.given)):
        yield _one("allowed", "map", detail, {"allowed": change})
    for detail, change in overwritten(tree.given):
        yield _one("allowed", "map", detail, {"allowed": change})
    yield from _packed_together(tree)
    for detail, form in sink_forms(site) if site.operation != "scores" else ():
        yield _one("sinks", "function", detail, {"softmax": partial(_of_form, form)})
    for detail, change in softmaxes() if tree.site.operation != "scores" else ():
        yield _one("softmax", "function", detail, {"softmax": change})
    for detail, change, tolerance in coarse_softmaxes(unit) if tree.site.operation != "scores" else ():
        grown = UNIT[str(detail[2])] / unit
        edit = Edit("softmax", "function", detail)
        yield Trial((edit,), {"softmax": change}, 0, tolerance, grown)
    yield from _coarse_scores(tree)
    for place, detail, changes in rotations_inside(tree):
        yield _one(place, "applied", detail, changes)
    for detail, tensors in other_queries(site):
        yield _one("q", "operand", detail, {"q": queries_of(tensors)})
    yield from _biases(tree)
    yield from _other_sequences(tree)
    yield from _numbers(tree)
    yield from _row_maps(tree)


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
    roles = ("k", "v") if tree.context else ("k",)
    operands = {role: dict(other_rows(tree.site, role)) for role in roles}
    for detail in dict.fromkeys(detail for role in roles for detail in operands[role]):
        changes = {role: in_place(operands[role][detail]) for role in roles if detail in operands[role]}
        yield from _of_roles("operand", detail, changes, ROWS)
    if tree.context:
        yield _one("k+v", "operand", ("role", "exchanged"), exchanged_roles(tree.site))


def _row_maps(tree: AttentionTree) -> Iterator[Trial]:
    """Rows of the cache in another order, lost, or scaled."""
    index = {role: _key_maps(role, tree) for role in (("k", "v") if tree.context else ("k",))}
    for detail in index["k"]:
        yield from _of_roles("map", detail, {role: index[role][detail] for role in index}, ROWS)
    for role in index:
        for rows in ROWS:
            yield from _solved_rows(tree, role, rows)


def _solved_rows(tree: AttentionTree, role: str, rows: str) -> Iterator[Trial]:
    """Rows of the cache with one factor, or cut off at one number."""

    def scaled(by: float) -> Changes:
        return {role: of_rows(lambda x, g: x * by, rows)}

    def cut(most: float) -> Changes:
        return {role: of_rows(lambda x, g: np.clip(x, -most, most), rows)}

    by = solved(tree, scaled, list(np.geomspace(0.03, 30, 25)))
    yield _one(role, "number", ("scaled", fits.simple(by), rows), scaled(fits.simple(by)), 1)
    top = max(float(np.abs(one.k if role == "k" else one.v).max(initial=0.0)) for one in tree.sample)
    if top > 0:
        most = solved(tree, cut, [top * x for x in np.geomspace(0.05, 1, 20)])
        yield _one(role, "number", ("cut_off", fits.simple(most), rows), cut(fits.simple(most)), 1)


def _ranges(tree: AttentionTree) -> Iterator[Trial]:
    """Single rows, or ranges of them, that hold what is another layer's, sequence's, or nothing."""
    roles = ("k", "v") if tree.context else ("k",)
    every: dict[str, dict[Detail, Change]] = {}
    for role in roles:
        found = {detail: in_place(tensors) for detail, tensors in other_rows(tree.site, role)}
        every[role] = {**found, ("scaled", 0.0): lambda x, g: 0 * x}
        for by in (1, -1, 2, -2):
            every[role]["rolled", "key", float(by)] = partial(_rolled, by)
    keys = max(len(one.key_at) for one in tree.given)
    for detail in dict.fromkeys(detail for role in roles for detail in every[role]):
        changes = {role: every[role][detail] for role in roles if detail in every[role]}
        kind: EditKind = "map" if detail[0] in ("scaled", "rolled") else "operand"
        yield from _of_roles(kind, detail, changes, list(row_ranges(keys)))
        for rows in spans(keys):
            some = {role: of_rows(change, rows) for role, change in changes.items()}
            yield _one("+".join(some), kind, (*detail, rows), some)


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
            yield _one("+".join(roles), kind, (*detail, rows), some)


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

    if tree.context:
        for seq in sorted({one.seq for one in passes}):
            yield _one("context", "map", ("other_sequence", float(seq)), {"context": of(seq)})


def _packed_together(tree: AttentionTree) -> Iterator[Trial]:
    """The keys and values of the sequences of the step before one's own, as in a row that has no mask between them."""
    if not tree.context or len({one.seq for one in tree.site.taps.passes}) < 2:
        return
    before = {role: packed_before(tree.site, role) for role in ("k", "v")}
    if any(x is not None and np.isfinite(x).all() for x in before["k"]):
        changes = {role: in_front(tensors) for role, tensors in before.items()}
        changes["allowed"] = seen_before(before["k"])
        yield _one("allowed", "map", ("other_sequences",), changes)


def _biases(tree: AttentionTree) -> Iterator[Trial]:
    """What may be added to the scores: linear in the distance (ALiBi, arXiv:2108.12409), in positions."""
    slopes = np.array(paper_slopes(tree.site, tree.given[0].heads))[:, None, None]
    yield _one("scores", "applied", ("alibi",), {"scores": lambda s, g: s - slopes * g.far})
    for sign in (1.0, -1.0):
        yield _one("scores", "applied", ("distance", sign), {"scores": partial(_plus_distance, sign)})


def _plus_distance(by: float, scores: Array, given: Given) -> Array:
    return np.asarray(scores + by * given.far)


def _tensors(tree: AttentionTree) -> Iterator[Trial]:
    """Anything that may be done to a tensor."""
    points = ("context", "values", "v", "probs", "scores", "keys", "k", "q")
    first = 0 if tree.context else 4 if tree.site.operation == "scores" else 3
    for point in points[first:]:
        for detail, change in tensor_edits(point, tree.site.facts.unit):
            if point == "q":
                change = partial(_of_all_queries, tree, change)
            grown = UNIT.get(str(detail[-1]), 0.0) / tree.site.facts.unit if detail[0] == "rounded" else 1.0
            yield Trial((Edit(point, "map", detail),), {point: change}, grown=max(grown, 1.0))


def _of_all_queries(tree: AttentionTree, change: Change, q: Array, given: Given) -> Array:
    """A change of the queries of the whole pass, of which some are asked for."""
    whole = tree.given[given.part]
    return change(whole.q, whole)[given.rows]


def _pairs(trials: Sequence[Trial]) -> Iterator[Trial]:
    """Two edits at different points."""
    for one, two in combinations(trials, 2):
        if not one.changes.keys() & two.changes.keys():
            changes = {**one.changes, **two.changes}
            yield Trial((*one.edits, *two.edits), changes, one.numbers + two.numbers)


# --- numbers that are solved for -----------------------------------------------------------------------------


def _scales(tree: AttentionTree) -> Iterator[Trial]:
    """Another factor in the place of the right one."""
    scale = tree.site.facts.model.scale

    def by(value: float) -> Changes:
        return {"scores": lambda s, g: soft_capped(uncapped(s, tree.cap) * (value / scale), tree.cap)}

    for value, words in meanings(tree.site, scale):
        yield _one("scale", "number", (repr(value), words), by(value))
    value = solved(tree, by, [scale * x for x in np.geomspace(0.01, 100, 61)])
    yield _one("scale", "number", (repr(value), ""), by(value), 1)


def _numbers(tree: AttentionTree) -> Iterator[Trial]:
    top = max(float(np.abs(one.raw).max(initial=0.0)) for one in tree.sample)

    def capped(cap: float) -> Changes:
        return {"scores": lambda s, g: soft_capped(uncapped(s, tree.cap), cap)}

    def scaled(by: float) -> Changes:
        return {"context": lambda c, g: c * by}

    if tree.cap:
        yield _one("scores", "applied", ("uncapped", tree.cap), capped(0.0))
    for cap in (5.0, 10.0, 20.0, 30.0, 50.0):
        yield _one("scores", "applied", ("capped", cap), capped(cap))
    if top > 0:
        cap = solved(tree, capped, [top * x for x in np.geomspace(0.03, 100, 30)])
        yield _one("scores", "applied", ("capped", cap), capped(cap), 1)
    if tree.site.operation != "scores":
        yield from _sinks(tree)
    if tree.context:
        by = solved(tree, scaled, list(np.geomspace(0.02, 50, 40)))
        yield _one("context", "number", ("scaled", by), scaled(by), 1)


def _sinks(tree: AttentionTree) -> Iterator[Trial]:
    """A number of each head's own in the denominator (arXiv:2309.17453): what came out is less than it should be."""
    logs: list[list[float]] = [[] for _ in range(tree.given[0].heads)]
    for one in tree.sample:
        right, seen = (by_head(tree.site, x) for x in (one.right, one.seen))
        kept = (right * seen).sum(-1) / np.maximum((right**2).sum(-1), 1e-300)
        total = np.logaddexp.reduce(one.scores, axis=-1)
        good = (kept > 1e-6) & (kept < 1) & np.isfinite(total)
        found = total + np.log(1 / np.where(good, kept, 0.5) - 1)
        for head, values in enumerate(found):
            logs[head].extend(values[good[head]].tolist())
    if any(logs):
        more = np.array([np.exp(np.median(values)) if values else 0.0 for values in logs])
        alike = float(np.ptp(more)) <= 1e-3 * float(more.max())
        detail: Detail = ("sink", *map(float, more[:1] if alike else more))
        changes: Changes = {"softmax": lambda s, g: softmax_with(s, more[:, None, None])}
        yield _one("softmax", "number", detail, changes, len(detail) - 1)


def solved(tree: AttentionTree, changes: Callable[[float], Changes], grid: Sequence[float]) -> float:
    """The number whose changes leave least in the sample: of a grid that grows by one factor, then between."""
    left = [tree.left(changes(value)) for value in grid]
    best, least = float(grid[int(np.argmin(left))]), min(left)
    ratio = float(grid[1] / grid[0])
    if not least < _PARTLY:
        return best
    for _ in range(24):
        ratio **= 0.6
        for value in (best / ratio, best * ratio):
            if (rest := tree.left(changes(value))) < least:
                best, least = value, rest
    return best


def _chosen(tree: AttentionTree, choice: Choice) -> Variant:
    edit, outs, noises, numbers = choice
    return _variant(tree.site, Trial((edit,), {}, numbers), outs, noises)
