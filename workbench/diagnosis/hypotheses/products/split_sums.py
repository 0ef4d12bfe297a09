"""Variants of a product that is summed in pieces of fewer bits: split along the inputs, or over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.products.wrong import WrongProduct
from lockstep.workbench.diagnosis.hypotheses.roundings import ROUNDINGS, settled
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.facts import UNIT
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: The most pieces that a product is split into.
_MOST_PIECES = 64

_Sum = tuple[Array, Array]


def _once(pieces: Sequence[_Sum], dtype: str) -> _Sum:
    """Each piece is rounded, then they are summed."""
    rounded = [settled(*piece, dtype) for piece in pieces]
    return np.asarray(sum(value for value, _ in rounded)), np.asarray(sum(noise for _, noise in rounded))


def _running(pieces: Sequence[_Sum], dtype: str) -> _Sum:
    """The sum so far is rounded after each piece."""
    total, noise = settled(*pieces[0], dtype)
    for value, more in pieces[1:]:
        total, noise = settled(total + value, noise + more, dtype)
    return total, noise


def _whole(pieces: Sequence[_Sum], dtype: str) -> _Sum:
    """Pieces and sum are rounded."""
    return settled(*_once(pieces, dtype), dtype)


def _all_running(pieces: Sequence[_Sum], dtype: str) -> _Sum:
    """Each piece is rounded, and the sum so far after each."""
    return _running([settled(*piece, dtype) for piece in pieces], dtype)


_HOW: Mapping[str, Callable[[Sequence[_Sum], str], _Sum]] = {
    "each kept in {}": _once,
    "the sum so far kept in {}": _running,
    "these and their sum kept in {}": _whole,
    "each and the sum so far kept in {}": _all_running,
}


def split_sums(site: Site) -> Iterator[Variant]:
    """The in features in equal pieces, one after the other or dealt in turn, of which the sums have fewer bits."""
    wrong = WrongProduct.of(site)
    if wrong is None or not wrong.columns.size:
        return
    width = wrong.x.shape[1]
    for count in range(2, min(_MOST_PIECES, width) + 1):
        if width % count:
            continue
        for order in ("", ", dealt in turn") if count < width else ("",):
            places = (
                np.arange(width).reshape(count, -1) if not order else np.arange(width).reshape(-1, count).T
            )
            for dtype in ("bfloat16", "float16"):
                if UNIT[dtype] > site.facts.unit:
                    yield from _split(site, wrong, places, order, dtype)


def _split(site: Site, wrong: WrongProduct, places: np.ndarray, order: str, dtype: str) -> Iterator[Variant]:
    some = wrong.sampled()
    every = np.arange(len(wrong.weight))
    near = {how for how in _HOW if wrong.explains(_summed(site, wrong, places, some, how, dtype)[0], some)}
    for how in sorted(near):
        out, noise = _summed(site, wrong, places, every, how, dtype)
        text = (
            f"the product is summed in {len(places)} pieces of {places.shape[1]} in features{order}, "
            f"{how.format(dtype)}"
        )
        fitted: dict[str, object] = {"pieces": len(places), "dtype": dtype, "how": how.format(dtype)}
        yield Variant("split_sum_low_precision", "precision", text, fitted, out, noise=noise)


def _summed(
    site: Site, wrong: WrongProduct, places: np.ndarray, columns: np.ndarray, how: str, dtype: str
) -> _Sum:
    """The output's columns, and what its rounding may leave."""
    weight, own = wrong.weight[columns].astype(np.float64), site.parts[0].noise[:, columns]
    pieces = [(wrong.x[:, piece] @ weight[:, piece].T, own) for piece in places]
    out, noise = _HOW[how](pieces, dtype)
    return out + wrong.rest[columns], noise + own


def rounded_partials(site: Site) -> Iterator[Variant]:
    """The ranks' partial sums have fewer bits: all of them, or all but those of one rank, or of one alone; or the sum
    itself, as it grows from rank to rank."""
    part = site.parts[0]
    partials = part.inputs["partial"]
    bias = site.facts.vector(site.weights["bias"]) if "bias" in site.weights else 0.0
    if not part.fits or bias is None or not np.isfinite(partials).all():
        return
    ranks = range(len(partials))
    sets = {tuple(ranks): "the ranks' partial sums are"}
    if len(ranks) > 1:
        sets |= {
            tuple(r for r in ranks if r != one): f"all partial sums but rank {one}'s are" for one in ranks
        }
        sets |= {(one,): f"the partial sum of rank {one} is" for one in ranks}
    for to, change in ROUNDINGS.items():
        if to in UNIT and UNIT[to] <= site.facts.unit:
            continue
        found = [change(one) for one in partials]
        coarse = [x if y is None else np.asarray(y, np.float64) for x, y in zip(partials, found, strict=True)]
        for chosen, words in sets.items():
            terms = [coarse[rank] if rank in chosen else partials[rank] for rank in ranks]
            total = np.asarray(sum(terms) + bias)
            fitted: dict[str, object] = {"to": to, "ranks": list(chosen)}
            yield Variant(
                "low_precision_sum", "precision", f"{words} rounded to {to} for the sum", fitted, total
            )
    for dtype in ("bfloat16", "float16"):
        if UNIT[dtype] <= site.facts.unit:
            continue
        for how, add in _HOW.items():
            for order in (ranks, ranks[::-1]):
                out, noise = add([(partials[rank], 0 * part.noise) for rank in order], dtype)
                text = f"the ranks' partial sums are added with {how.format(dtype)}"
                fitted = {"to": dtype, "how": how}
                yield Variant(
                    "low_precision_sum", "precision", text, fitted, out + bias, noise=noise + part.noise
                )
