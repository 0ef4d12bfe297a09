"""Hypotheses about the experts' products: rows that went through another expert or none, a stack of gate and up that
was read otherwise than it lies, biases that were left out or added too often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.routing import routed
from lockstep.workbench.diagnosis.hypotheses.fits import factor, named, simple
from lockstep.workbench.diagnosis.hypotheses.functions import SPLITS
from lockstep.workbench.diagnosis.hypotheses.passes import whose_largest
from lockstep.workbench.diagnosis.hypotheses.roundings import integers
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.experts import hit
from lockstep.workbench.diagnosis.operations.shares import weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Of a row's error, the share that the right one of the experts leaves at most.
_LEAVES = 0.1
#: Multiplications up to which every expert is tried on a row of each.
_AFFORDABLE = 1 << 32
#: Rows of a block that one expert's matrix is multiplied by.
_BLOCKS = (2, 4, 8, 16, 32, 64, 128)
#: How checkpoints call gate and up.
_SIBLINGS = ((".gate_proj.", ".up_proj."), (".w1.", ".w3."))
#: How a stack of both may be read: what of it is taken for gate and for up.
_LAYOUTS: tuple[tuple[str, tuple[str, str], str], ...] = (
    (
        "stack_read_as_halves", ("first_half_woven", "second_half_woven"),
        "halves of the experts' stack are read as gate and up, whose rows lie in turn there",
    ),
    (
        "stack_read_in_turn", ("even_columns", "odd_columns"),
        "rows of the experts' stack are read in turn as gate and up, which lie one behind the other there",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """A rank's part of an expert's matrix [out, in], and of its bias [out] (0: none)."""

    matrix: NDArray[Any]
    bias: Array | float

    def __call__(self, rows: Array) -> Array:
        """rows [N, in] -> [N, out]."""
        return np.asarray(rows @ self.matrix.astype(np.float64).T + self.bias)


def other_experts(site: Site) -> Iterator[Variant]:
    """Rows through another expert than the one that was chosen, or through none."""
    experts, deviation = site.facts.model.experts, site.deviation
    if experts is None or deviation is None or site.seen.shape != site.expected.shape:
        return
    wrong, ids = deviation.scopes[0].any(-1), site.inputs["ids"]
    if len(hit(ids[wrong])) * experts.count * site.expected.shape[-1] * _rows(site).shape[-1] > _AFFORDABLE:
        return
    moved = {one: _instead(site, one, wrong & (ids == one), experts.count) for one in hit(ids[wrong])}
    known = {one: other for one, other in moved.items() if other is not None}
    if not known:
        return
    through = {one: found for one, other in known.items() if (found := _product(site, other)) is not None}
    predicted = np.where(np.isin(ids, list(known))[..., None], 0.0, site.expected) + _made(site, through)
    yield moved_experts(known, experts.count, predicted)


def moved_experts(moved: Mapping[int, int], count: int, predicted: Array) -> Variant:
    """Rows of experts that went through others of so many, -1: through none."""
    fitted = {"experts": {str(one): other for one, other in moved.items()}}
    steps, sums = _steps_and_sums(moved, count)
    choices = 1 if steps and min(len(steps), len(sums)) == 1 else len(moved)
    return Variant(
        _name(moved, count), "experts", _in_words(moved, count), fitted, predicted, parameters=choices - 1
    )


def beyond_capacity(site: Site) -> Iterator[Variant]:
    """Rows that come after as many others of their expert in the same pass are zeros, be it a pass of one sequence or
    of all."""
    if site.deviation is None or site.seen.shape != site.expected.shape:
        return
    lost = site.deviation.scopes[0].any(-1) & ~site.seen.any(-1)
    passes = {
        "all sequences": [(row.step, 0) for row in site.rows],
        "a sequence": [(row.step, row.seq) for row in site.rows],
    }
    for whose, of in passes.items() if lost.any() else ():
        place = _place_among(site.inputs["ids"], of)
        capacity = int(place[lost].min())
        text = (
            f"an expert takes {capacity} rows of a pass of {whose} at most: those beyond its capacity are dropped, "
            "zeros"
        )
        predicted = np.where((place >= capacity)[..., None], 0.0, site.expected)
        yield Variant("experts_capacity", "experts", text, {"capacity": capacity}, predicted, 1)


def weighed_rows(site: Site) -> Iterator[Variant]:
    """What experts read is multiplied by their weights, which their outputs should be alone."""
    weights = site.rows_of(site.near("mlp.topk_weights"), site.rank)
    plain = site.seen.shape == site.expected.shape and "bias" not in site.weights
    if weights is None or not plain or weights.shape != site.expected.shape[:-1]:
        return
    text = "what experts read is multiplied by their weights"
    noise = 3 * site.facts.unit * np.abs(weights[..., None] * site.expected)
    yield Variant(
        "expert_rows_weighed", "expert_input", text, {}, weights[..., None] * site.expected, noise=noise
    )


def rows_scaled(site: Site) -> Iterator[Variant]:
    """Rows that experts read with the scale of another token's row, as codes that were sent apart from their scales."""
    x, ids, deviation = site.inputs["x"], site.inputs["ids"], site.deviation
    if deviation is None or site.seen.shape != site.expected.shape or x.ndim != 2 or not x.size:
        return
    through = {one: p.matrix for one in hit(ids, site.held) if (p := _product(site, one)) is not None}
    rest, wrong = site.expected - routed(x, through, ids), np.flatnonzero(deviation.scopes[0].any((-1, -2)))
    for how, read in (("", x), (" of eight bits", integers(x, 8, None).astype(np.float64))):
        made = routed(read, through, ids)
        by = factor(site.seen - rest, made, (1, 2))
        each = by[wrong].ravel()
        if not np.ptp(each) or not (whose := whose_largest(site, x, wrong, by.ravel())):
            continue
        text = (
            f"the codes{how} that go into the experts are read with the scale of {whose}: rows are "
            f"{each.min():.4g} to {each.max():.4g} times what they should be"
        )
        yield Variant("expert_rows_scaled", "experts", text, {"scale_of": whose}, made * by + rest)


