"""Variants of a wrong layer whose quantised weight was dequantised wrongly: block by block its scale, its offset or
its sign."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.products.block_scales import whose_scales
from lockstep.workbench.diagnosis.hypotheses.products.wrong import WrongProduct
from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER, Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

Term = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class _Mistake:
    """What is added to a weight: multiples, one of each block, of terms that are made of the weight."""

    name: str
    text: str
    terms: tuple[Term, ...]


def _itself(weight: Array) -> Array:
    return weight


def _one(weight: Array) -> Array:
    return np.ones_like(weight)


def _negative(weight: Array) -> Array:
    return (weight < 0).astype(np.float64)


def _against_sign(weight: Array) -> Array:
    return np.where(weight < 0, 1.0, -1.0)


MISTAKES = (
    _Mistake("block_scales", "is multiplied by a wrong scale", (_itself,)),
    _Mistake("block_offsets", "is off by a constant, as by a wrong zero point (offset, minimum)", (_one,)),
    _Mistake("unsigned", "has a constant added to its negative weights: signed numbers are read as unsigned, "
             "without their sign bit", (_negative,)),
    _Mistake("sign_offset", "has its positive weights moved down and its negative ones up by the same: quantised "
             "numbers in two's complement are read as ones with an offset, or the other way", (_against_sign,)),
    _Mistake("block_scales_and_offsets", "has a wrong scale and a wrong offset (zero point)", (_itself, _one)),
)  # fmt: skip
#: In features and out features of a block (0: all), as formats have them.
IN_FEATURES, OUT_FEATURES = (0, 256, 128, 64, 32, 16), (0, 128, 64, 32, 16, 1)
#: Out features by which a mistake is tried, and tokens by which it is fitted.
SAMPLE, TOKENS = 128, 128
#: Equations of a block beyond its unknowns, and of all blocks together.
SPARE, SPARE_IN_ALL = 4, 32
#: What rounding to few bits may leave, over what was seen.
ROUNDED = 0.02
#: A block whose multiple is less than that much of the largest is right.
_NOTHING = 1e-3
#: What a fit may leave of the error, over what of it each of the equations has that were not used up.
LEAVES = 0.1


def block_terms(site: Site) -> Iterator[Variant]:
    """The mistake with the fewest numbers that gives what was seen: of blocks of every usual size factors or offsets
    are fitted."""
    wrong = WrongProduct.of(site)
    if wrong is None or len(wrong.rows) < SPARE:
        return
    tokens = np.linspace(0, len(wrong.rows) - 1, min(TOKENS, len(wrong.rows))).astype(int)
    rounded: list[tuple[_Mistake, _Layout, float]] = []
    for mistake in MISTAKES:
        for layout in _layouts(wrong, mistake):
            left = _leaves(wrong, tokens, mistake, layout)
            if left is None:
                continue
            if left > 0:
                rounded.append((mistake, layout, left))
                continue
            yield from _variants(wrong, tokens, mistake, layout)
            return  # what has more numbers, or more terms, fits as well
    for mistake, layout, left in rounded[:1]:
        yield from _variants(wrong, tokens, mistake, layout, left)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Blocks of `rows` out features by `columns` in features (0: all), counted from the whole weight's beginning;
    `starts` are where those of in features begin, of this rank's."""

    rows: int
    columns: int
    starts: tuple[int, ...]


def _layouts(wrong: WrongProduct, mistake: _Mistake) -> list[_Layout]:
    """Those that the tokens determine, with the fewest numbers first. Scales of the whole, of out features and of in
    features are reported elsewhere."""
    width, columns, found = wrong.x.shape[1], len(wrong.columns), []
    first = wrong.site.first_in
    for size in IN_FEATURES:
        if size >= width:
            continue
        starts = (0, *range(size - first % size, width, size)) if size else (0,)
        unknown = len(mistake.terms) * len(starts)
        for rows in OUT_FEATURES:
            if mistake.terms == (_itself,) and (rows == 0 or (rows == 1 and not size)):
                continue
            shared = min(rows or columns, columns)
            if len(wrong.rows) * shared >= unknown + SPARE and rows < len(wrong.weight):
                found.append((unknown / shared, _Layout(rows, size, starts)))
    return [layout for _, layout in sorted(found, key=lambda one: one[0])]


