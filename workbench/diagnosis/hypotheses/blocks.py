"""Attention's sites as their banks read them: one part a pass of a sequence, with heads apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import operation_of
from lockstep.engine.taps.names import local_name
from lockstep.workbench.diagnosis.operations.attention import expand
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: What is written to the cache of keys, and of values.
WRITTEN = {"k": "attn.k_rope", "v": "attn.v_proj"}

#: Operations that give a context.
CONTEXTS = ("context", "attention")

Scalar = TypeVar("Scalar", np.float64, np.bool_)


def positions(part: Part) -> NDArray[np.int64]:
    """Where the queries [T] stand."""
    return np.array([row.position for row in part.rows], dtype=np.int64)


def key_positions(part: Part) -> NDArray[np.int64]:
    """Where the keys [K] stand: the last one at the newest query, as far as there are positions for all."""
    keys = next(
        (len(part.inputs[role]) for role in ("k", "v") if role in part.inputs), part.expected.shape[-1]
    )
    return np.asarray(np.arange(keys) + max(0, int(positions(part).max(initial=-1)) + 1 - keys))


def by_head(site: Site, x: NDArray[Scalar]) -> NDArray[Scalar]:
    """Any tensor of an attention site with its heads first: of a context [T, heads * D] -> [heads, T, D]."""
    if site.operation in CONTEXTS:
        return x.reshape(len(x), -1, site.facts.model.value_dim).swapaxes(0, 1)
    return x.swapaxes(0, 1) if site.operation == "cache" else x


def from_heads(site: Site, x: Array) -> Array:
    """The reverse of `by_head`."""
    if site.operation in CONTEXTS:
        return x.swapaxes(0, 1).reshape(x.shape[1], -1)
    return x.swapaxes(0, 1) if site.operation == "cache" else x


def scopes(site: Site) -> list[NDArray[np.bool_]]:
    """Which elements of each part are to be explained, heads first."""
    assert site.deviation is not None, "banks are asked where something is wrong"
    return [by_head(site, scope) for scope in site.deviation.scopes]


def wrong_heads(site: Site) -> list[tuple[int, ...]]:
    """For each part the heads that are wrong."""
    return [tuple(np.flatnonzero(scope.reshape(len(scope), -1).any(1)).tolist()) for scope in scopes(site)]


def places(site: Site) -> Iterator[tuple[int, int]]:
    """(part, head) of everything that is wrong."""
    for index, heads in enumerate(wrong_heads(site)):
        for head in heads:
            yield index, head


def all_wrong_heads(site: Site) -> list[int]:
    return sorted({head for _, head in places(site)})


def others(site: Site, kind: str, layer: int | None = None, rank: int | None = None) -> list[Array | None]:
    """Another tap at the site's passes: of this layer and rank, or of another one."""
    tap = site.near(kind) if layer is None else f"layers.{layer}.{kind}"
    tensors = site.taps.tensors(tap, site.rank if rank is None else rank)
    own = layer is None and rank is None
    return [x if own else _finite(x) for x in (tensors[index] for index in site.passes)]


def _finite(x: Array | None) -> Array | None:
    """What another layer or rank holds, where it may be what was used here: its NaN follow from an error here, and
    would explain any NaN."""
    return x if x is not None and np.isfinite(x).all() else None


def history(site: Site, kind: str, layer: int | None = None, rank: int | None = None) -> list[Array | None]:
    """For each of the site's passes the rows of a tap of all tokens of its sequence so far, one below the other."""
    tap = site.near(kind) if layer is None else f"layers.{layer}.{kind}"
    tensors, found = site.taps.tensors(tap, site.rank if rank is None else rank), []
    for index in site.passes:
        seq = site.taps.passes[index].seq
        rows = [x for one, x in zip(site.taps.passes[: index + 1], tensors, strict=False) if one.seq == seq]
        whole = [x for x in rows if x is not None]
        joined = np.concatenate(whole) if whole and len(whole) == len(rows) else None
        found.append(joined if layer is None and rank is None else _finite(joined))
    return found


def cached(site: Site, which: str, layer: int | None = None, rank: int | None = None) -> list[Array | None]:
    """For each of the site's passes the keys ("k") or values ("v") that its layer, or another one, attends to: of the
    cache as it was recorded, or else what was written to it."""
    near = site.near(f"attn.{which}_cache") if layer is None else f"layers.{layer}.attn.{which}_cache"
    if site.taps.captured(near):
        return others(site, f"attn.{which}_cache", layer, rank)
    dim, written = site.facts.model.head_dim, history(site, written_to(site, which, layer), layer, rank)
    return [None if x is None else x.reshape(len(x), -1, dim) for x in written]


def written_to(site: Site, which: str, layer: int | None = None) -> str:
    """The tap of what is written to the cache of keys ("k") or values ("v"): of another layer by its name there."""
    operation = operation_of(site.facts.model, f"attn.{which}_cache")
    written = WRITTEN[which] if operation is None else operation.inputs["written"]
    return written if layer is None else local_name(written)


def unrotated(site: Site, which: str) -> str:
    """The tap that rotation reads: the normalised heads where the model normalises q and k."""
    return f"attn.{which}_{'norm' if site.facts.model.qk_norm else 'proj'}"


def products(q: Array, k: Array) -> Array:
    """[T, heads, D], [K, kv_heads, D] -> [heads, T, K]."""
    return np.asarray(np.einsum("thd,khd->htk", q, expand(k, q.shape[1]), optimize=True))


def shaped(x: Array | None, like: Array) -> Array | None:
    """[N, heads * D] or [N, heads, D] in the shape of `like`; None where it has another number of elements."""
    return x.reshape(like.shape) if x is not None and x.size == like.size else None


def in_heads(x: Array, cached: Array) -> Array | None:
    """Written rows in the heads of cached ones; None where those are others, as of a cache that repeats them."""
    heads = cached.shape[1:]
    return x.reshape(-1, *heads) if x[:1].size == np.prod(heads) else None


def in_place(site: Site, guesses: Sequence[Array | None]) -> list[Array]:
    """A prediction for every part: the guess where there is one of the right shape, else the expectation."""
    return [
        guess if guess is not None and guess.shape == part.seen.shape else part.expected
        for guess, part in zip(guesses, site.parts, strict=True)
    ]


def usual_noise(site: Site) -> list[Array]:
    """The mean noise of each part in all of its elements: for variants that put numbers where others belong."""
    finite = [np.where(np.isfinite(part.noise), part.noise, 0.0) for part in site.parts]
    return [np.full(x.shape, np.sqrt(np.mean(x**2)) if x.size else 0.0) for x in finite]