def products_scaled(site: Site) -> Iterator[Variant]:
    """The products of all experts times one number, or those of each expert times its own."""
    x, ids, deviation = site.inputs["x"], site.inputs["ids"], site.deviation
    if deviation is None or site.seen.shape != site.expected.shape or not np.isfinite(site.seen).all():
        return
    through = {
        one: ExpertProduct(p.matrix, 0.0)
        for one in hit(ids, site.held)
        if (p := _product(site, one)) is not None
    }
    wrong = deviation.scopes[0].any(-1)
    if not through or not wrong.any() or not x.size:
        return
    made = _made(site, through)
    rest, known = site.expected - made, {one: wrong & (ids == one) for one in through}
    own = {
        one: simple(float(factor((site.seen - rest)[at], made[at]))) for one, at in known.items() if at.any()
    }
    by = simple(float(factor((site.seen - rest)[wrong], made[wrong])))
    text = f"the experts' product is {named(by)} times what it should be"
    yield Variant("experts_scaled", "experts", text, {"factor": by}, rest + by * made, 1)
    if len(own) > 1:
        each = sum(np.where(ids == one, by, 0.0) for one, by in own.items())
        each = np.where(np.isin(ids, list(own)), each, 1.0)[..., None]
        text = (
            f"the products of the experts are off by a factor of each expert, {min(own.values()):.4g} to "
            f"{max(own.values()):.4g}, as by its scale: the first, {min(own)}, is {named(own[min(own)])} times what it "
            "should be"
        )
        yield Variant(
            "experts_scaled_apart", "experts", text, {"factors": len(own)}, rest + each * made, len(own)
        )


