"""Maps of the sum over the ranks: each rank's term counted other times than once, another reduction, and terms or sums
that are what a buffer held before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import GATE_UP, MULTIPLIED, QKV
from lockstep.engine.graph.formula import product
from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.hypotheses.fits import least_squares, nearest_rows
from lockstep.workbench.diagnosis.hypotheses.maps import Mapped
from lockstep.workbench.diagnosis.hypotheses.passes import passes_of
from lockstep.workbench.diagnosis.hypotheses.products.wrong import Wrong, mapped
from lockstep.workbench.diagnosis.operations.shares import rank_spans
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

Indices = NDArray[np.intp]
#: Kinds of taps whose tensors may lie in one buffer, as wide as each other.
_SHARED: Sequence[tuple[str, ...]] = (
    (
        "attn.o_proj", "mlp.down", "attn.o_proj.partial", "mlp.down.partial", "attn_norm", "mlp_norm",
        "attn_residual", "mlp_residual",
    ),
    (*QKV, "attn.context"),
    (*GATE_UP, "mlp.act"),
)  # fmt: skip
#: What the partials [R, N, H] may be reduced by instead of their sum.
_REDUCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "their maximum": lambda p: p.max(0),
    "their minimum": lambda p: p.min(0),
    "their product": lambda p: p.prod(0),
    "the one of the largest magnitude": lambda p: np.take_along_axis(p, np.abs(p).argmax(0)[None], 0)[0],
}


def counted(site: Site) -> Iterator[Mapped]:
    """The ranks' partials and the bias count other times than once each: fitted together, then read as whole numbers
    or shares of the ranks. Of a product of which no partial was recorded each is computed from its rank's columns."""
    wrong = Wrong.of(site)
    partials = site.inputs.get("partial") if site.operation == "reduce" else _partials(site)
    if wrong is None or partials is None or (len(partials) < 2 and not wrong.rest.any()):
        return
    terms = [*partials, *([np.broadcast_to(wrong.rest, wrong.seen.shape)] if wrong.rest.any() else [])]
    design = np.stack([term[wrong.inside].ravel() for term in terms], axis=1)
    if len(design) < 4 * len(terms) or not np.isfinite(design).all():
        return
    by = least_squares(design, wrong.seen[wrong.inside].ravel())
    ranks = len(partials)
    near = [_well_known(float(x), ranks) for x in by]
    edit = _pattern(site, near[:ranks], near[ranks] if len(near) > ranks else 1.0)
    if edit is not None:
        yield edit, np.tensordot(np.array(near), np.stack(terms), 1), 0
    else:
        reported = ", ".join(f"{x:.7g}" for x in by[:ranks])
        yield mapped("summed_wrongly", at=(reported,)), np.tensordot(by, np.stack(terms), 1), len(by)


def summed_already(site: Site) -> Iterator[Mapped]:
    """A rank's own term is what all ranks' terms come to: each of the in features of all ranks is multiplied, or the
    terms were added up before they are."""
    declared, whole = site.declared, site.facts.weight(site.weights["weight"])
    if declared is None or not declared.summed or site.columns is None or whole is None:
        return
    x = site.taps.whole(site.near(declared.inputs["x"]), site.passes)
    if x is None or x.ndim != 2 or x.shape != (len(site.seen), whole.shape[1]):
        return
    bias = site.facts.vector(site.weights["bias"]) if "bias" in site.weights else None
    found = product(x, whole) + (0.0 if bias is None else bias)
    yield mapped("summed_already", float(len(site.taps.ranks))), found, 0


def _partials(site: Site) -> Array | None:
    name, weight = MULTIPLIED.get(site.kind), site.facts.weight(site.weights["weight"])
    if name is None or len(site.taps.ranks) < 2 or weight is None:
        return None
    partials = []
    for rank in site.taps.ranks:
        x = site.rows_of(site.near(name), rank)
        _, columns = rank_spans(f"{site.tap}.partial", "linear", rank, site.taps, site.facts)
        own = weight if columns is None else weight[:, columns]
        if x is None or x.ndim != 2 or x.shape[1] != own.shape[1]:
            return None
        partials.append(product(x, own))
    return np.stack(partials)


