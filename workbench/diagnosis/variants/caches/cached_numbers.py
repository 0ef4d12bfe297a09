"""The right rows of a cache, changed: scaled, stored in fewer bits, or rotated otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.blocks import history, scopes, shaped, unrotated
from lockstep.workbench.diagnosis.hypotheses.fits import factor_of, known_number, resolution
from lockstep.workbench.diagnosis.hypotheses.roundings import REREAD, ROUNDINGS, Matrix, float8
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.expected import turned
from lockstep.workbench.diagnosis.operations.rotary import frequencies, lengths_of
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.caches.caches import OFFSETS, cache_variant, first_rows, what

#: What eight-bit codes are called, the largest of them, and what they make of numbers.
_CODES: tuple[tuple[str, float, Callable[[Array], Matrix]], ...] = (
    ("float8 (e4m3)", 448.0, lambda x: float8(x, 3, -6, 448.0, scaled=False)),
    ("float8 (e5m2)", 57344.0, lambda x: float8(x, 2, -14, 57344.0, scaled=False)),
    ("int8", 127.0, lambda x: np.clip(np.rint(x), -128, 127)),
)
#: How far a scale may be from the factor that is fitted.
_NEAR_SCALE = 0.1
#: Rows whose scales later ones may take.
_FIRST_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def cached_numbers(site: Site) -> Iterator[Variant]:
    """Variants of one layer's cache of keys or of values on one rank."""
    if all(part.fits for part in site.parts):
        yield from _factors(site)
        yield from stored_otherwise(site)
        yield from _codes_alone(site)
        yield from _codes_cut_off(site)
        yield from turned_otherwise(site)


def _factors(site: Site) -> Iterator[Variant]:
    """Rows larger by one factor, or each KV head by its own."""
    right, seen, head = _wrong_numbers(site)
    if not len(right):
        return
    model, ranks = site.facts.model, len(site.taps.ranks)
    dim, whose = model.head_dim, "1/sqrt(head_dim), " if model.score_scale is None else ""
    known = [
        (model.scale, f": {whose}the scale of the scores"),
        (dim**0.5, ": sqrt(head_dim)"),
        (-1.0, ": the sign is turned"),
        (ranks, ": the number of ranks"),
        (1 / ranks, ": 1 / the number of ranks"),
    ]
    factor = factor_of(right, seen)
    if abs(factor - 1) > resolution(site):
        match = known_number(factor, known, resolution(site))
        text = f"cached {what(site)} are {factor:.5g} times what was written{match[1] if match else ''}"
        guesses = [part.expected * factor for part in site.parts]
        yield cache_variant(site, "cache_scaled", text, guesses, {"factor": factor}, 0 if match else 1)
    own = {int(h): factor_of(right[head == h], seen[head == h]) for h in np.unique(head)}
    if len(own) > 1:
        by = np.array([own.get(h, 1.0) for h in range(site.parts[0].expected.shape[1])])
        text = f"cached {what(site)} are scaled by a factor of each KV head"
        guesses = [part.expected * by[:, None] for part in site.parts]
        fitted = {"factors": {str(h): f for h, f in own.items()}}
        yield cache_variant(site, "cache_scaled_heads", text, guesses, fitted, len(own))


def _wrong_numbers(site: Site) -> tuple[Array, Array, NDArray[np.intp]]:
    """What was written and what is read of all that is wrong and finite, in one axis, with the KV head of each."""
    x, y, heads = [], [], []
    for part, scope in zip(site.parts, scopes(site), strict=True):
        good = scope.swapaxes(0, 1) & np.isfinite(part.seen)  # [K, kv_heads, D]
        x.append(part.expected[good])
        y.append(part.seen[good])
        heads.append(np.nonzero(good)[1])
    return np.concatenate(x), np.concatenate(y), np.concatenate(heads)


def _codes_alone(site: Site) -> Iterator[Variant]:
    """Eight-bit codes that are read as they are: nothing multiplies them by the scale that they were divided by. The
    scale is a round number, or makes the largest number of what is written the largest code."""
    right, seen, _ = _wrong_numbers(site)
    if not right.any():
        return
    fitted = factor_of(right, seen)
    if not math.isfinite(fitted) or abs(fitted) < 1.5:
        return
    largest = max(float(np.abs(part.expected).max()) for part in site.parts)
    for to, most, coded in _CODES:
        for by in dict.fromkeys(
            (2.0 ** round(math.log2(abs(fitted))), float(f"{abs(fitted):.2g}"), most / largest)
        ):
            if abs(by / fitted - 1) < _NEAR_SCALE:
                yield _unscaled(site, to, by, coded)


