"""What a wrong mask may be: which keys each query was let see, read off the scores of all heads and passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.attention.mask_words import mask_words
from lockstep.workbench.diagnosis.hypotheses.attention.masks import masks as listed
from lockstep.workbench.diagnosis.hypotheses.attention.masks import overwritten
from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Change, Given
from lockstep.workbench.diagnosis.hypotheses.blocks import all_wrong_heads, in_place, places, scopes
from lockstep.workbench.diagnosis.hypotheses.setting import Wording
from lockstep.workbench.diagnosis.hypotheses.trial import evenly
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.attention import visible
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

Cells = NDArray[np.bool_]
#: Lengths of a run of first keys that are tried beside a window; rows on which a mask is tried first.
_FIRST, _ROWS = 8, 8


@dataclass(frozen=True, slots=True)
class SeenMask:
    """What one head was let see in one part: `cells` [T, K], of which `rows` [T] are to be explained."""

    part: int
    head: int
    cells: Cells
    rows: Cells

    @property
    def edges(self) -> set[int]:
        """Keys at which what is seen begins or ends, in the rows to be explained."""
        rows = self.cells[self.rows]
        return set((1 + np.flatnonzero((rows[:, 1:] != rows[:, :-1]).any(0))).tolist())


@dataclass(frozen=True, slots=True)
class Form:
    """A mask of the list: cells [T, K] for each part."""

    words: Wording
    cells: Sequence[Cells]

    def gives(self, seen: Sequence[SeenMask]) -> bool:
        """Whether it is what was seen, in all the rows to be explained."""
        return bool(seen) and all(
            np.array_equal(self.cells[one.part][one.rows], one.cells[one.rows]) for one in seen
        )

    def right(self, allowed: Sequence[Cells]) -> int:
        """Of how many parts it is the right mask [heads, T, K]."""
        return sum(np.array_equal(cells, own[0]) for cells, own in zip(self.cells, allowed, strict=True))


def masks(site: Site) -> Iterator[Variant]:
    """Variants of the mask of one layer on one rank."""
    if site.deviation is None or not all(part.fits for part in site.parts):
        return
    tree, scope = AttentionTree.of(site), scopes(site)
    right = [one.raw for one in tree.given]
    shown = [visible(site.facts, part.seen) for part in site.parts]
    allowed = [one.allowed for one in tree.given]
    at = [SeenMask(i, head, shown[i][head], scope[i][head].any(1)) for i, head in places(site)]
    if all(np.array_equal(one.cells[one.rows], allowed[one.part][one.head][one.rows]) for one in at):
        return  # each sees what it should
    known = _forms(tree, at)
    # Of those that fit, the ones that are right where the operation is.
    fitting = [(form.right(allowed), form) for form in known if form.gives(at)]
    most = max((right_in for right_in, _ in fitting), default=0)
    best = [form for right_in, form in fitting if right_in == most]
    for form in sorted(best, key=lambda one: one.words.name == "mask_of_the_cache")[:1]:
        cells = _of_forms(site, dict.fromkeys(all_wrong_heads(site), form))
        yield _variant(site, right, form.words.name, form.words.text, form.words.fitted, cells)
    if not fitting:
        yield from _keys_hidden(site, right, at, allowed)
        yield from _of_each_head(site, right, at, known)


def _forms(tree: AttentionTree, seen: Sequence[SeenMask]) -> list[Form]:
    """The masks of the list that some head may have, with sizes that are read off what was seen; one of those that are
    the same."""
    site, keys = tree.site, max(len(one.key_at) for one in tree.given)
    edges = sorted({edge for one in seen for edge in one.edges})
    sizes = {size for end in edges for size in range(2, end + 1) if end % size == 0}
    depths = [tree.given[one.part].far[one.cells & one.rows[:, None]] for one in seen]
    widths = {1 + int(x.max(initial=-1)) for x in depths}
    one_head = [replace(one, allowed=one.allowed[:1]) for one in tree.given]
    every = (*listed(keys, sorted({*sizes, *edges, *widths} - {0}), edges[:_FIRST]), *overwritten(tree.given))
    found: dict[bytes, Form] = {}
    some = [_some(one_head[one.part], one) for one in {one.head: one for one in seen}.values()]
    for (how, *rest), change in every:
        if not any(np.array_equal(_cells(change, given), cells) for given, cells in some):
            continue
        cells = [_cells(change, one) for one in one_head]
        words = mask_words(site, "allowed", str(how), rest)
        if words is not None:
            found.setdefault(b"".join(x.tobytes() for x in cells), Form(words, cells))
    return list(found.values())


def _cells(change: Change, given: Given) -> Cells:
    return np.asarray(change(given.allowed.astype(np.float64), given)[0] > 0)


def _some(given: Given, seen: SeenMask) -> tuple[Given, Cells]:
    """A few of the rows to be explained, and what was seen in them."""
    rows = evenly(np.flatnonzero(seen.rows), _ROWS)
    return replace(given, rows=rows, at=given.at[rows], allowed=given.allowed[:, rows]), seen.cells[rows]


def _variant(
    site: Site,
    right: Sequence[Array],
    name: str,
    text: str,
    fitted: Mapping[str, object],
    cells: Sequence[Cells],
    parameters: int = 0,
) -> Variant:
    """The right products under another mask, [heads, T, K]."""
    guesses = [np.where(seen, x, -np.inf) for seen, x in zip(cells, right, strict=True)]
    return Variant(name, "mask", text, fitted, in_place(site, guesses), parameters)


def _of_forms(site: Site, of_heads: Mapping[int, Form]) -> list[Cells]:
    """The mask of every part, with those heads' forms in the place of the right one."""
    cells = [~np.isneginf(part.expected) for part in site.parts]
    for head, form in of_heads.items():
        for made, own in zip(cells, form.cells, strict=True):
            made[head] = own
    return cells