def _well_known(by: float, ranks: int) -> float:
    """The whole number or share of the ranks that a fitted count stands for; itself where it is near none."""
    nearest = min((*range(-1, ranks + 3), 1 / ranks, 0.5), key=lambda value: abs(value - by))
    return float(nearest) if abs(nearest - by) < 0.02 else by


#: Where the bias stands in a product and in a sum.
_BIAS = (1,)


def _pattern(site: Site, counts: list[float], bias: float) -> Edit | None:
    """What a pattern of counts is; None of one without a name."""
    ranks, whole = len(counts), len(set(counts)) == 1
    if whole and counts[0] == 1:
        if bias in (0, -1, 1):
            return mapped("bias_times", bias) if bias != 1 else None
        return Edit(
            _BIAS, "applied", ("scaled", bias)
        )  # as the generator of edits has it, so that both are one cause
    if whole and ranks > 1 and counts[0] in (2, ranks):
        return mapped("summed_twice", bias, counts[0])
    if whole and ranks > 1 and np.isclose(counts[0], 1 / ranks):
        return mapped("averaged", bias, counts[0], float(ranks))
    if whole and counts[0] == 0:
        return mapped("product_missing", bias)
    lost = [str(rank) for rank, count in enumerate(counts) if count == 0]
    if sorted(counts) == [*([0.0] * (ranks - 1)), 1.0] and len(site.ranks) == 1:
        # Whoever shares their sum does not go on with a partial of his own.
        only = counts.index(1.0)
        return mapped("not_reduced" if only == site.rank else "one_partial", bias, at=(str(only),))
    if set(counts) == {0.0, 1.0}:
        return mapped("rank_missing", bias, at=(", ".join(lost),))
    if set(counts) == {1.0, 2.0}:
        more = [str(rank) for rank, count in enumerate(counts) if count == 2]
        return mapped("rank_repeated", bias, at=(", ".join(more),))
    return None


def reduced_otherwise(site: Site) -> Iterator[Mapped]:
    """The maximum, for one, in place of the sum."""
    partials, wrong = site.inputs["partial"], Wrong.of(site)
    if wrong is not None and len(partials) > 1 and np.isfinite(partials).all():
        for words, reduced in _REDUCTIONS.items():
            yield mapped("reduced_otherwise", words), reduced(partials) + wrong.rest, 0


def in_eight_bits(site: Site) -> Iterator[tuple[Edit, Array, Array]]:
    """A sum in eight bits by one rank's scale, one a pass or one a token; with what its rounding may leave."""
    partials, wrong = site.inputs["partial"], Wrong.of(site)
    if wrong is None or len(partials) < 2 or not np.isfinite(partials).all():
        return
    for which, groups in (
        ("pass", list(passes_of(site).values())),
        ("token", [[i] for i in range(len(site.rows))]),
    ):
        steps = np.empty((len(partials), len(site.rows), 1))
        for own in groups:
            steps[:, own] = np.maximum(np.abs(partials[:, own]).max((1, 2), keepdims=True) / 127, 1e-300)
        codes = np.rint(partials / steps).sum(0)
        for rank in range(len(partials)):
            edit = mapped("partials_by_one_scale", float(rank), which)
            yield edit, codes * steps[rank] + wrong.rest, np.broadcast_to(steps[rank], wrong.right.shape)


# --- what a buffer held before ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """What a tap held, all tokens one below the other."""

    kind: str
    layer: int
    rows: Array


def former_output(site: Site) -> Iterator[Mapped]:
    """The whole output is what another operation gave. (`maps` reports on this one's for other tokens.)"""
    wrong = Wrong.of(site)
    if wrong is not None:
        own = (site.kind, site.layer)
        pool = [one for one in _pool(site, site.rank, len(wrong.seen)) if (one.kind, one.layer) != own]
        for edit, found, cost in _sources(wrong, wrong.seen, pool):
            predicted = wrong.right.copy()
            predicted[wrong.rows] = found
            yield replace(edit, detail=("stale_output", *edit.detail)), predicted, cost