def _leaves(
    wrong: WrongProduct, tokens: NDArray[np.intp], mistake: _Mistake, layout: _Layout
) -> float | None:
    """What the fit leaves in a sample of the blocks, over what was seen, by the equations that it has not used up: 0
    where that is within noise. None where it is more than a weight's rounding, or not much less than the error."""
    groups, some = _groups(wrong, layout.rows), list[NDArray[np.intp]]()
    for group in groups[len(groups) // 2 :] + groups[: len(groups) // 2]:
        if some and sum(map(len, some)) + len(group) > SAMPLE:
            break
        some.append(group)
    by, left = _solved(wrong, tokens, mistake, layout, some)
    columns = np.concatenate(some)
    error = wrong.error[np.ix_(tokens, columns)]
    noise = wrong.site.parts[0].noise[np.ix_(wrong.rows[tokens], wrong.columns[columns])]
    spare = left.size - by.size
    if spare < max(SPARE_IN_ALL, SPARE * len(some)):
        return None
    right, seen = np.linalg.norm(wrong.right), np.linalg.norm(wrong.seen)
    allowed = 3 * max(1.0, float(seen / max(float(right), 1e-300))) * float(np.sqrt((noise**2).mean()))
    over = float(np.sqrt((left**2).sum() / spare))
    if over > LEAVES * float(np.sqrt((error**2).mean())):
        return None
    share = over * float(np.sqrt(wrong.seen.size)) / float(seen)
    return 0.0 if over <= allowed else share if share <= ROUNDED else None


def _multiples(wrong: WrongProduct, tokens: NDArray[np.intp], mistake: _Mistake, layout: _Layout) -> Array:
    """Of every wrong column, [columns, terms, blocks of in features]."""
    found = np.zeros((len(wrong.columns), len(mistake.terms), len(layout.starts)))
    groups = _groups(wrong, layout.rows)
    at_once = max(1, SAMPLE // max(map(len, groups)))
    for i in range(0, len(groups), at_once):
        some = groups[i : i + at_once]
        by, _ = _solved(wrong, tokens, mistake, layout, some)
        for group, own in zip(some, by, strict=True):
            found[group] = own.reshape(len(mistake.terms), -1)
    return found


def _solved(
    wrong: WrongProduct,
    tokens: NDArray[np.intp],
    mistake: _Mistake,
    layout: _Layout,
    groups: Sequence[NDArray[np.intp]],
) -> tuple[Array, Array]:
    """Of groups of columns that share their multiples: these, [groups, terms * blocks], and what they leave of the
    errors, [tokens, columns]."""
    columns = np.concatenate(groups)
    x, weight = wrong.x[wrong.rows[tokens]], wrong.weight[wrong.columns[columns]].astype(np.float64)
    spans = list(zip(layout.starts, (*layout.starts[1:], x.shape[1]), strict=True))
    given = np.stack(
        [x[:, i:j] @ term(weight[:, i:j]).T for term in mistake.terms for i, j in spans]
    )  # [terms * blocks, tokens, columns]: what each multiple adds
    error = wrong.error[np.ix_(tokens, columns)]
    firsts = np.cumsum([0, *map(len, groups)])[:-1]
    each = np.ascontiguousarray(given.transpose(2, 1, 0))  # [columns, tokens, terms * blocks]
    squares = np.add.reduceat(each.transpose(0, 2, 1) @ each, firsts, axis=0)
    sums = np.add.reduceat((each * error.T[:, :, None]).sum(1), firsts, axis=0)
    size = np.trace(squares, axis1=1, axis2=2)[:, None, None] + 1e-300
    squares = squares + 1e-13 * size * np.eye(len(given))  # blocks of zeros determine nothing
    by = np.linalg.solve(squares, sums[:, :, None])[:, :, 0]
    every = by.repeat(list(map(len, groups)), axis=0)
    return by, error - (each @ every[:, :, None])[:, :, 0].T


def _variants(
    wrong: WrongProduct, tokens: NDArray[np.intp], mistake: _Mistake, layout: _Layout, rounded: float = 0.0
) -> Iterator[Variant]:
    """`rounded`: the share of what was seen that is left, as the weights are rounded as well."""
    columns, site, by = wrong.columns, wrong.site, _multiples(wrong, tokens, mistake, layout)
    own = wrong.weight[columns].astype(np.float64)
    sizes = np.diff([*layout.starts, wrong.x.shape[1]])
    weight = wrong.weight.astype(np.float64)
    for i, term in enumerate(mistake.terms):
        weight[columns] += by[:, i].repeat(sizes, axis=1) * term(own)
    predicted = wrong.replay(weight=weight)
    if predicted is None:
        return
    touched = _touched(by)
    text = f"{_what(layout, touched)} of {site.weights['weight']} {mistake.text}"
    if mistake.terms == (_itself,):
        factors = 1 + by[:, 0]
        text += f", {factors.min():.4g} to {factors.max():.4g} times the right one (quantised weights)"
        text += whose_scales(site, factors, columns, layout.rows, layout.columns, layout.starts)
    text += f"; besides it is rounded: {rounded:.2g} of the output is left" if rounded else ""
    parameters = len(mistake.terms) * int(touched.sum()) * len(_groups(wrong, layout.rows))
    # Where the tokens are few, all that they have left over had to fit by itself.
    most = wrong.error.size // (2 * ELEMENTS_A_PARAMETER)
    fitted = {"rows": layout.rows, "columns": layout.columns, "first": by.ravel()[:8].tolist()}
    noise = site.parts[0].noise + 1.5 * rounded * float(np.sqrt((predicted**2).mean()))
    yield Variant(mistake.name, "weight", text, fitted, predicted, min(parameters, most), noise=noise)


def _touched(by: Array) -> NDArray[np.bool_]:
    """Which blocks of in features are wrong at all, by their multiples [columns, terms, blocks]."""
    size = np.abs(by).max(0)
    return np.asarray((size > _NOTHING * size.max(1, keepdims=True)).any(0))


def _what(layout: _Layout, touched: NDArray[np.bool_]) -> str:
    """A block in words, and how many along the in features are meant."""
    across = f"{layout.columns} in features" if layout.columns else ""
    if not touched.all():
        some = f"{touched.sum()} of {len(touched)} blocks of {across}"
        if layout.rows != 1:
            return f"{some}, {layout.rows} out features each," if layout.rows else some
        return f"{some} in each row"
    if layout.rows == 1:
        return f"each block of {across} in each row" if across else "each row (out feature)"
    down = f"{layout.rows} out features" if layout.rows else ""
    if not across and not down:
        return "the whole"
    return f"each block of {' × '.join(part for part in (down, across) if part)}"


def _groups(wrong: WrongProduct, rows: int) -> list[NDArray[np.intp]]:
    """The wrong columns, as indices into `wrong.columns`, that share a block's rows."""
    every = np.arange(len(wrong.columns))
    if not rows:
        return [every]
    first = wrong.site.first_out
    block = (wrong.columns + first) // rows
    return np.split(every, np.flatnonzero(np.diff(block)) + 1)
