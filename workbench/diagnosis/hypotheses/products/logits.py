"""Variants of logits that went through a sampler's processors before they were recorded: penalties, bans, filters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.fits import Mask, coefficients, named, simple
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Tokens of a context that llama.cpp and others look back to.
LOOK_BACK = (64, 128, 256)
#: A finite logit that hides a token lies this far below all others.
HIDDEN = 1000.0
#: Ids that are reported.
SHOWN = 8


def processed(site: Site) -> Iterator[Variant]:
    """Every processor that may have given what was seen."""
    part = site.parts[0]
    if site.deviation is None or not part.fits or not np.isfinite(part.expected).all():
        return
    hidden = _hidden(site)
    if hidden.any():
        yield from _removed(site, hidden)
    elif np.isfinite(part.seen).all():
        yield from _penalised(site)
        yield from _biased(site)


def _hidden(site: Site) -> Mask:
    """Which logits are minus infinity, or a finite number that stands for it."""
    seen, right = site.seen, site.expected
    least = np.nanmin(seen, initial=np.inf)
    return np.asarray(np.isneginf(seen) | ((seen == least) & (least < right.min() - HIDDEN)))


# --- tokens that cannot be chosen ------------------------------------------------------------------------


def _removed(site: Site, hidden: Mask) -> Iterator[Variant]:
    """The hidden logits as seen, all others right or divided by a temperature."""
    start = site.first_out
    rest = ~hidden & np.isfinite(site.seen)
    by = simple(float(coefficients(site.seen[rest], [site.expected[rest]])[0])) if rest.any() else 1.0
    cold = "" if by == 1 else f", and divided by {named(simple(1 / by))}, as by a temperature"
    predicted = np.where(hidden, site.seen, site.expected * by)
    counts = (~hidden).sum(1)
    filtered = _filter(site, hidden)
    every = np.flatnonzero(hidden.all(0)) + start
    wrong = hidden.any(1)
    fitted: dict[str, int | list[int]]
    if filtered:
        text = f"logits of all tokens but some are minus infinity: {filtered}"
        name, fitted = "logits_filtered", {"kept": int(counts.min())}
    elif (hidden[wrong] == hidden[wrong][0]).all():
        ids = (np.flatnonzero(hidden[wrong][0]) + start).tolist()
        when = "at every step" if wrong.all() else f"at {np.count_nonzero(wrong)} of {wrong.size} steps"
        text = (
            f"the logits of token ids {ids[:SHOWN]} are minus infinity {when}: these tokens are suppressed before the "
            "logits are recorded (a minimum length that masks the end of text, banned words, a mask of the vocabulary)"
        )
        name, fitted = "logits_suppressed", {"ids": ids[:SHOWN], "number": len(ids)}
    elif _within_context(site, hidden):
        text = (
            "logits of tokens that the context holds already are minus infinity: repeated tokens or n-grams are banned "
            "before the logits are recorded"
        )
        name, fitted = "logits_suppressed", {"ids": every[:SHOWN].tolist()}
    else:
        text = (
            f"{int(hidden.sum())} logits are minus infinity, other ones from step to step: tokens are masked before "
            "the logits are recorded (a grammar, or a filter of the sampler)"
        )
        name, fitted = "logits_suppressed", {"number": int(hidden.sum())}
    yield Variant(name, "head", text + cold, fitted, predicted, int(by != 1))


def _filter(site: Site, hidden: Mask) -> str:
    """Whether it is the likeliest tokens that are kept, and by which rule; "" where it is not."""
    start, size = site.first_out, site.expected.shape[1]
    whole = site.facts.weight(site.weights["weight"])
    right = site.expected
    if site.span is not None and whole is not None:
        right = product(site.inputs["x"], whole)
    kept = ~hidden
    if not kept.any(1).any():
        return ""
    own = right[:, start : start + size]
    limits = np.where(kept, own, np.inf).min(1)  # the least that is kept
    if (np.where(hidden, own, -np.inf).max(1) > limits).any():
        return ""
    there = kept.any(1)
    many = (right[there] >= limits[there, None]).sum(1)
    if len(set(many.tolist())) == 1 and there.all():
        return f"only the {many[0]} likeliest are kept (top-k)"
    powers = np.exp(right - right.max(1, keepdims=True))
    probs = powers / powers.sum(1, keepdims=True)
    mass = np.where(right >= limits[:, None], probs, 0.0).sum(1)[there]
    return f"only the likeliest are kept, of at least {mass.min():.3g} of the probability (top-p or min-p)"


# --- penalties ---------------------------------------------------------------------------------------------


def _contexts(site: Site) -> list[tuple[list[int], list[int]]]:
    """Of each row of logits, the tokens of the prompt and those generated so far, in order."""
    found = []
    for row in site.rows:
        passes = [one for one in site.taps.passes if one.seq == row.seq and one.step <= row.step]
        prompt = [one.token for each in passes[:1] for one in each.rows if one.position <= row.position]
        found.append((prompt, [one.token for each in passes[1:] for one in each.rows]))
    return found


def _counted(site: Site, contexts: Sequence[Sequence[int]]) -> Array:
    """How often each id stands in each row's context, [rows, ids of this rank]."""
    start, size = site.first_out, site.expected.shape[1]
    counts = np.zeros(site.expected.shape)
    for row, ids in enumerate(contexts):
        inside = [token - start for token in ids if start <= token < start + size]
        np.add.at(counts[row], inside, 1)
    return counts


