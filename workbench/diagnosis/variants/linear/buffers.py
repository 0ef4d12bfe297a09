"""Variants of an output, or of one rank's term of a sum, that is what a buffer held before: of another layer, another
operation, another token or sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import GATE_UP, QKV
from lockstep.workbench.diagnosis.hypotheses.fits import nearest_rows
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Kinds of taps whose tensors may lie in one buffer, as wide as each other.
_SHARED: Sequence[tuple[str, ...]] = (
    (
        "attn.o_proj", "mlp.down", "attn.o_proj.partial", "mlp.down.partial", "attn_norm", "mlp_norm",
        "attn_residual", "mlp_residual",
    ),
    (*QKV, "attn.context"),
    (*GATE_UP, "mlp.act"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Held:
    """What a tap held, all tokens one below the other."""

    kind: str
    layer: int
    rows: Array


def former_output(site: Site) -> Iterator[Variant]:
    """The whole output is what another operation gave. (`moved` tells of this one's for other tokens.)"""
    part, deviation = site.parts[0], site.deviation
    if deviation is None or not part.fits or part.seen.ndim != 2:
        return
    kind = "reduce" if site.operation == "reduce" else "input"
    wrong = np.flatnonzero(deviation.scopes[0].any(1))
    pool = _pool(site, site.rank, len(part.seen))
    others = [one for one in pool if (one.kind, one.layer) != (site.kind, site.layer)]
    for words, rows in _sources(site, part.seen, wrong, others):
        text = f"the output is {words}: the buffer was read before it was written, or never was"
        predicted = part.expected.copy()
        predicted[wrong] = rows.found
        yield Variant("stale_output", kind, text, rows.figures, predicted, rows.parameters)


def former_partials(site: Site) -> Iterator[Variant]:
    """One rank's term of the sum is."""
    part, deviation = site.parts[0], site.deviation
    if deviation is None or not part.fits or len(part.inputs["partial"]) < 2:
        return
    wrong = np.flatnonzero(deviation.scopes[0].any(1))
    for rank, own in enumerate(part.inputs["partial"]):
        rest = part.expected - own
        for words, rows in _sources(site, part.seen - rest, wrong, _pool(site, rank, len(part.seen))):
            predicted = part.expected.copy()
            predicted[wrong] = rest[wrong] + rows.found
            text = f"rank {rank}'s partial in the sum is {words}"
            fitted = {"rank": rank, **rows.figures}
            yield Variant("stale_partial", "reduce", text, fitted, predicted, rows.parameters)


def _pool(site: Site, rank: int, tokens: int) -> list[_Held]:
    """What a rank held of this width, this layer's operation first."""
    kinds = next((kinds for kinds in _SHARED if site.kind in kinds), (site.kind,))
    own = (site.kind, site.layer)
    found = []
    for layer in range(site.facts.model.num_layers):
        for kind in kinds:
            rows = site.rows_of(f"layers.{layer}.{kind}", rank)
            if rows is not None and rows.shape == (tokens, site.seen.shape[1]) and np.isfinite(rows).all():
                found.append(_Held(kind, layer, rows))
    return sorted(found, key=lambda one: (one.kind, one.layer) != own)


@dataclass(frozen=True, slots=True)
class _Replacement:
    """Rows [W, H] in place of the wrong ones, what says which they are, and how many numbers that takes."""

    found: Array
    figures: dict[str, object]
    parameters: int


def _sources(
    site: Site, seen: Array, wrong: NDArray[np.intp], pool: Sequence[_Held]
) -> Iterator[tuple[str, _Replacement]]:
    """In words, the tensors and tokens that the wrong rows are: one tensor, the same number of tokens before each, or
    where that is not so the nearest row of each."""
    if not pool or not np.isfinite(seen[wrong]).all():
        return
    tokens = len(pool[0].rows)
    nearest = nearest_rows(seen[wrong], np.concatenate([one.rows for one in pool]))
    which, row = nearest // tokens, nearest % tokens
    place = {(one.seq, one.position): i for i, one in enumerate(site.rows)}
    back = [_back(site, int(i), int(j)) for i, j in zip(wrong, row, strict=True)]
    (common, by), _ = Counter(zip(which.tolist(), back, strict=True)).most_common(1)[0]
    held = pool[common]
    figures: dict[str, object] = {"layer": held.layer, "kind": held.kind}
    if by is not None and (held.kind, held.layer, by) != (site.kind, site.layer, 0):
        from_ = [place.get((site.rows[i].seq, site.rows[i].position - by)) for i in wrong]
        rows = np.stack([seen[i] if j is None else held.rows[j] for i, j in zip(wrong, from_, strict=True)])
        missing = sum(j is None for j in from_)
        if missing < len(wrong):
            yield _words(site, held, by), _Replacement(rows, {**figures, "tokens": by}, missing)
    if len(set(zip(which.tolist(), back, strict=True))) > 1:
        rows = np.stack([pool[i].rows[j] for i, j in zip(which, row, strict=True)])
        first = site.rows[int(row[0])]
        words = f"{_of(site, held)} for other tokens: first that of sequence {first.seq}'s position {first.position}"
        yield words, _Replacement(rows, figures, len(wrong))


def _back(site: Site, own: int, other: int) -> int | None:
    """How many tokens before its own one a row is; None of another sequence."""
    a, b = site.rows[own], site.rows[other]
    return a.position - b.position if a.seq == b.seq else None


def _of(site: Site, held: _Held) -> str:
    kind = held.kind.removesuffix(".partial")
    if kind != site.kind.removesuffix(".partial"):
        return f"what layers.{held.layer}.{held.kind} held"
    return "its own" if held.layer == site.layer else f"that of layer {held.layer}"


def _words(site: Site, held: _Held, by: int) -> str:
    if by == 0:
        return _of(site, held)
    tokens = f"{abs(by)} tokens" if abs(by) > 1 else "the token"
    return f"{_of(site, held)} of {tokens} {'before' if by > 0 else 'after'}"