def codes_unscaled(site: Site) -> Iterator[Variant]:
    """The same where no cache shows by how much: by powers of two, or with the largest number as the largest code."""
    largest = max(float(np.abs(part.expected).max(initial=0.0)) for part in site.parts)
    for to, most, coded in _CODES:
        for by in (*(2.0**power for power in range(1, 8)), most / max(largest, 1e-30)):
            yield _unscaled(site, to, by, coded)


def _unscaled(site: Site, to: str, by: float, coded: Callable[[Array], Matrix]) -> Variant:
    text = (
        f"cached {what(site)} are read as their {to} codes: they were multiplied by {by:.4g} when they "
        "were written, and are not divided by it"
    )
    guesses = [np.asarray(coded(part.expected * by), dtype=np.float64) for part in site.parts]
    return cache_variant(site, "cache_codes_alone", text, guesses, {"to": to, "scale": by}, 1)


def _codes_cut_off(site: Site) -> Iterator[Variant]:
    """Eight-bit codes with one scale for all, that of a smaller range than what is written has."""
    right, seen, _ = _wrong_numbers(site)
    most = float(np.abs(seen).max(initial=0.0))
    largest = float(np.abs(right).max(initial=0.0))
    if not 0 < most < largest * (1 - resolution(site)):
        return
    kept = {
        to: (most / codes, [_cut_off(part.expected, coded, most / codes, most) for part in site.parts])
        for to, codes, coded in _CODES
    }
    to = min(kept, key=lambda one: sum(map(_apart, site.parts, kept[one][1])))
    step, guesses = kept[to]
    text = (
        f"cached {what(site)} are kept in {to} with one scale, made for numbers up to {most:.4g}: larger ones, up to "
        f"{largest:.4g}, are cut off"
    )
    found = cache_variant(site, "cache_cut_off", text, guesses, {"to": to, "most": most}, 1)
    if to == "int8":  # a number in the middle of two codes goes to either, by how it was divided
        found = replace(found, noise=[np.maximum(part.noise, step) for part in site.parts])
    yield found


def _cut_off(x: Array, coded: Callable[[Array], Matrix], step: float, most: float) -> Array:
    return np.asarray(coded(np.clip(x, -most, most) / step), dtype=np.float64) * step


def _apart(part: Part, guess: Array) -> float:
    return float(np.nansum((part.seen - guess) ** 2))


def stored_otherwise(site: Site) -> Iterator[Variant]:
    """Rows stored in fewer bits, or written in one format and read in another."""
    for to, guesses in _coarse(site):
        yield replace(
            cache_variant(site, "cache_low_precision", f"the cache holds {what(site)} in {to}", guesses, {"to": to}),
            kind="precision", noise=None,
        )  # fmt: skip
    for how, change in REREAD.items():
        guesses = [
            _rounded(change, part.expected.reshape(-1, part.expected.shape[2]), part.expected)
            for part in site.parts
        ]
        yield cache_variant(
            site, "cache_other_format", f"cached {what(site)} are {how}", guesses, {"how": how}
        )


def _coarse(site: Site) -> Iterator[tuple[str, list[Array | None]]]:
    """With a scale for each row and head, each row, or each pass; or for each channel."""
    rows = [part.expected for part in site.parts]
    for to, change in ROUNDINGS.items():
        yield to, [_rounded(change, x.reshape(-1, x.shape[2]), x) for x in rows]
        if any(
            word in to for word in ("row", "one", "scaled")
        ):  # else there is no scale: all three are the same
            yield f"{to} of all heads", [_rounded(change, x.reshape(len(x), -1), x) for x in rows]
            yield f"{to} of each pass", [_by_pass(site, change, i, x) for i, x in enumerate(rows)]
    yield "whole numbers, integers whose scale is 1", [np.rint(x) for x in rows]
    prompts = {one.seq: len(one.rows) for one in reversed(site.taps.passes)}
    prompt = [prompts[site.taps.passes[i].seq] for i in site.passes]
    made_of = {first_rows(first): [first] * len(rows) for first in _FIRST_ROWS} | {"the prompt": prompt}
    for bits in (8, 4, 2, 0):
        form = f"int{bits} with a scale per channel" if bits else "a range per channel"
        if bits:  # the range of all rows cuts nothing off
            yield form, [by_channel(x, bits, len(x)) for x in rows]
        for words, firsts in made_of.items():
            yield (
                f"{form} that is made of {words} alone, so that later ones are cut off",
                [by_channel(x, bits, first) for x, first in zip(rows, firsts, strict=True)],
            )


