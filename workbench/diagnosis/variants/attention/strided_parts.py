"""Attention over two parts of the keys, one of whose results is read by another stride of heads than it was written.

What the other part leaves of what was seen, over the share of the part, is what was read of it. Where the second head's
lies among what was written, the first's place taken for 0, gives the stride.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Made
from lockstep.workbench.diagnosis.hypotheses.attention.trials import judged
from lockstep.workbench.diagnosis.hypotheses.blocks import by_head, from_heads
from lockstep.workbench.diagnosis.hypotheses.variant import ELEMENTS_A_PARAMETER, PARTLY, Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.key_parts import Parts, Shares, splits
from lockstep.workbench.diagnosis.variants.attention.split_keys import parts_of, results_of

#: The share of what is read that may lie beyond what was written.
_BEYOND = 0.5


def strided_parts(site: Site) -> Iterator[Variant]:
    """Either part of each way to cut the keys in two."""
    if not judged(site):
        return
    tree = AttentionTree.of(site)
    if "context" not in tree.points:
        return
    for words, split in splits(max(one.raw.shape[2] for one in tree.given)):
        cut = [parts_of(one, split) for one in tree.given]
        if all(int(cut[i].max()) == 1 for i in tree.wrong):
            yield from (one for which in (0, 1) for one in _strided(tree, cut, which, words))


def _strided(tree: AttentionTree, cut: list[Parts], which: int, words: str) -> Iterator[Variant]:
    """Where one stride explains what was read of the part numbered `which`."""
    site, pitch, unknown = tree.site, 0, 0
    dim = site.facts.model.value_dim
    guesses = [part.expected for part in site.parts]
    for i in tree.wrong:
        right = tree.make(tree.given[i], {})
        written, read, rest = _of_part(right, by_head(site, site.parts[i].seen), cut[i], which)
        if not np.isfinite(read).all():
            return
        pitch = pitch or _pitch(written, read)
        found = _read_by(written, pitch)
        unknown += int(np.isnan(found).sum())
        share = Shares(right.probs, cut[i]).mass[..., which, None]
        made = rest + share * np.where(np.isnan(found), read, found)
        guess, part = from_heads(site, made), site.parts[i]
        known = ~np.isnan(from_heads(site, found))
        left, error = (np.linalg.norm((part.seen - x)[known]) for x in (guess, part.expected))
        if pitch == dim or known.mean() < 1 - _BEYOND or not left <= PARTLY * error:
            return
        guesses[i] = guess
    text = (
        f"attention runs over the keys {words}, and the result of the {('first', 'second')[which]} part is read from a "
        f"head to the next by {pitch} elements instead of {dim}"
    )
    cost = 1 + unknown // ELEMENTS_A_PARAMETER
    yield Variant("context_part_strided", "context", text, {"stride": pitch, "should_be": dim}, guesses, cost)


def _of_part(right: Made, seen: Array, parts: Parts, which: int) -> tuple[Array, Array, Array]:
    """Of a pass what the part gave and what was read of it, and what the other part adds, [heads, T, D] each."""
    results = results_of(right, parts)
    mass, rest = Shares(right.probs, parts).mass[..., which, None], results[..., 1 - which, :]
    with np.errstate(all="ignore"):
        return results[..., which, :] / mass, (seen - rest) / mass, rest


def _pitch(written: Array, read: Array) -> int:
    """Where in memory the first token's second head was read."""
    memory = written.swapaxes(0, 1).ravel()
    windows = np.lib.stride_tricks.sliding_window_view(memory, read.shape[2])
    return int(np.square(windows - read[min(1, len(read) - 1), 0]).sum(1).argmin())


def _read_by(written: Array, pitch: int) -> Array:
    """What lies at that stride of heads; NaN beyond what was written."""
    heads, tokens, dim = np.ogrid[tuple(slice(n) for n in written.shape)]
    memory = written.swapaxes(0, 1).ravel()
    at = (tokens * len(written) + heads) * pitch + dim
    return np.where(at < len(memory), memory[np.minimum(at, len(memory) - 1)], np.nan)
