"""Caches inside of a fused attention, which shows none: what is tried of a cache that was recorded is put in the place
of the keys, the values, or both that attention reads, and judged by what comes out."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.attention.operands import in_place
from lockstep.workbench.diagnosis.hypotheses.attention.row_words import of_rows_in_words
from lockstep.workbench.diagnosis.hypotheses.attention.tensors import ROWS, of_rows
from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Change
from lockstep.workbench.diagnosis.hypotheses.attention.trials import (
    NEAR,
    PARTLY,
    Trial,
    judged,
    tried,
    worded,
)
from lockstep.workbench.diagnosis.hypotheses.setting import Wording
from lockstep.workbench.diagnosis.hypotheses.variant import Bank, Variant
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.recorded import Row
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.caches.cached_numbers import (
    codes_unscaled,
    stored_otherwise,
    turned_otherwise,
)
from lockstep.workbench.diagnosis.variants.caches.caches import what
from lockstep.workbench.diagnosis.variants.caches.layouts import layout_variant, layouts
from lockstep.workbench.diagnosis.variants.caches.stored_stages import stored_stages

#: What a variant is, whether of keys or of values: its name, and its text without that word.
_Key = tuple[str, str]
#: Slots of a page: the first rows of a sequence may be stored otherwise than the rest.
_PAGES = (4, 8, 16, 32, 64)
#: Of which rows each kind of change is tried.
_WHOLE = ("all",)
_PAGED = (*ROWS, *(f"{which} {page}" for page in _PAGES for which in ("before", "from")))


def caches_inside(site: Site) -> Iterator[Variant]:
    """Keys and values that were stored, laid out or rotated otherwise than they are read: made of a few passes, and of
    all that are wrong where they leave little in these."""
    if not judged(site):
        return
    tree = AttentionTree.of(site)
    for bank, ranges in _BANKS:
        some = _trials(tree, bank, ranges, [one.part for one in tree.sample])
        near = {key for key, trial in some if _left(tree, trial) <= NEAR}
        if near:
            yield from tried(tree, (trial for _, trial in _trials(tree, bank, ranges, tree.wrong, near)))


def _left(tree: AttentionTree, trial: Trial) -> float:
    found = tree.sampled(trial.changes, PARTLY)
    return np.inf if found is None else found[1]


def _trials(
    tree: AttentionTree,
    bank: Bank,
    ranges: Sequence[str],
    parts: Sequence[int],
    keys: Container[_Key] | None = None,
) -> Iterator[tuple[_Key, Trial]]:
    """What a bank has for some passes, all or of those keys."""
    caches = {role: as_cache(tree.site, role, parts) for role in tree.roles}
    ranges = _that_divide(ranges, max(len(part.expected) for at in caches.values() for part in at.parts))
    found = {role: dict(_keyed(bank, at, keys)) for role, at in caches.items()}
    for key in dict.fromkeys(key for every in found.values() for key in every):
        variants = {role: every[key] for role, every in found.items() if key in every}
        changes = {role: _change(one, parts) for role, one in variants.items()}
        yield from ((key, trial) for trial in _of_roles(variants, changes, caches, ranges))


def _that_divide(ranges: Sequence[str], longest: int) -> list[str]:
    """Those of a page that hold some rows of a cache, and not all."""
    pages = {f"{which} {page}" for page in _PAGES if page >= longest for which in ("before", "from")}
    return [one for one in ranges if one not in pages]


def _keyed(bank: Bank, cache: Site, keys: Container[_Key] | None) -> Iterator[tuple[_Key, Variant]]:
    """Keys and values that have the same key hold the same mistake."""
    for one in bank(cache):
        key = one.name, one.text.replace(what(cache), "rows")
        if keys is None or key in keys:
            yield key, one


def _change(one: Variant, parts: Sequence[int]) -> Change:
    """The rows that it predicts of those passes."""
    tensors: list[Array | None] = [None] * (max(parts) + 1)
    for part, rows in zip(parts, one.predicted, strict=True):
        tensors[part] = np.asarray(rows)
    return in_place(tensors)


def _of_roles(
    variants: Mapping[str, Variant],
    changes: Mapping[str, Change],
    caches: Mapping[str, Site],
    ranges: Sequence[str],
) -> Iterator[Trial]:
    """The same of keys and values, of keys, of values."""
    sides = [tuple(changes), *((role,) for role in changes)] if len(changes) > 1 else [tuple(changes)]
    for roles in sides:
        one, own = variants[roles[0]], what(caches[roles[0]])
        held = " and ".join(what(caches[role]) for role in roles)
        for rows in ranges:
            text = one.text.replace(own, held) + of_rows_in_words(rows)
            words = Wording(one.name, one.kind, text, one.fitted)
            yield worded(words, {role: of_rows(changes[role], rows) for role in roles}, one.parameters)


def as_cache(site: Site, role: str, parts: Sequence[int]) -> Site:
    """The cache of keys ("k") or values ("v") that a fused attention reads in some passes, as if it was recorded, and
    right."""
    held = []
    for part in parts:
        rows = site.parts[part].inputs[role]
        tokens = _rows(site, site.passes[part])
        held.append(Part(tokens, {}, rows, rows, np.zeros_like(rows), site.parts[part].largest))
    passes = tuple(site.passes[part] for part in parts)
    return replace(
        site, tap=site.near(f"attn.{role}_cache"), operation="cache", parts=tuple(held), passes=passes
    )


def _rows(site: Site, at: int) -> tuple[Row, ...]:
    """The tokens of a pass's sequence so far."""
    passes = site.taps.passes
    return tuple(row for one in passes[: at + 1] if one.seq == passes[at].seq for row in one.rows)


def _laid_out(cache: Site) -> Iterator[Variant]:
    """In one layout, and read in another; zeros where nothing was written."""
    for layout in layouts(cache.parts[0].expected.shape[2]):
        yield layout_variant(cache, layout, [np.nan_to_num(layout.of(part.expected)) for part in cache.parts])


#: Banks of a cache that was recorded, and of which rows each is tried.
_BANKS: tuple[tuple[Bank, tuple[str, ...]], ...] = (
    (turned_otherwise, ROWS),
    (stored_otherwise, _PAGED),
    (stored_stages, _WHOLE),
    (codes_unscaled, _WHOLE),
    (_laid_out, _WHOLE),
)