def _keys_hidden(
    site: Site, right: Sequence[Array], at: Sequence[SeenMask], allowed: Sequence[Cells]
) -> Iterator[Variant]:
    """Single keys of a sequence that no query sees, in any wrong head or pass: padding of another sequence."""
    hidden: dict[int, set[int]] = {}
    for one in at:
        should = allowed[one.part][one.head]
        lost = np.flatnonzero((should & one.rows[:, None]).any(0) & ~(one.cells & one.rows[:, None]).any(0))
        seq = site.taps.passes[site.passes[one.part]].seq
        hidden[seq] = hidden.get(seq, set()) | set(lost.tolist())
    hidden = {seq: keys for seq, keys in hidden.items() if keys}
    if not hidden:
        return
    cells = []
    for part, index, may in zip(site.parts, site.passes, allowed, strict=True):
        gone = list(hidden.get(site.taps.passes[index].seq, ()))
        cells.append(may & ~np.isin(np.arange(part.expected.shape[2]), gone))
    which = "; ".join(f"of sequence {seq} the keys at {sorted(keys)[:8]}" for seq, keys in hidden.items())
    yield _variant(
        site, right, "mask_keys_hidden", f"single keys are masked: {which}: a mask of padding, or of another sequence",
        {"keys": {str(seq): sorted(keys) for seq, keys in hidden.items()}}, cells, sum(map(len, hidden.values())),
    )  # fmt: skip


def _of_each_head(
    site: Site, right: Sequence[Array], at: Sequence[SeenMask], known: Sequence[Form]
) -> Iterator[Variant]:
    """Heads whose masks differ from each other, each of a known form."""
    chosen: dict[int, Form] = {}
    for head in all_wrong_heads(site):
        own = [one for one in at if one.head == head]
        fitting = next((form for form in known if form.gives(own)), None)
        if fitting is None:
            return
        chosen[head] = fitting
    reported = "; ".join(f"head {head}: {form.words.text}" for head, form in list(chosen.items())[:4])
    text, fitted = (
        f"heads have masks of their own: {reported}",
        {str(h): form.words.name for h, form in chosen.items()},
    )
    yield _variant(site, right, "mask_of_heads", text, fitted, _of_forms(site, chosen), len(chosen))


def irregular_masks(site: Site) -> Iterator[Variant]:
    """Scores that are right, where keys are seen that should not be, or hidden that should not be, in no known form."""
    if not all(part.fits for part in site.parts):
        return
    cells = [np.isfinite(part.expected) for part in site.parts]
    patterns: set[tuple[int, int, int]] = set()  # (part, query, key)
    hidden = shown = 0
    for i, head in places(site):
        seen = visible(site.facts, site.parts[i].seen[head]) & ~np.isnan(site.parts[i].seen[head])
        hidden, shown = (
            hidden + int((cells[i][head] & ~seen).sum()),
            shown + int((seen & ~cells[i][head]).sum()),
        )
        patterns |= {(i, q, k) for q, k in np.argwhere(seen != cells[i][head]).tolist()}
        cells[i][head] = seen
    if not patterns:
        return
    part, query, key = min(patterns)
    row = site.parts[part].rows[query]
    reported = [f"hides {hidden} scores that should be seen"] * bool(hidden)
    reported += [f"shows {shown} that should be hidden"] * bool(shown)
    text = (
        f"the mask {' and '.join(reported)}, the others are right; the first is that of the query at {row.position} "
        f"(step {row.step}, sequence {row.seq}) with the key in row {key}"
    )
    fitted = {"hidden": hidden, "shown": shown}
    yield _variant(
        site, [one.raw for one in AttentionTree.of(site).given], "mask_irregular", text, fitted, cells, 1
    )
