"""Caches inside of a fused attention, which shows none: what is tried of a cache that was recorded is put in the place
of the keys, the values, or both that attention reads, and judged by what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.attention.operands import in_place
from lockstep.workbench.diagnosis.hypotheses.attention.tensors import ROWS, of_rows
from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Change
from lockstep.workbench.diagnosis.hypotheses.attention.trials import Trial, judged, tried, worded
from lockstep.workbench.diagnosis.hypotheses.attention.words import of_rows_in_words
from lockstep.workbench.diagnosis.hypotheses.setting import Told
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.recorded import Row
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.variants.caches.cached_numbers import stored_otherwise, turned_otherwise
from lockstep.workbench.diagnosis.variants.caches.caches import what
from lockstep.workbench.diagnosis.variants.caches.layouts import layout_variant, layouts
from lockstep.workbench.diagnosis.variants.caches.stored_stages import stored_stages

#: Slots of a page: the first rows of a sequence may be stored otherwise than the rest.
_PAGES = (4, 8, 16, 32, 64)
#: Of which rows each kind of change is tried.
_WHOLE = ("all",)
_PAGED = (*ROWS, *(f"{which} {page}" for page in _PAGES for which in ("before", "from")))


def caches_inside(site: Site) -> Iterator[Variant]:
    """Keys and values that were stored, laid out or rotated otherwise than they are read."""
    if judged(site):
        tree = AttentionTree(site)
        yield from tried(tree, _trials(tree))


def _trials(tree: AttentionTree) -> Iterator[Trial]:
    caches = {role: as_cache(tree.site, role) for role in tree.roles}
    for bank, ranges in _BANKS:
        found = {role: {_key(one, at): one for one in bank(at)} for role, at in caches.items()}
        for key in dict.fromkeys(key for every in found.values() for key in every):
            yield from _of_roles(
                {role: every[key] for role, every in found.items() if key in every}, caches, ranges
            )


def _of_roles(
    variants: Mapping[str, Variant], caches: Mapping[str, Site], ranges: Iterable[str]
) -> Iterator[Trial]:
    """The same of keys and values, of keys, of values."""
    changes: dict[str, Change] = {
        role: in_place([*map(np.asarray, one.predicted)]) for role, one in variants.items()
    }
    sides = [tuple(changes), *((role,) for role in changes)] if len(changes) > 1 else [tuple(changes)]
    for roles in sides:
        one, own = variants[roles[0]], what(caches[roles[0]])
        text = (
            one.text
            if len(roles) == 1
            else one.text.replace(own, " and ".join(what(caches[r]) for r in roles))
        )
        for rows in ranges:
            words = Told(one.name, one.kind, text + of_rows_in_words(rows), one.fitted)
            yield worded(words, {role: of_rows(changes[role], rows) for role in roles}, one.parameters)


def _key(one: Variant, cache: Site) -> tuple[str, str]:
    """What it is, whether of keys or of values."""
    return one.name, one.text.replace(what(cache), "rows")


def as_cache(site: Site, role: str) -> Site:
    """The cache of keys ("k") or values ("v") that a fused attention reads, as if it was recorded, and right."""
    parts = [
        Part(
            _rows(site, i),
            {},
            part.inputs[role],
            part.inputs[role],
            np.zeros_like(part.inputs[role]),
            part.largest,
        )
        for i, part in zip(site.passes, site.parts, strict=True)
    ]
    return replace(site, tap=site.near(f"attn.{role}_cache"), operation="cache", parts=tuple(parts))


def _rows(site: Site, at: int) -> tuple[Row, ...]:
    """The tokens of a pass's sequence so far."""
    passes = site.taps.passes
    return tuple(row for one in passes[: at + 1] if one.seq == passes[at].seq for row in one.rows)


def _laid_out(cache: Site) -> Iterator[Variant]:
    """In one layout, and read in another; zeros where nothing was written."""
    for layout in layouts(cache.parts[0].expected.shape[2]):
        yield layout_variant(cache, layout, [np.nan_to_num(layout.of(part.expected)) for part in cache.parts])


#: Banks of a cache that was recorded, and of which rows each is tried.
_BANKS: tuple[tuple[Callable[[Site], Iterable[Variant]], tuple[str, ...]], ...] = (
    (turned_otherwise, ROWS),
    (stored_otherwise, _PAGED),
    (stored_stages, _WHOLE),
    (_laid_out, _WHOLE),
)
