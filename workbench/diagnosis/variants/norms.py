"""RMSNorm as engines get it wrong: epsilon, weight, statistic, input, precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from lockstep.workbench.diagnosis.operations.expected import normalised
from lockstep.workbench.diagnosis.operations.facts import rounded
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import (
    Mask,
    apart,
    differing_replica,
    factor,
    narrower,
    nearest_rows,
    simple,
    wrong_rows,
)
from lockstep.workbench.diagnosis.variants.norm_inputs import input_variants
from lockstep.workbench.diagnosis.variants.norm_weights import fitted_weight, weight_variants
from lockstep.workbench.diagnosis.variants.variant import Variant

#: Epsilons that engines have built in.
KNOWN_EPS = (1e-5, 1e-6, 1e-8, 0.0, 1e-12, 1e-3, 1e-4, 1e-7, 1e-9, 1e-10)


def norms(site: Site) -> Iterator[Variant]:
    """Every variant of the norm that may have given what was seen."""
    found = _operands(site)
    if found is None:
        return
    (x, weight), eps, wrong = found, site.facts.model.rms_eps, wrong_rows(site)
    yield from _epsilons(site, x, weight, eps, wrong)
    yield from weight_variants(site, normalised(x, eps), weight, wrong)
    yield from _statistics(site, x, weight, eps)
    yield from input_variants(site, weight, eps, wrong)
    yield from _rows(site, wrong)
    yield from _roundings(site, x, weight, eps)
    yield from _factor(site, wrong)


def unknown_norms(site: Site) -> Iterator[Variant]:
    """What no known mistake explains, in numbers: another weight, a bias, a factor of each row."""
    found = _operands(site)
    if found is None:
        return
    x, weight = found
    yield from fitted_weight(site, normalised(x, site.facts.model.rms_eps), weight, wrong_rows(site))
    yield from _free(site, wrong_rows(site))


def _operands(site: Site) -> tuple[Array, Array] | None:
    """The input, in the output's shape, and the weight."""
    given, weight = site.inputs["x"], site.facts.vector(site.weights["weight"])
    if weight is None or given.size != site.expected.size or site.seen.shape != site.expected.shape:
        return None
    return given.reshape(site.expected.shape), weight


def _epsilons(site: Site, x: Array, weight: Array, eps: float, wrong: Mask) -> Iterator[Variant]:
    """The epsilon that the rows' sizes tell: 1 / g² = mean square + epsilon."""
    mean = (x**2).mean(-1, keepdims=True)
    by = factor(site.seen, x * weight, -1)
    there = np.broadcast_to(wrong.reshape(-1, *[1] * (x.ndim - 1)), mean.shape) & (by > 0) & (mean > 0)
    if not there.any():
        return
    excess, size = 1 / by[there] ** 2 - mean[there], mean[there]
    fitted = float((excess / size**2).sum() / (1 / size**2).sum())
    known = {
        value: apart(site.seen[wrong], (x / np.sqrt(mean + value) * weight)[wrong]) for value in KNOWN_EPS
    }
    least = min(known.values())
    values = [(next(value for value, left in known.items() if left <= 1.5 * least), 0)]
    if fitted > 0 and not math.isclose(fitted, values[0][0], rel_tol=5e-3):
        values.append((float(f"{fitted:.3g}"), 1))
    for value, parameters in values:
        if math.isclose(value, eps, rel_tol=1e-3):
            continue
        text = (
            f"the epsilon is {value:g} instead of {eps:g}"
            if value
            else f"no epsilon is added (it is {eps:g})"
        )
        predicted = x / np.sqrt(mean + value) * weight
        yield Variant(
            "norm_epsilon", "norm", text, {"epsilon": value, "expected": eps}, predicted, parameters
        )
    outside = x / (np.sqrt(mean) + eps) * weight
    yield Variant(
        "norm_epsilon", "norm", "the epsilon is added outside of the root", {"epsilon": eps}, outside
    )


