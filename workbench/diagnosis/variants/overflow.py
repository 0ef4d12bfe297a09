"""Where NaN and infinities arise first: an operation whose inputs are finite and whose result is not, or is cut off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.blocks import CONTEXTS, by_head, from_heads, products
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.facts import LARGEST, UNIT, rounded
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Largest numbers of formats, at which results may be cut off.
EDGES = {
    65504.0: "float16's largest number",
    448.0: "float8 e4m3's",
    57344.0: "float8 e5m2's",
    127.0: "int8's",
}


def overflows(site: Site) -> Iterator[Variant]:
    """Variants of any operation that leave the range of a format, or divide by nothing."""
    deviation = site.deviation
    if deviation is None or not all(part.fits for part in site.parts):
        return
    right = [part.expected for part in site.parts]
    finite = all(
        np.isfinite(part.seen[scope & np.isfinite(part.expected)]).all()
        for part, scope in zip(site.parts, deviation.scopes, strict=True)
    )
    if site.operation == "norm":
        yield from _norms(site)
    if finite:
        yield from _cut_off(site)
        zeros = [np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in right]
        yield _of("nan_replaced", "NaN and infinities are replaced by 0", site, zeros)
        return
    half = [rounded(x, "float16").astype(np.float64) for x in right]
    text = "the result is beyond float16's largest number, 65504, and becomes infinite"
    yield _of("overflow", text, site, half, UNIT["float16"])
    yield from _beyond(site)
    if site.operation == "scores":
        yield from _scores(site)
    if site.operation in CONTEXTS:
        yield from _contexts(site)
    if site.operation == "softmax":
        yield from _softmaxes(site)
    yield from _features(site)


def _of(
    name: str, text: str, site: Site, guesses: Sequence[Array], tolerance: float = 0.0, parameters: int = 0
) -> Variant:
    return Variant(name, "overflow", text, {}, list(guesses), parameters, tolerance)


def _scores(site: Site) -> Iterator[Variant]:
    """The product of query and key overflows before it is scaled down; a mask added to it then gives NaN."""
    scale, coarse = site.facts.model.scale, max(UNIT["float16"], site.facts.unit)
    raw = [products(part.inputs["q"], part.inputs["k"]) for part in site.parts]
    over = [np.where(np.abs(x) >= LARGEST["float16"], np.sign(x) * np.inf, x * scale) for x in raw]
    hidden = [~np.isfinite(part.expected) for part in site.parts]
    text = "the product of query and key is beyond float16's largest number, 65504, before it is scaled"
    filled = [np.where(cells, -np.inf, x) for x, cells in zip(over, hidden, strict=True)]
    yield _of("overflow_before_scale", f"{text}: infinite scores", site, filled, coarse)
    added = [x + np.where(cells, -np.inf, 0.0) for x, cells in zip(over, hidden, strict=True)]
    yield _of(
        "overflow_before_scale", f"{text}: inf - inf is NaN where the mask is added", site, added, coarse
    )
    finite = [np.where(cells & ~np.isposinf(x), -np.inf, x) for x, cells in zip(over, hidden, strict=True)]
    words = f"{text}: infinite scores, which the added mask of a finite number does not hide"
    yield _of("overflow_before_scale", words, site, finite, coarse)


def _beyond(site: Site) -> Iterator[Variant]:
    """Infinite where the right result is larger than some number: what came before it left the range."""
    right = [part.expected for part in site.parts]
    if site.operation == "scores":
        scale = site.facts.model.scale
        right = [products(part.inputs["q"], part.inputs["k"]) * scale for part in site.parts]
    least, most, many = np.inf, 0.0, 0
    for part, x in zip(site.parts, right, strict=True):
        known = np.isfinite(part.expected)
        many += int((known & np.isinf(part.seen)).sum())
        least = min(least, float(np.abs(x[known & np.isinf(part.seen)]).min(initial=np.inf)))
        most = max(most, float(np.abs(x[known & np.isfinite(part.seen)]).max(initial=0.0)))
    if not 0 < most <= least < LARGEST["float16"] or many < 2:
        return
    edge, coarse = math.sqrt(most * least), max(UNIT["float16"], site.facts.unit)
    text = (
        f"results beyond {edge:.4g} are infinite: what they are made of is some {LARGEST['float16'] / edge:.3g} times "
        "as large, and leaves float16's range (65504) before it is scaled down"
    )
    made = [np.where(np.abs(x) >= edge, np.sign(x) * np.inf, x) for x in right]
    masked = [~np.isfinite(part.expected) for part in site.parts]
    filled = [np.where(cells, -np.inf, x) for x, cells in zip(made, masked, strict=True)]
    yield _of("overflow_before_scale", text, site, filled, coarse, 1)
    if site.operation == "scores":
        for words, mask in (
            ("of -inf makes NaN of inf", -np.inf),
            ("of a finite number does not hide inf", 0.0),
        ):
            sums = [np.where(cells & ~((x == np.inf) & (mask == 0.0)), x + -np.inf if mask else -np.inf, x)
                    for x, cells in zip(made, masked, strict=True)]  # fmt: skip
            yield _of("overflow_before_scale", f"{text}; the added mask {words}", site, sums, coarse, 1)


def _contexts(site: Site) -> Iterator[Variant]:
    """Every token of a pass is NaN, in a whole head or in features of it: a value that none should see."""
    guesses, found = [], False
    for part in site.parts:
        if not all(np.isfinite(part.inputs[role]).all() for role in ("probs", "v")):
            return
        seen, guess = by_head(site, part.seen), by_head(site, part.expected).copy()
        every = np.asarray((~np.isfinite(seen)).all(1))  # [heads, D]
        if seen.shape[1] == 1:
            every &= np.asarray(every.all(1))[:, None]
        np.copyto(guess, seen, where=every[:, None, :])
        guesses.append(from_heads(site, guess))
        found |= bool(every.any())
    text = (
        "every token of a pass is NaN, though probabilities and values are finite: a value behind the mask, or in "
        "memory beyond the sequence that was never written, is NaN or infinite, and its probability of 0 gives "
        "0 * NaN = NaN"
    )
    if found:
        yield _of("nan_behind_mask", text, site, guesses)


def _softmaxes(site: Site) -> Iterator[Variant]:
    """Exponentials without the maximum subtracted overflow, and inf / inf is NaN; or all are 0, and 0 / 0 is NaN."""
    for dtype in ("float32", "float16", "bfloat16"):
        guesses = []
        for part in site.parts:
            powers = rounded(np.exp(part.inputs["scores"]), dtype).astype(np.float64)
            powers[powers > LARGEST[dtype]] = np.inf
            total = powers.sum(-1, keepdims=True)
            total[total > LARGEST[dtype]] = np.inf
            guesses.append(powers / total)
        text = f"exponentials, of which the maximum is not subtracted, leave the range of {dtype}: inf / inf, or 0 / 0"
        yield _of("softmax_no_maximum", text, site, guesses, 4 * max(UNIT[dtype], site.facts.unit))


def _norms(site: Site) -> Iterator[Variant]:
    """Squares beyond float16's range make the root infinite and the row zero; a row of zeros without epsilon is NaN."""
    x, right = site.inputs["x"].reshape(site.expected.shape), site.expected
    squares, most = x**2, LARGEST["float16"]
    for over, text in (
        (squares.max(-1, keepdims=True) >= most, "squares are beyond float16's largest number, 65504"),
        (
            squares.sum(-1, keepdims=True) >= most,
            "the sum of squares is beyond float16's largest number, 65504",
        ),
    ):
        if over.any():
            words = f"{text}: divided by infinity the row is zero"
            guess, tolerance = np.where(over, 0.0, right), 4 * site.facts.unit
            yield Variant("overflow_squares", "overflow", words, {}, guess, tolerance=tolerance)
    empty = (squares.sum(-1, keepdims=True) == 0) & np.ones(right.shape, dtype=bool)
    if empty.any():
        text = "the mean square of a row of zeros is divided by without epsilon: 0 / 0 is NaN"
        yield Variant("division_by_zero", "overflow", text, {}, np.where(empty, np.nan, right))