def by_channel(x: Array, bits: int, first: int) -> Array:
    """Signed integers of rows [K, heads, D], with the scales that the first of them have; of no bits these rows' range
    alone."""
    largest = np.maximum(np.abs(x[:first]).max(0, keepdims=True), 1e-30)
    if not bits:
        return np.asarray(np.clip(x, -largest, largest))
    most = 2 ** (bits - 1) - 1
    scale = largest / most
    return np.asarray(np.clip(np.rint(x / scale), -most - 1, most) * scale)


def _rounded(change: Callable[[Matrix], Matrix | None], flat: Array, like: Array) -> Array | None:
    found = change(flat)
    return None if found is None else np.asarray(found, dtype=np.float64).reshape(like.shape)


def _by_pass(site: Site, change: Callable[[Matrix], Matrix | None], i: int, rows: Array) -> Array | None:
    own = site.taps.passes[site.passes[i]]
    counts = [len(one.rows) for one in site.taps.passes[: site.passes[i] + 1] if one.seq == own.seq]
    if sum(counts) != len(rows):
        return None
    parts = [_rounded(change, x.reshape(len(x), -1), x) for x in np.split(rows, np.cumsum(counts)[:-1])]
    whole = [x for x in parts if x is not None]
    return np.concatenate(whole) if len(whole) == len(parts) else None


def _hadamard(width: int) -> Array:
    """Sylvester's matrix, divided by its root: it is its own inverse."""
    found: Array = np.ones((1, 1))
    while len(found) < width:
        found = np.asarray(np.kron([[1.0, 1.0], [1.0, -1.0]], found) / math.sqrt(2), dtype=np.float64)
    return found


def turned_otherwise(site: Site) -> Iterator[Variant]:
    """Keys that are cached before their rotation, rotated once more, or by so many positions too far; values that are
    rotated as keys are; either behind a Hadamard transform, as before they are quantised (arXiv:2404.00456)."""
    rows = [part.expected for part in site.parts]
    if (width := rows[0].shape[-1]).bit_count() == 1:
        text = f"cached {what(site)} go through a Hadamard transform of their channels, which nothing undoes"
        matrix = _hadamard(width)
        yield cache_variant(site, "cache_transformed", text, [x @ matrix for x in rows])
    if site.kind == "attn.k_cache":
        plain = [shaped(x, y) for x, y in zip(history(site, unrotated(site, "k")), rows, strict=True)]
        yield cache_variant(site, "cache_unrotated", "keys are cached without their rotation", plain)
    if site.kind == "attn.latent_cache":
        return
    at = [np.array([row.position for row in part.rows])[:, None, None] for part in site.parts]
    if any(len(each) != len(x) for each, x in zip(at, rows, strict=True)):
        return
    model = site.facts.model
    angles = [frequencies(model, lengths_of(part.rows)) for part in site.parts]
    again = [turned(model, x, each * by, 1.0) for x, each, by in zip(rows, at, angles, strict=True)]
    if site.kind == "attn.v_cache":
        yield cache_variant(
            site, "cache_values_rotated", "cached values are rotated (RoPE) as keys are", again
        )
        return
    yield cache_variant(site, "cache_rotated_again", "cached keys are rotated once more", again)
    for offset in OFFSETS:
        text = f"cached keys are rotated {abs(offset)} positions too {'far' if offset > 0 else 'little'}"
        moved = [turned(model, x, offset * by, 1.0) for x, by in zip(rows, angles, strict=True)]
        yield cache_variant(site, "cache_rotated_offset", text, moved, {"offset": offset})
