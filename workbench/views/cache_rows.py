"""The rows of the KV cache: norms by layer, rank and position, errors against golden's rows, and anomalies: slots that
are empty, overwritten or stale, or that hold the row of another slot or head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.errors import SessionError
from lockstep.workbench.views.cached_lengths import runs, span
from lockstep.workbench.views.chosen_keys import newest_left_out
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

#: The most findings that are listed; the map marks all of them.
_MOST = 12

Rows = NDArray[np.float32]  # [positions, heads, head_dim] of one layer on one rank


@dataclass(frozen=True, slots=True, eq=False)
class CacheRows:
    """What was captured of the cache after a step. `values[layers × ranks, positions]`: L2 norms, or the error
    relative to golden's norm; -inf where a layer was not captured, or has no row yet. `findings` are (words, cells of
    the map). `left_out`: by layer which positions an indexer did not choose for the newest query."""

    values: NDArray[np.float32] | None
    ranks: int
    against_golden: bool
    has_golden: bool
    findings: tuple[str, ...] = ()
    marks: frozenset[tuple[int, int]] = frozenset()
    left_out: Mapping[int, NDArray[np.bool_]] = field(default_factory=dict)


#: What a cache holds, in words, by its tap.
CACHED: Mapping[str, str] = {
    "k_cache": "keys", "v_cache": "values", "rope_cache": "rotated parts of keys", "latent_cache": "latents",
}  # fmt: skip
_OF_LATENTS: Mapping[str, str] = {"k_cache": "rope_cache", "v_cache": "latent_cache"}


def cached_as(has_tap: Callable[[str], bool], kind: str) -> str:
    """The cache in place of that of keys ("k_cache") or values ("v_cache") where a model caches latents."""
    latent = _OF_LATENTS.get(kind)
    return latent if latent is not None and has_tap(f"layers.0.attn.{latent}") else kind


@dataclass(slots=True)
class _Findings:
    """Anomalies: each wording once, with the layers that it holds for."""

    layers: dict[str, list[int]] = field(default_factory=dict)
    marks: set[tuple[int, int]] = field(default_factory=set)

    def add(self, words: str, layer: int, row: int, positions: NDArray[np.intp]) -> None:
        found = self.layers.setdefault(words, [])
        if layer not in found:
            found.append(layer)
        self.marks |= {(row, int(position)) for position in positions}

    def in_words(self) -> tuple[str, ...]:
        return tuple(f"{words}, layer{_spans(layers)}" for words, layers in list(self.layers.items())[:_MOST])


def cache_rows(source: SessionSource, where: Where, layers: int, kind: str, error: bool) -> CacheRows:
    """The rows of `kind`, one of CACHED, at `where`."""
    ranks = source.session.ranks
    now = _captured(source, where, layers, kind)
    length = max((len(rows) for rows in now.values()), default=0)
    golden = source.golden(where)
    if not length:
        return CacheRows(None, ranks, False, golden is not None)
    before = _captured(source, replace(where, step=where.step - 1), layers, kind) if where.step else {}
    theirs = _golden(golden, where, layers, kind, ranks) if golden is not None else {}
    sequence = source.sequence(where.step, where.branch, where.seq)
    written = set(sequence.positions) if sequence is not None else set()
    values = np.full((layers * ranks, length), -np.inf, np.float32)
    odd = _Findings()
    for (layer, rank), rows in now.items():
        y = layer * ranks + rank
        norms = _norms(rows)
        reference = theirs.get((layer, rank))
        if error and reference is not None:
            values[y, : len(rows)] = _error(rows, reference)
        elif not error:
            values[y, : len(rows)] = norms
        _look(odd, layer, y, rows, norms, kind)
        if source.passed(where, f"layers.{layer}.attn.{kind}") == where:
            _compare(odd, layer, y, rows, before.get((layer, rank)), written)
    unread = {
        layer: unseen
        for layer, _ in now
        if (unseen := newest_left_out(source, where, layer, length)) is not None
    }
    marks = frozenset(odd.marks)
    return CacheRows(values, ranks, error and bool(theirs), bool(theirs), odd.in_words(), marks, unread)


def _captured(source: SessionSource, where: Where, layers: int, kind: str) -> dict[tuple[int, int], Rows]:
    """The whole rows of each layer and rank, as far as they were captured: those of the step before, where this one is
    under way and has not come to a layer."""
    found: dict[tuple[int, int], Rows] = {}
    for layer in range(layers):
        tap = f"layers.{layer}.attn.{kind}"
        if not source.session.has_tap(tap):  # a layer that keeps a state
            continue
        step = source.passed(where, tap).step
        for rank in range(source.session.ranks):
            try:
                rows = source.session.tensor(
                    tap, step=step, rank=rank, seq=where.seq, branch=where.branch, slice=""
                )
            except SessionError:
                return found
            if rows is not None and rows.ndim == 3:
                found[layer, rank] = rows.astype(np.float32)
    return found


def _golden(
    golden: SessionSource, where: Where, layers: int, kind: str, ranks: int
) -> dict[tuple[int, int], Rows]:
    """The reference's rows, cut into the ranks' heads."""
    found: dict[tuple[int, int], Rows] = {}
    for layer in range(layers):
        tap = f"layers.{layer}.attn.{kind}"
        if not golden.session.has_tap(tap):
            continue
        whole = golden.session.rebuilt(tap, step=where.step, seq=where.seq).array
        if whole is not None and whole.ndim == 3:
            heads = max(1, whole.shape[1] // ranks)
            for rank in range(ranks):
                first = rank * whole.shape[1] // ranks
                found[layer, rank] = whole[:, first : first + heads].astype(np.float32)
    return found


def _norms(rows: Rows) -> NDArray[np.float32]:
    # A finite row has a finite norm: the squares of large values are past float32.
    norms: NDArray[np.float32] = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=(1, 2))).astype(np.float32)
    return norms


def _error(rows: Rows, golden: Rows) -> NDArray[np.float32]:
    """‖row − golden‖ / ‖golden‖ by position; infinite where there is no such row or its shape is another."""
    found = np.full(len(rows), np.inf, np.float32)
    if rows.shape[1:] == golden.shape[1:]:
        both = min(len(rows), len(golden))
        scale = np.maximum(_norms(golden[:both]), 1e-12)
        found[:both] = _norms(rows[:both] - golden[:both]) / scale
    return found


def _look(odd: _Findings, layer: int, y: int, rows: Rows, norms: NDArray[np.float32], kind: str) -> None:
    """What is odd about the rows by themselves."""
    if not rows.size:
        return
    nothing = np.flatnonzero(norms == 0)
    if nothing.size:
        odd.add(f"slot{_spans(nothing)}: nothing but zeros", layer, y, nothing)
    broken = np.flatnonzero(~np.isfinite(rows).all(axis=(1, 2)))
    if broken.size:
        odd.add(f"slot{_spans(broken)}: NaN or Inf", layer, y, broken)
        return
    for heads in _equal_heads(rows):
        odd.add(f"head{_spans(heads)}: the same rows", layer, y, np.arange(0))
    if kind in (
        "k_cache",
        "rope_cache",
    ):  # values of equal tokens are equal in the first layer; their keys are not, for RoPE
        flat = np.ascontiguousarray(rows.reshape(len(rows), -1))
        _, group, counts = np.unique(flat, axis=0, return_inverse=True, return_counts=True)
        twice = np.flatnonzero((counts[group.reshape(-1)] > 1) & (norms > 0))
        if twice.size:
            odd.add(f"slot{_spans(twice)}: the same key as in another slot", layer, y, twice)


def _equal_heads(rows: Rows) -> list[list[int]]:
    """Neighbouring heads that hold the very same rows, in groups."""
    groups = [[0]]
    for head in range(1, rows.shape[1]):
        if np.array_equal(rows[:, head], rows[:, head - 1]):
            groups[-1].append(head)
        else:
            groups.append([head])
    return [group for group in groups if len(group) > 1]


def _compare(odd: _Findings, layer: int, y: int, rows: Rows, before: Rows | None, written: set[int]) -> None:
    """What changed since the step before: only the slots of the new tokens may."""
    if before is None or before.shape[1:] != rows.shape[1:]:
        return
    both = min(len(before), len(rows))
    now, then = rows[:both], before[:both]
    # NaN is unequal to itself: a row of NaN that stays is not overwritten.
    changed = np.flatnonzero(((now != then) & ~(np.isnan(now) & np.isnan(then))).any(axis=(1, 2)))
    if changed.size:
        odd.add(f"slot{_spans(changed)}: overwritten, an older token's row is lost", layer, y, changed)
    if len(rows) < len(before):
        odd.add("rows of the step before are gone", layer, y, np.arange(0))
    stale = np.array(sorted(p for p in written if p >= len(rows)), np.intp)
    if stale.size or (written and len(rows) == len(before) and not changed.size):
        odd.add("nothing was written by this step: the rows are stale", layer, y, np.arange(0))


def _spans(numbers: NDArray[np.intp] | list[int]) -> str:
    """ "s 0–3, 7" or " 5"."""
    values = [int(n) for n in numbers]
    # Neighbours differ from their place in the list by the same number.
    spans = [
        span(values[first], values[last])
        for first, last, _ in runs([value - i for i, value in enumerate(values)])
    ]
    text = ", ".join(spans[:6]) + " …" * (len(spans) > 6)
    return f" {text}" if len(values) == 1 else f"s {text}"