def _cut_off(site: Site) -> Iterator[Variant]:
    """Results are clamped to a largest number, a smallest one, or both; masked scores before the mask, or after it."""
    assert site.deviation is not None
    scopes = [
        scope & np.isfinite(part.expected)
        for part, scope in zip(site.parts, site.deviation.scopes, strict=True)
    ]
    pairs = [(part, scope) for part, scope in zip(site.parts, scopes, strict=True) if scope.any()]
    if not pairs:
        return
    seen = np.concatenate([part.seen[scope] for part, scope in pairs])
    right = np.concatenate([part.expected[scope] for part, scope in pairs])
    top, bottom = float(seen.max()), float(seen.min())
    above = (seen == top).sum() > 1 and (right > top).any()
    below = (seen == bottom).sum() > 1 and (right < bottom).any()
    if not (above or below) or top == bottom:
        return
    edges = [edge for edge, there in ((bottom, below), (top, above)) if there]
    known = next((words for edge in edges for value, words in EDGES.items()
                  if math.isclose(abs(edge), value, rel_tol=1e-3)), "")  # fmt: skip
    both = below and above and math.isclose(-bottom, top, rel_tol=1e-6)
    reported = f"{top:.6g}" if both else " and ".join(f"{edge:.6g}" for edge in edges)
    text = f"results are cut off (clamped) at {reported}{', ' + known if known else ''}"
    least, most = bottom if below else -np.inf, top if above else np.inf
    clamped = [np.clip(part.expected, least, most) for part in site.parts]
    inside = [
        np.where(np.isfinite(part.expected), x, part.expected)
        for x, part in zip(clamped, site.parts, strict=True)
    ]
    free = 0 if known else 1 if both else len(edges)
    yield _of("cut_off", text, site, inside, parameters=free)
    if site.operation == "scores" and below:
        words = f"{text}, after the mask: what it hides scores {bottom:.6g}"
        yield _of("cut_off", words, site, clamped, parameters=free)