def rows_in_blocks(site: Site) -> Iterator[Variant]:
    """Rows of a pass are sorted by their expert and go through it in blocks of so many; a block that two experts meet
    in goes through the first one."""
    if site.deviation is None or site.seen.shape != site.expected.shape:
        return
    ids, wrong = site.inputs["ids"], site.deviation.scopes[0].any((-1, -2))
    for size in _BLOCKS:
        of_block = _by_blocks(ids, np.array([row.step for row in site.rows]), size)
        if not np.array_equal((of_block != ids).any(-1), wrong):
            continue
        predicted, rows = np.zeros_like(site.expected), _rows(site)
        for one in hit(of_block):
            product = _product(site, one)
            if product is not None:
                predicted[of_block == one] = product(rows[of_block == one])
        text = (
            f"rows go through the experts in blocks of {size}, sorted by their expert: a block in which two experts "
            "meet goes through that of its first row"
        )
        yield Variant("expert_blocks_unpadded", "experts", text, {"block": size}, predicted)


def _by_blocks(ids: Array, steps: NDArray[np.int64], size: int) -> Array:
    """[N, S]: the expert of the first row of each row's block."""
    found = ids.copy()
    for step in np.unique(steps):
        flat = ids[steps == step].ravel()
        order = np.argsort(flat, kind="stable")
        moved = flat.copy()
        moved[order] = flat[order[np.arange(len(flat)) // size * size]]
        found[steps == step] = moved.reshape(-1, ids.shape[1])
    return found


def _place_among(ids: Array, passes: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Of each row [N, S] how many of the same expert and pass come before it."""
    met: Counter[tuple[tuple[int, int], float]] = Counter()
    found = np.zeros(ids.shape, dtype=np.int64)
    for (token, slot), expert in np.ndenumerate(ids):
        key = passes[token], float(expert)
        found[token, slot] = met[key]
        met[key] += 1
    return found


def other_matrix(site: Site) -> Iterator[Variant]:
    """Gate's matrices of all experts in place of up's, or the reverse; or rows of both."""
    name, other = site.weights.get("weight", ""), _sibling(site)
    if not other or site.seen.shape != site.expected.shape:
        return
    text = f"{other.split('.')[-2]} of each expert is used instead of {name.split('.')[-2]}"
    yield from _through_all(
        site, "weight_of_sibling", text, {"weight": name, "is": other}, lambda own, its: its
    )
    is_gate = any(gate in name for gate, _ in _SIBLINGS)
    for found, reads, text in _LAYOUTS:
        split = SPLITS[reads[0 if is_gate else 1]]

        def rows(own: ExpertProduct, its: ExpertProduct, split: Callable[..., Any] = split) -> ExpertProduct:
            gate, up = (own, its) if is_gate else (its, own)
            width = len(own.matrix)
            biases = [np.broadcast_to(one.bias, (1, width)) for one in (gate, up)]
            return ExpertProduct(split(gate.matrix.T, up.matrix.T).T, split(*biases)[0])

        yield from _through_all(site, found, text, {"weight": name, "with": other}, rows)


def biases_of_experts(site: Site) -> Iterator[Variant]:
    """Biases left out, those of other experts, or, of a sum over the ranks, added by each of them."""
    name = weight_names(site.tap, "experts", site.facts).get("bias", "")
    if not name or site.seen.shape != site.expected.shape:
        return
    ids, there = site.inputs["ids"], "bias" in site.weights
    added = np.zeros_like(site.expected)
    for one in hit(ids):
        bias = _bias(site, name.format(one))
        added[ids == one] = bias
    added = np.where(_held(site), added, 0.0)
    if there:
        yield Variant(
            "expert_bias_missing",
            "bias",
            "the experts' bias is not added",
            {"bias": name},
            site.expected - added,
        )
        yield from _biases_of_others(site, name)
        yield from _biases_otherwise(site, name)
    else:
        text = (
            "the bias of the experts' sum is added by each rank that shares an expert, not by the first alone"
        )
        yield Variant("expert_bias_on_every_rank", "bias", text, {"bias": name}, site.expected + added)


def _biases_of_others(site: Site, name: str) -> Iterator[Variant]:
    """Rows with the bias of another expert than the one that was chosen, by the checkpoint's `name` of biases."""
    experts, deviation = site.facts.model.experts, site.deviation
    if experts is None or deviation is None:
        return
    ids, wrong = site.inputs["ids"], deviation.scopes[0].any(-1)
    every = {one: np.asarray(_bias(site, name.format(one))) for one in range(experts.count)}
    moved, predicted = dict[int, int](), site.expected.copy()
    for one in hit(ids[wrong]):
        here = wrong & (ids == one)
        error = (site.seen - site.expected)[here].mean(0)
        left = {other: float(np.linalg.norm(error - (bias - every[one]))) for other, bias in every.items()}
        nearest = min(left, key=left.__getitem__)
        if nearest != one and left[nearest] <= _LEAVES * float(np.linalg.norm(error)):
            moved[one] = nearest
            predicted[ids == one] += every[nearest] - every[one]
    if moved:
        text = f"rows get the bias of another expert than the chosen one: {_others_in_words(moved, experts.count)}"
        fitted = {"bias": name, "experts": {str(one): other for one, other in moved.items()}}
        yield Variant("expert_bias_of_another", "bias", text, fitted, predicted)


def _biases_otherwise(site: Site, name: str) -> Iterator[Variant]:
    """Up's biases in place of gate's, or the reverse; or a stack of both that is read otherwise than it lies."""
    other = _other_of_pair(name)
    is_gate = any(gate in name for gate, _ in _SIBLINGS)
    ids = site.inputs["ids"]
    biases = {one: (_bias(site, name.format(one)), _bias(site, other.format(one))) for one in hit(ids)}
    if not other or any(np.ndim(one) == 0 for pair in biases.values() for one in pair):
        return
    ways: list[tuple[str, str, Callable[..., Any]]] = [
        ("expert_bias_of_sibling", f"the bias is {other.split('.')[-2]}'s", lambda gate, up: up if is_gate else gate),
        *(
            (f"expert_bias_{found}", text.replace("experts' stack", "experts' stack of biases"),
             SPLITS[reads[0 if is_gate else 1]])
            for found, reads, text in _LAYOUTS
        ),
    ]  # fmt: skip
    for found, text, made in ways:
        predicted = site.expected.copy()
        for one, (own, its) in biases.items():
            predicted[ids == one] += made(*((own, its) if is_gate else (its, own))) - own
        predicted = np.where(_held(site), predicted, 0.0)
        yield Variant(found, "bias", text, {"bias": name, "with": other}, predicted)


def _others_in_words(moved: Mapping[int, int], count: int) -> str:
    steps, _ = _steps_and_sums(moved, count)
    if len(moved) > 1 and len(steps) == 1:
        return f"that of the expert {steps.pop()} after it, of {count}"
    return ", ".join(f"those of {one} that of {other}" for one, other in list(moved.items())[:6])


def _through_all(
    site: Site,
    name: str,
    text: str,
    fitted: Mapping[str, object],
    made: Callable[[ExpertProduct, ExpertProduct], ExpertProduct],
) -> Iterator[Variant]:
    """All rows through what is made of their expert's matrix and its sibling, where the checkpoint has both."""
    found = {
        one: made(own, its)
        for one in hit(site.inputs["ids"])
        if (own := _product(site, one)) is not None
        and (its := _product(site, one, _sibling(site))) is not None
    }
    if found:
        yield Variant(name, "weight", text, fitted, np.where(_held(site), _made(site, found), 0.0))


def _sibling(site: Site) -> str:
    """The name of up's matrix at gate, of gate's at up; "" elsewhere."""
    return _other_of_pair(site.weights.get("weight", ""))


def _other_of_pair(name: str) -> str:
    """The name of up's tensor for gate's, of gate's for up's; "" of others."""
    pairs = (pair for one in _SIBLINGS for pair in (one, one[::-1]))
    return next((name.replace(*pair) for pair in pairs if pair[0] in name), "")


def _held(site: Site) -> NDArray[np.bool_]:
    """Which rows [N, S, 1] are of experts that the rank has."""
    return np.asarray(np.abs(site.expected).max(-1, keepdims=True, initial=0.0) > 0)


def _made(site: Site, through: Mapping[int, ExpertProduct]) -> Array:
    """Each token's rows through what is given for its experts; zeros of others."""
    ids, rows, out = site.inputs["ids"], _rows(site), np.zeros_like(site.expected)
    for one, product in through.items():
        here = ids == one
        out[here] = product(rows[here])
    return out


def _rows(site: Site) -> Array:
    """What each token's experts read, [N, S, in]."""
    x, ids = site.inputs["x"], site.inputs["ids"]
    return np.broadcast_to(x[:, None], (*ids.shape, x.shape[-1])) if x.ndim == 2 else x


def _product(site: Site, expert: int, name: str = "") -> ExpertProduct | None:
    """The rank's part of an expert; None of none."""
    name = name or site.weights["weight"]
    found = site.facts.weight(name.format(expert)) if expert >= 0 else None
    if found is None:
        return None
    found = found if site.span is None else found[site.span]
    found = found if site.columns is None else found[:, site.columns]
    biased = name.replace(".weight", ".bias").format(expert) if "bias" in site.weights else ""
    return ExpertProduct(found, _bias(site, biased))


def _bias(site: Site, name: str) -> Array | float:
    """The rank's part of that bias; 0 where there is none."""
    found = site.facts.vector(name) if name else None
    if found is None:
        return 0.0
    return found if site.span is None else found[site.span]


def _instead(site: Site, expert: int, rows: NDArray[np.bool_], count: int) -> int | None:
    """The expert through which the rows of another went, -1: none; None where no expert gives what was seen."""
    token, slot = (int(one[0]) for one in np.nonzero(rows))
    seen, x = site.seen[token, slot], _rows(site)[token, slot]
    error = float(np.linalg.norm(seen - site.expected[token, slot]))
    if not seen.any():
        return -1
    left = {
        other: float(np.linalg.norm(seen - product(x)))
        for other in range(count)
        if other != expert
        and (product := _product(site, other)) is not None
        and product.matrix.shape[1] == len(x)
    }
    best = min(left, key=left.__getitem__, default=None)
    return best if best is not None and left[best] <= _LEAVES * error else None


def _steps_and_sums(moved: Mapping[int, int], count: int) -> tuple[set[int], set[int]]:
    """How far on the experts are that rows went through, of so many; and what both numbers add up to."""
    through = {one: other for one, other in moved.items() if other >= 0}
    return {(other - one) % count for one, other in through.items()}, {a + b for a, b in through.items()}


def _name(moved: Mapping[int, int], count: int) -> str:
    steps, sums = _steps_and_sums(moved, count)
    if not steps:
        return "experts_lost"
    if len(moved) > 1 and steps == {1}:
        return "experts_counted_from_1"
    return "experts_reversed" if len(moved) > 2 and len(sums) == 1 else "experts_exchanged"


def _in_words(moved: Mapping[int, int], count: int) -> str:
    lost = [one for one, other in moved.items() if other < 0]
    through = {one: other for one, other in moved.items() if other >= 0}
    texts = []
    if through:
        steps, sums = _steps_and_sums(moved, count)
        if len(through) > 1 and len(steps) == 1:
            texts.append(f"rows go through the expert {steps.pop()} after the chosen one, of {count}")
        elif len(through) > 2 and len(sums) == 1:
            texts.append(
                f"rows go through the experts in reverse order: {sums.pop()} less the chosen one's number"
            )
        else:
            reported_of = ", ".join(f"{one} through {other}" for one, other in list(through.items())[:6])
            texts.append(f"rows go through another expert than the chosen one: those of {reported_of}")
    if lost:
        numbers = ", ".join(map(str, lost[:8]))
        texts.append(f"rows of expert{'s' * (len(lost) > 1)} {numbers} are computed by nobody: zeros")
    return "; ".join(texts)
