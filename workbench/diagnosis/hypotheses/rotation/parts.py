"""A rotation that is right in some pairs or elements of each head and another in the rest: scopes along a head."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.rotation.conventions import RIGHT, Convention
from lockstep.workbench.diagnosis.hypotheses.rotation.frequencies import pairs_in_words
from lockstep.workbench.diagnosis.hypotheses.rotation.phases import Phases
from lockstep.workbench.diagnosis.hypotheses.rotation.positions import PositionRule, rules
from lockstep.workbench.diagnosis.hypotheses.rotation.rotated import Rotated
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

Pairs = NDArray[np.intp]


def partial_rotations(site: Site) -> Iterator[Variant]:
    """Some pairs turned and the others not; some elements of each head rotated as a head of their own."""
    r = Rotated.of(site)
    if r is None:
        return
    phases = r.phases(RIGHT, r.factor)
    as_it_was, as_right = phases.error(np.zeros_like(phases.c)).sum(0), r.right_errors.sum(0)
    still = as_it_was < as_right
    if still.any() and as_it_was.sum() > 4 * np.minimum(as_it_was, as_right).sum():
        chosen, count = np.flatnonzero(still), len(still)
        predicted = r.turned(np.where(still, 0.0, r.phase))
        are = "is" if len(chosen) == 1 else "are"
        text = f"{pairs_in_words(chosen.tolist(), count)} {are} not rotated"
        yield r.variant("rope_partial", "rope", text, {"pairs": chosen.tolist()}, predicted)
    change = np.abs(r.wrong_part(r.seen) - r.wrong_part(r.x)).max((0, 1))
    moved = np.asarray(change) > 1e-6 * np.abs(r.x).max()
    yield from _smaller_heads(r, moved)
    yield from _fewer_pairs(r, moved)


def _fewer_pairs(r: Rotated, moved: NDArray[np.bool_]) -> Iterator[Variant]:
    """Of channels that turn with their neighbours the first alone rotated, by the frequencies of a head as narrow."""
    pairs = r.x.shape[-1] // 2
    turned = np.asarray(moved.reshape(2, pairs).any(0))
    count = int(turned.sum())
    if not r.site.facts.model.neighbours or not 0 < count < pairs or not turned[:count].all():
        return
    turns = np.zeros(pairs)
    turns[:count] = r.model.rope_theta ** (-np.arange(count) / count)
    text = f"the first {2 * count} of the {2 * pairs} channels that rotate do, by the frequencies of so narrow a head"
    predicted = r.turned(r.positions[:, None, None] * turns)
    yield r.variant("rope_partial", "rope", text, {"first": 0, "elements": 2 * count}, predicted)


def _smaller_heads(r: Rotated, moved: NDArray[np.bool_]) -> Iterator[Variant]:
    """Only the first, or the last, elements of each head rotated, as a head of their own."""
    width, theta = r.x.shape[-1], r.model.rope_theta
    turned = np.flatnonzero(moved)
    if moved.all() or not len(turned):
        return
    first, dims = int(turned[0]), int(turned[-1] - turned[0]) + 1
    dims += dims % 2
    if first + dims > width:
        return
    part = slice(first, first + dims)
    spacings = {
        "": theta ** (-np.arange(0, dims, 2) / dims),
        ", by the frequencies of the whole head": r.frequencies[..., : dims // 2],
    }
    for words, spacing in spacings.items():
        for form, how in (
            (RIGHT, ""),
            (Convention("neighbours", "neighbours"), "; pairs (2i, 2i+1) are rotated"),
        ):
            predicted = r.x.copy()
            predicted[..., part] = (
                form.rotate(r.x[..., part], r.positions[:, None, None] * spacing) * r.factor
            )
            text = f"only a part of each head is rotated, elements {first} to {first + dims - 1} of {width}{words}{how}"
            fitted = {"first": first, "elements": dims}
            yield r.variant("rope_partial", "rope", text, fitted, predicted, moved=True)


def positions_of_pairs(site: Site) -> Iterator[Variant]:
    """Some pairs rotated by other positions than the rest, as with sections for time, height and width (M-RoPE,
    arXiv:2409.12191). No single edit reaches sections: where they are cut is searched for."""
    r = Rotated.of(site)
    if r is None:
        return
    phases, count = r.phases(RIGHT, r.factor), r.x.shape[-1] // 2
    noise = r.site.parts[0].noise[..., r.order][r.sample][:, r.heads] ** 2
    allowed = 12**2 * (noise[..., :count] + noise[..., count:]).sum(1)
    chosen = np.flatnonzero((r.right_errors > allowed).any(0))
    if not 0 < len(chosen) < count or len(r.sample) < r.wrong.sum():
        return
    sections = _sections(r, phases, chosen)
    if len(sections) > 1 and all(_proportional(r, at) for _, at in sections):
        return  # other frequencies
    if any(not r.frequencies[..., pairs].any() for pairs, _ in sections):
        return  # pairs that do not turn are at no position
    phase, reported, free = r.phase + np.zeros((len(r.x), 1, 1)), [], 0
    fitted: dict[str, object] = {"pairs": chosen.tolist()}
    for pairs, at in sections:
        within = 1e-3 + 8 * r.noise / float(r.frequencies[..., pairs].max())
        known = next(iter(rules(r.places, at, r.wrong, within)), None)
        rule = known or PositionRule("", _some(r, at), at)
        phase[..., pairs] = rule.at[:, None, None] * r.frequencies[..., pairs]
        reported.append(
            f"{pairs_in_words(pairs.tolist(), count)} are rotated by other positions than the rest: {rule.text}"
        )
        fitted |= dict(rule.fitted)
        free += 0 if known else int(r.wrong.sum())
    yield r.variant("positions_of_pairs", "positions", "; ".join(reported), fitted, r.turned(phase), free)


def _some(r: Rotated, at: Array) -> str:
    few = list(zip(r.positions, np.round(at, 6), strict=True))[:4]
    return ", ".join(f"{p:g} at {q + 0.0:.4g}" for p, q in few) + ", …"


def _sections(r: Rotated, phases: Phases, chosen: Pairs) -> list[tuple[Pairs, Array]]:
    """The wrong pairs, all together or in two sections, with the positions [N] of each: those that leave least."""
    cuts = [[chosen], *([chosen[:i], chosen[i:]] for i in range(1, len(chosen)))]
    found = []
    for sections in cuts:
        fits = [(pairs, _positions(r, phases, pairs)) for pairs in sections]
        rest = [
            phases.pairs(pairs).error(r.sampled(at[:, None, None] * r.frequencies[..., pairs])).sum()
            for pairs, at in fits
        ]
        found.append((float(sum(rest)), fits))
    least = min(left for left, _ in found)
    return next(fits for left, fits in found if left <= 4 * least)


def _positions(r: Rotated, phases: Phases, pairs: Pairs) -> Array:
    """The positions [N] by which these pairs were rotated; of tokens that are right, theirs."""
    at = r.positions.copy()
    turns = (
        r.sampled(r.frequencies)[..., pairs] if len(r.frequencies) == len(at) else r.frequencies[:, 0, pairs]
    )
    reach = 2 * float(r.positions.max()) + 64
    at[r.sample] = phases.pairs(pairs).positions(turns, r.positions[r.sample], reach, r.noise)[0]
    return at


def _proportional(r: Rotated, at: Array) -> bool:
    """Whether positions are the right ones times one number."""
    right = r.positions[r.wrong]
    by = float((at[r.wrong] * right).sum() / max(float((right * right).sum()), 1e-300))
    return bool(np.allclose(at[r.wrong], by * right, atol=0.05))