def _features(site: Site) -> Iterator[Variant]:
    """Whole features, or features of single token ids, that are not finite: so are numbers of the weight."""
    if site.operation not in ("linear", "norm", "embedding", "head", "reduce"):
        return
    seen, right = site.seen, site.expected
    bad = np.asarray(~np.isfinite(seen) & np.isfinite(right))
    if site.operation == "head":
        bad &= ~np.isneginf(
            seen
        )  # tokens that a sampler hides: no weight gives minus infinity for every input
    columns = np.nonzero(bad.reshape(-1, bad.shape[-1]).all(0))[0]
    name = site.weights.get("weight", "the weight")
    if len(columns):
        every = np.isin(np.arange(seen.shape[-1]), columns)
        text = f"features {columns[:8].tolist()} are NaN or infinite for every token: so is {name}, or the bias, there"
        guess = np.where(every & bad, seen, right)
        yield Variant("weight_not_finite", "weight", text, {"features": columns.tolist()}, guess)
    ids = sorted({site.rows[row].token for row in np.unique(np.nonzero(bad)[0])})
    if site.operation == "embedding" and ids:
        text = f"the rows of token ids {ids[:8]} in the embedding hold NaN or infinity"
        guess = np.where(bad, seen, right)
        yield Variant("weight_not_finite", "embedding", text, {"ids": ids}, guess)


def not_finite(site: Site) -> Iterator[Variant]:
    """Numbers that are not finite, in no known pattern, among right ones."""
    if not all(part.fits for part in site.parts):
        return
    bad = [~np.isfinite(part.seen) & np.isfinite(part.expected) for part in site.parts]
    if site.operation in ("scores", "index_scores") and all(
        np.isneginf(part.seen[cells]).all() for part, cells in zip(site.parts, bad, strict=True)
    ):
        return  # hidden: a mask's matter
    count, whole = sum(int(x.sum()) for x in bad), sum(x.size for x in bad)
    guesses = [np.where(cells, part.seen, part.expected) for part, cells in zip(site.parts, bad, strict=True)]
    rows = sum(int(x.reshape(len(x), -1).all(1).sum()) for x in bad)
    inputs = all(
        np.isfinite(x).all() for part in site.parts for role, x in part.inputs.items() if role != "scores"
    )
    text = f"{count} of {whole} numbers are NaN or infinite{f', {rows} rows altogether' if rows else ''}"
    text += (
        ", although the inputs are finite: memory that was never written, or a range left inside"
        if inputs
        else ""
    )
    if count:
        yield _of("not_finite", text, site, guesses)