def _statistics(site: Site, x: Array, weight: Array, eps: float) -> Iterator[Variant]:
    """Other numbers than the root mean square of the row to divide by, and none."""
    mean, centred = (x**2).mean(-1, keepdims=True), x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    root, width = np.sqrt(mean + eps), x.shape[-1]
    forms: list[tuple[str, str, Array]] = [
        ("norm_centred", "the mean is subtracted first, as LayerNorm does", centred / np.sqrt(variance + eps)),
        ("norm_centred", "the mean is subtracted after the root mean square was taken", centred / root),
        ("norm_centred", "the row is divided by its standard deviation", x / np.sqrt(variance + eps)),
        ("norm_sum", "squares are summed, not averaged", x / np.sqrt(mean * width + eps)),
        ("norm_sum", "squares are averaged over one element less", x / np.sqrt(mean * width / (width - 1) + eps)),
        ("norm_no_root", "the mean square is divided by, not its root", x / (mean + eps)),
        ("norm_inverted", "the row is divided by the reciprocal of its root mean square", x * root),
        ("norm_mean_abs", "the mean of magnitudes is divided by", x / (np.abs(x).mean(-1, keepdims=True) + eps)),
        ("norm_missing", "the row is not normalised, only multiplied by the weight", x),
        ("norm_repeated", "the row is normalised twice, with the weight both times", normalised(x, eps) * weight),
    ]  # fmt: skip
    forms[-1] = (*forms[-1][:2], normalised(forms[-1][2], eps))
    # The mean is rounded before it is subtracted: that counts where what is left is small.
    slack = site.facts.unit * np.abs(x).mean(-1, keepdims=True) / root * np.abs(weight)
    for name, text, found in forms:
        noise = np.broadcast_to(slack, x.shape) if name == "norm_centred" else None
        yield Variant(name, "norm", text, {}, found * weight, noise=noise)
    yield Variant("norm_skipped", "norm", "the norm is skipped: its input goes on as it is", {}, x)
    for parts in sorted({2, len(site.taps.ranks)}):
        if 1 < parts <= width // 2 and width % parts == 0:
            yield from _shards(site, x, weight, eps, parts)
    if x.ndim == 3:
        whole = np.sqrt((x**2).mean((1, 2), keepdims=True) + eps)
        text = "the root mean square is taken over all heads of the rank, not each head's own"
        yield Variant("norm_over_heads", "norm", text, {"heads": x.shape[1]}, x / whole * weight)
        if (every := _all_heads(site)) is not None:
            whole = np.sqrt((every**2).mean(1) + eps)[:, None, None]
            text = "the root mean square is taken over the heads of all ranks, not each head's own"
            yield Variant("norm_over_heads", "norm", text, {"heads": "all"}, x / whole * weight)
    for text, of in _SHARED.items():
        ids = np.array([(row.step, row.seq if "sequence" in text else 0) for row in site.rows])
        yield Variant("norm_over_tokens", "norm", text, {}, x / np.sqrt(of(mean, ids) + eps) * weight)


def _shards(site: Site, x: Array, weight: Array, eps: float, parts: int) -> Iterator[Variant]:
    """Statistics of each part of the row, or of one part for all of it."""
    cut = x.reshape(*x.shape[:-1], parts, -1)
    mean = (cut**2).mean(-1, keepdims=True)
    own = (cut / np.sqrt(mean + eps)).reshape(x.shape) * weight
    text = (
        f"each of {parts} parts of the row is divided by its own root mean square, as on shards never reduced"
    )
    yield Variant("norm_over_shard", "norm", text, {"parts": parts}, own)
    for part in range(parts if parts == len(site.taps.ranks) else 1):
        text = f"the root mean square is that of part {part} of {parts} of the row"
        yield Variant("norm_over_shard", "norm", text, {"parts": parts, "part": part},
                      x / np.sqrt(mean[..., part, :] + eps) * weight)  # fmt: skip


def _all_heads(site: Site) -> Array | None:
    source = site.near(site.kind.replace("_norm", "_proj"))
    return site.taps.whole(source, site.passes) if len(site.taps.ranks) > 1 else None


def _over_groups(mean: Array, ids: Array) -> Array:
    found = np.empty_like(mean)
    for group in np.unique(ids, axis=0):
        there = (ids == group).all(1)
        found[there] = mean[there].mean(0)
    return found


def _before(mean: Array, ids: Array) -> Array:
    return np.concatenate([mean[:1], mean[:-1]])


_SHARED: dict[str, Callable[[Array, Array], Array]] = {
    "the root mean square is taken over all tokens of the sequence's step": _over_groups,
    "the root mean square is taken over all tokens of the step": _over_groups,
    "each token is divided by the root mean square of the token before": _before,
}


