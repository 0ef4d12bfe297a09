"""A cache that lies in memory in one layout and is read in another: rows with something between them, pages in which
dimensions lie in vectors. `index_maps` finds what strides alone give; these are read by none.

Each layout is an address for every element; what was written is put there, and read where the other layout has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.variant import UNEXPLAINED, Variant
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.caches.caches import cache_variant, what

#: Of K rows of some width the address of each element, [K, width].
_Addresses = Callable[[int, int], NDArray[np.int64]]

#: Slots of a page, and dimensions of a vector: vLLM's keys lie as [page, head, D / x, slot, x].
_PAGES, _VECTORS = (4, 8, 16, 32, 64, 128, 256), (2, 4, 8, 16, 32)
#: Elements that may lie between rows, such as a scale or padding to a boundary.
_BETWEEN = (*range(1, 9), 16, 32, 64)
#: The share of elements that may lie where nothing was written.
_UNWRITTEN = 0.25


@dataclass(frozen=True, slots=True)
class _MemoryLayout:
    """Where elements lie in memory: of all heads of a row side by side, or of each head by itself; `scaled`: behind
    each row its largest number, as its scale."""

    words: str
    address: _Addresses
    together: bool = False
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class Misread:
    """A cache that is written in one layout and read in another."""

    written: _MemoryLayout
    read: _MemoryLayout

    def of(self, x: Array) -> Array:
        """What is read of a cache [K, heads, D]; NaN where nothing was written."""
        rows = x.reshape(len(x), 1, -1) if self.written.together else x
        put, taken = (one.address(len(x), rows.shape[2]) for one in (self.written, self.read))
        memory = np.full((int(max(put.max(), taken.max())) + 2, rows.shape[1]), np.nan)
        memory[put] = rows.swapaxes(1, 2)
        if self.written.scaled:
            memory[put.max(1) + 1] = np.abs(rows).max(2)
        return np.asarray(memory[taken].swapaxes(1, 2).reshape(x.shape))


def other_layouts(site: Site) -> Iterator[Variant]:
    """The cache written in one layout and read in another."""
    if site.deviation is None or not all(part.fits for part in site.parts):
        return
    wrong = [i for i, scope in enumerate(site.deviation.scopes) if scope.any()]
    largest = max(wrong, key=lambda i: site.parts[i].expected.size)
    for layout in layouts(site.parts[largest].expected.shape[2]):
        if _explains(site.parts[largest], site.deviation.scopes[largest], layout):
            guesses: list[Array | None] = [
                _with_seen(part, layout) if i in wrong else None for i, part in enumerate(site.parts)
            ]
            yield layout_variant(site, layout, guesses)


def layout_variant(site: Site, layout: Misread, guesses: Sequence[Array | None]) -> Variant:
    text = (
        f"the cache of {what(site)} is written {layout.written.words} and read {layout.read.words}: "
        "elements are moved"
    )
    figures = {"written": layout.written.words, "read": layout.read.words}
    return cache_variant(site, "cache_layout", text, guesses, figures, 1)


def layouts(dim: int) -> Iterator[Misread]:
    """What was written and how it is read, both ways."""
    for together in (False, True):
        rows = "as rows of all heads" if together else "as rows"
        plain = _MemoryLayout(f"{rows} one behind the other", _rows(0), together)
        for count in _BETWEEN:
            apart = f"{rows} with {count} element{'s' * (count > 1)} between them"
            wider = _MemoryLayout(apart, _rows(count), together)
            yield from (Misread(wider, plain), Misread(plain, wider))
        scaled = _MemoryLayout(f"{rows} with its scale behind each", _rows(1), together, scaled=True)
        yield Misread(scaled, plain)
    plain = _MemoryLayout("as rows one behind the other", _rows(0))
    for page in _PAGES:
        for vector in _VECTORS:
            if vector < dim and dim % vector == 0:
                words = f"in pages of {page} slots by vectors of {vector} dimensions"
                tiled = _MemoryLayout(words, _in_vectors(page, vector))
                yield from (Misread(tiled, plain), Misread(plain, tiled))


def _rows(between: int) -> _Addresses:
    return lambda rows, width: np.arange(rows)[:, None] * (width + between) + np.arange(width)


def _in_vectors(page: int, vector: int) -> _Addresses:
    """Of each page the first `vector` dimensions of all slots stand before the next ones."""

    def address(rows: int, width: int) -> NDArray[np.int64]:
        at, dims = np.ogrid[:rows, :width]
        within = dims // vector * page * vector + at % page * vector + dims % vector
        return np.asarray(at // page * page * width + within)

    return address


def _with_seen(part: Part, layout: Misread) -> Array:
    """What is read, with what was seen where nothing was written: there may be anything."""
    found = layout.of(part.expected)
    return np.where(np.isnan(found), part.seen, found)


def _explains(part: Part, scope: NDArray[np.bool_], layout: Misread) -> bool:
    found = layout.of(part.expected)
    known = scope & ~np.isnan(found)
    left, error = (np.linalg.norm((part.seen - x)[known]) for x in (found, part.expected))
    return bool(known.sum() >= (1 - _UNWRITTEN) * scope.sum() and left <= UNEXPLAINED * error)