def former_partials(site: Site) -> Iterator[Mapped]:
    """One rank's term of the sum is."""
    wrong, partials = Wrong.of(site), site.inputs["partial"]
    if wrong is None or len(partials) < 2:
        return
    for rank, own in enumerate(partials):
        rest = wrong.right - own
        for edit, found, cost in _sources(wrong, wrong.seen - rest, _pool(site, rank, len(wrong.seen))):
            predicted = wrong.right.copy()
            predicted[wrong.rows] = rest[wrong.rows] + found
            yield (
                replace(edit, detail=("stale_partial", *edit.detail), at=(*edit.at, float(rank))),
                predicted,
                cost,
            )


def _pool(site: Site, rank: int, tokens: int) -> list[_Held]:
    """What a rank held of this width, this layer's operation first."""
    found = []
    for layer in range(site.facts.model.num_layers):
        for kind in next((kinds for kinds in _SHARED if site.kind in kinds), (site.kind,)):
            rows = site.rows_of(f"layers.{layer}.{kind}", rank)
            if rows is not None and rows.shape == (tokens, site.seen.shape[1]) and np.isfinite(rows).all():
                found.append(_Held(kind, layer, rows))
    return sorted(found, key=lambda one: (one.kind, one.layer) != (site.kind, site.layer))


def _sources(wrong: Wrong, seen: Array, pool: Sequence[_Held]) -> Iterator[Mapped]:
    """What the wrong rows [W, H] are: one tensor, the same number of tokens before each, or where that is not so the
    nearest row of each. The edit has its tap, and how many tokens before."""
    if not pool:
        return
    site, tokens = wrong.site, len(pool[0].rows)
    nearest = nearest_rows(seen[wrong.rows], np.concatenate([one.rows for one in pool]))
    which, row = nearest // tokens, nearest % tokens
    place = {(one.seq, one.position): i for i, one in enumerate(site.rows)}
    back = [_back(site, int(i), int(j)) for i, j in zip(wrong.rows, row, strict=True)]
    sources = Counter(zip(which.tolist(), back, strict=True))
    (common, by), _ = sources.most_common(1)[0]
    held = pool[common]
    if by is not None and (held.kind, held.layer, by) != (site.kind, site.layer, 0):
        from_ = [place.get((site.rows[i].seq, site.rows[i].position - by)) for i in wrong.rows]
        rows = np.stack(
            [seen[i] if j is None else held.rows[j] for i, j in zip(wrong.rows, from_, strict=True)]
        )
        missing = sum(j is None for j in from_)
        if missing < len(wrong.rows):
            yield Edit((), "map", (held.kind, float(by)), at=(_words(site, held, by),)), rows, missing
    if len(sources) > 1 or by is None:
        rows = np.stack([pool[i].rows[j] for i, j in zip(which, row, strict=True)])
        first = site.rows[int(row[0])]
        for_ = f"for other tokens: first that of sequence {first.seq}'s position {first.position}"
        just_before = len(sources) == 1 and bool((row == wrong.rows - 1).all())
        words = f"{_words(site, held, 0)} {'for the token that ran just before' if just_before else for_}"
        yield Edit((), "map", (held.kind, "others"), at=(words,)), rows, 1 if just_before else len(wrong.rows)


def _back(site: Site, own: int, other: int) -> int | None:
    """How many tokens before its own one a row is; None of another sequence."""
    a, b = site.rows[own], site.rows[other]
    return a.position - b.position if a.seq == b.seq else None


def _words(site: Site, held: _Held, by: int) -> str:
    """What a tap held, so many tokens before."""
    words = "its own" if held.layer == site.layer else f"that of layer {held.layer}"
    if held.kind.removesuffix(".partial") != site.kind.removesuffix(".partial"):
        words = f"what layers.{held.layer}.{held.kind} held"
    tokens = f"{abs(by)} tokens" if abs(by) > 1 else "the token"
    return f"{words} of {tokens} {'before' if by > 0 else 'after'}" if by else words