def _rows(site: Site, wrong: Mask) -> Iterator[Variant]:
    """Rows of other tokens."""
    nearest = nearest_rows(site.seen, site.expected)
    if (nearest != np.arange(len(nearest)))[wrong].all():
        shift = set((nearest - np.arange(len(nearest)))[wrong].tolist())
        shift = shift if len(shift) == 1 else {move - len(nearest) if move > 0 else move for move in shift}
        how = (
            f"the token {abs(min(shift))} {'before' if min(shift) < 0 else 'after'} it"
            if len(shift) == 1
            else "another token"
        )
        text = f"each of the wrong rows is that of {how}"
        moved = {str(int(i)): int(nearest[i]) for i in np.flatnonzero(wrong)[:16]}
        yield Variant("rows_moved", "norm", text, {"rows": moved}, site.expected[nearest], 1)


def _roundings(site: Site, x: Array, weight: Array, eps: float) -> Iterator[Variant]:
    """Steps of the norm in fewer bits."""
    mean, right = (x**2).mean(-1, keepdims=True), normalised(x, eps)
    with np.errstate(all="ignore"):
        for dtype in narrower(site.facts.dtype):

            def low(value: Array, dtype: str = dtype) -> Array:
                return rounded(value, dtype).astype(np.float64)

            squares = _mean_square(x, low)
            forms = {
                "the normalised row is rounded to {} before the weight": low(right) * weight,
                "the norm's input is rounded to {}": normalised(low(x), eps) * weight,
                "the norm's output is rounded to {}": low(right * weight),
                "the norm's input, output and what is between are rounded to {}": low(
                    low(normalised(low(x), eps)) * low(weight)
                ),
                "the mean square is rounded to {}": x / np.sqrt(low(mean) + eps) * weight,
                "the mean square is taken in {}": x / np.sqrt(squares + eps) * weight,
                "mean square, epsilon and root are taken in {}": x
                * low(1 / np.sqrt(low(_mean_square(x, low) + eps)))
                * weight,
                "the reciprocal root is rounded to {}": x * low(1 / np.sqrt(mean + eps)) * weight,
                "the norm's weight is rounded to {}": right * low(weight),
            }
            for text, predicted in forms.items():
                yield Variant("norm_precision", "precision", text.format(dtype), {"dtype": dtype}, predicted)
        sums = np.where(mean * x.shape[-1] > 65504, 0.0, right) * weight
        elements = np.where((x**2).max(-1, keepdims=True) > 65504, 0.0, right) * weight
    for text, predicted in {"the sum of squares": sums, "the square of an element": elements}.items():
        if (predicted != right * weight).any():
            yield Variant(
                "norm_overflow",
                "overflow",
                f"{text} overflows in float16: the row is divided by infinity",
                {},
                predicted,
            )


def _mean_square(x: Array, low: Callable[[Array], Array]) -> Array:
    """The row's mean square of rounded elements, their squares and their mean rounded as well."""
    return low(low(low(x) ** 2).mean(-1, keepdims=True))


def _factor(site: Site, wrong: Mask) -> Iterator[Variant]:
    """A factor of the whole."""
    right, width = site.expected, site.expected.shape[-1]
    by, replica = simple(float(factor(site.seen[wrong], right[wrong]))), differing_replica(site)
    if by == 1:
        by = float(factor(site.seen[wrong], right[wrong]))
    if by != 1:
        names = {math.sqrt(width): "sqrt(width)", 1 / math.sqrt(width): "1/sqrt(width)", width: "the width"}
        known = next((text for value, text in names.items() if math.isclose(by, value, rel_tol=1e-3)), "")
        text = f"the result is {by:.7g} times what it should be{f', {known}' if known else ''}{replica}"
        yield Variant("factor", "sharding" if replica else "norm", text, {"factor": by}, by * right, 1)


def _free(site: Site, wrong: Mask) -> Iterator[Variant]:
    """A constant row; a factor of each row."""
    right = site.expected
    if wrong.sum() >= 4:
        row = (site.seen - right)[wrong].mean(tuple(range(right.ndim - 1)))
        text = "the same vector is added to every row, as by a bias"
        yield Variant("norm_bias", "norm", text, {"norm": float(np.linalg.norm(row))}, right + row, row.size)
    if right.shape[-1] >= 8:
        each = factor(site.seen, right, -1)
        text = (
            "each row is off by a factor of its own: another number is divided by than its root mean square"
        )
        fitted = {"least": float(each.min()), "most": float(each.max())}
        yield Variant("token_factor", "norm", text, fitted, right * each, each[wrong].size)