def _which(site: Site) -> Iterator[tuple[str, Array]]:
    """Sets of tokens that processors look at, in words, with their counts."""
    contexts = _contexts(site)
    yield "of the prompt and of what was generated", _counted(site, [a + b for a, b in contexts])
    yield "that were generated", _counted(site, [b for _, b in contexts])
    yield "of the prompt", _counted(site, [a for a, _ in contexts])
    for many in LOOK_BACK:
        if any(len(a) + len(b) > many for a, b in contexts):
            yield f"of the last {many}", _counted(site, [(a + b)[-many:] for a, b in contexts])


def _within_context(site: Site, hidden: Mask) -> bool:
    return not (hidden & (_counted(site, [a + b for a, b in _contexts(site)]) == 0)).any()


def _penalised(site: Site) -> Iterator[Variant]:
    """Logits of tokens that were there before are made smaller."""
    seen, right = site.seen, site.expected
    off = np.abs(seen - right) > 12 * site.parts[0].noise
    for words, counts in _which(site):
        there = counts > 0
        if not there.any() or (off & ~there).any():
            continue
        forms: tuple[tuple[str, Callable[[Array], Array]], ...] = (
            ("divided by {} where they are positive and multiplied by it where negative", np.sign),
            ("divided by {}", np.ones_like),
        )
        for text, sign in forms:
            by = _base(seen[there], right[there], sign(right[there]))
            if by is not None:
                stated = f"the logits of tokens {words} are {text.format(named(by))}: a repetition penalty is left on"
                predicted = np.where(there, right * by ** -sign(right), right)
                yield Variant("repetition_penalty", "head", stated, {"penalty": by}, predicted, 1)
        yield from _subtracted(site, words, counts)


def _subtracted(site: Site, words: str, counts: Array) -> Iterator[Variant]:
    """A number for each token that is there, one for each time that it is, or both."""
    seen, right, there = site.seen, site.expected, counts > 0
    flat, often = there[there].astype(np.float64), counts[there]
    kinds: list[tuple[str, list[Array]]] = [("presence", [flat])]
    if (often != often[0]).any():
        kinds += [("frequency", [often]), ("presence and frequency", [flat, often])]
    for kind, terms in kinds:
        values = [float(f"{x:.4g}") for x in coefficients((right - seen)[there], terms)]
        predicted = right.copy()
        predicted[there] -= sum(value * term for value, term in zip(values, terms, strict=True))
        reported = " and ".join(f"{value:g}" for value in values)
        text = f"the logits of tokens {words} are smaller by a {kind} penalty, {reported}, that is left on"
        yield Variant("presence_penalty", "head", text, {"penalty": values}, predicted, len(values))


def _base(seen: Array, right: Array, sign: Array) -> float | None:
    """p in seen = right * p ** -sign, by the median of the larger ones; None where there is none."""
    large = np.abs(right) >= np.median(np.abs(right))
    ratios = seen[large] / right[large]
    if not (ratios > 0).all():
        return None
    by = float(np.exp(-np.median(np.log(ratios) * sign[large])))
    return simple(float(f"{by:.4g}")) if abs(by - 1) > 1e-3 else None


# --- single tokens -------------------------------------------------------------------------------------------


def _biased(site: Site) -> Iterator[Variant]:
    """A number of its own is added to the logits of each of a few tokens."""
    assert site.deviation is not None
    scope = site.deviation.scopes[0]
    columns: NDArray[np.intp] = np.flatnonzero(scope.any(0))
    rows = np.flatnonzero(scope.any(1))
    if site.deviation.columns is None or len(rows) < 4:
        return
    added = (site.seen - site.expected)[np.ix_(rows, columns)].mean(0)
    same = bool(np.ptp(added) <= 1e-3 * np.abs(added).max())
    if same:
        added[:] = simple(float(added.mean()))
    predicted = site.expected.copy()
    predicted[:, columns] += added
    start = site.first_out
    ids = (columns + start).tolist()
    some = ", ".join(map(str, ids[:SHOWN]))
    text = f"{added[0]:.4g} is added to the logits of token ids {some}, the same at every step: a logit bias is left on"
    fitted = {"ids": ids[:SHOWN], "number": len(ids), "bias": float(added[0])}
    yield Variant("logit_bias", "head", text, fitted, predicted, 1 if same else len(ids))
