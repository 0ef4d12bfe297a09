"""A cache that holds keys or values as they were at another stage of their computation: before the bias, before or
after one norm more, rotated otherwise; or another projection's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.blocks import history, shaped, unrotated
from lockstep.workbench.diagnosis.hypotheses.fits import nearest_rows
from lockstep.workbench.diagnosis.hypotheses.rotation.conventions import NAMED, RIGHT, Convention
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.expected import heads_of, normalised, turned
from lockstep.workbench.diagnosis.operations.rotary import frequencies, lengths_of, magnitude
from lockstep.workbench.diagnosis.operations.shares import rank_spans
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.caches.cached_numbers import turned_otherwise
from lockstep.workbench.diagnosis.variants.caches.caches import cache_variant, what

#: (name, text, rows [K, kv_heads, D] of each part).
_Stage = tuple[str, str, list[Array | None]]


def stored_stages(site: Site) -> Iterator[Variant]:
    """Variants of one layer's cache of keys or of values on one rank."""
    if not all(part.fits and len(part.rows) == len(part.expected) for part in site.parts):
        return
    for stages in (_biases, _norms, _rotations, _queries):
        for name, text, rows in stages(site):
            yield cache_variant(site, name, text, rows)


def stages_of_other_heads(site: Site) -> Iterator[Variant]:
    """Two at once: rows of another stage, or turned otherwise, each head of which stands in the place of another."""
    if site.deviation is None or not all(part.fits for part in site.parts):
        return
    wrong = [np.asarray(scope.any((1, 2))) for scope in site.deviation.scopes]
    seen = _heads_of_rows([part.seen for part in site.parts], wrong)
    if len(seen) < 2 or not np.isfinite(seen).all():
        return
    for one in (*turned_otherwise(site), *stored_stages(site)):
        order = nearest_rows(seen, _heads_of_rows(one.predicted, wrong))
        moved = np.flatnonzero(order != np.arange(len(order)))
        if len(moved):
            head = int(moved[0])
            text = (
                f"{one.text}; and heads stand in each other's place: head {head} is head {int(order[head])}"
            )
            yield replace(
                one, text=text, predicted=[np.asarray(x)[:, order] for x in one.predicted], parameters=1
            )


def _heads_of_rows(parts: Iterable[Array], wrong: Sequence[NDArray[np.bool_]]) -> Array:
    """The wrong rows of each head one behind the other, [heads, …]."""
    rows = np.concatenate([np.asarray(x)[at] for x, at in zip(parts, wrong, strict=True)])
    return rows.swapaxes(0, 1).reshape(rows.shape[1], -1)


def _rotated(site: Site, rows: Sequence[Array | None], form: Convention = RIGHT) -> list[Array | None]:
    """Each part's rows turned by the angles of their positions."""
    model, found = site.facts.model, list[Array | None]()
    for part, x in zip(site.parts, rows, strict=True):
        at = np.array([row.position for row in part.rows], dtype=np.float64)[:, None, None]
        angles = at * frequencies(model, lengths_of(part.rows))
        if x is None or (form != RIGHT and x.shape[-1] != 2 * angles.shape[-1]):
            found.append(None)
        elif form == RIGHT:
            found.append(turned(model, x, angles, magnitude(model)))
        else:
            found.append(form.rotate(x, angles) * magnitude(model))
    return found


def _recorded(site: Site, kind: str) -> list[Array | None]:
    """What a tap of the layer held so far, as heads."""
    return [shaped(x, part.expected) for x, part in zip(history(site, kind), site.parts, strict=True)]


def _biases(site: Site) -> Iterator[_Stage]:
    """Without the projection's bias, or with it once more."""
    projection = site.kind[5]
    name = f"model.layers.{site.layer}.self_attn.{projection}_proj.bias"
    bias = site.facts.vector(name)
    if bias is None:  # keys of latents have no such projection
        return
    span, _ = rank_spans(site.near(f"attn.{projection}_proj"), "linear", site.rank, site.taps, site.facts)
    bias = bias if span is None else bias[span]
    if not bias.any() or (projection == "k" and site.facts.model.qk_norm):
        return
    if bias.size != site.parts[0].expected[0].size:
        return
    added: list[Array | None] = [
        np.broadcast_to(heads_of(bias[None], site.facts.model.head_dim), part.expected.shape)
        for part in site.parts
    ]
    if projection == "k":
        added = _rotated(site, added)
    for times, words in ((-1, "before their bias is added"), (1, "with their bias added twice")):
        rows = [part.expected + times * x for part, x in zip(site.parts, added, strict=True) if x is not None]
        yield "cache_bias", f"{what(site)} are cached {words} ({name})", [*rows]


def _norms(site: Site) -> Iterator[_Stage]:
    """Keys before their norm, or normed by the queries' weight; either normed once more, with a weight or without."""
    model, name = site.facts.model, f"model.layers.{site.layer}.self_attn."
    words, rows = what(site), [part.expected for part in site.parts]
    weights = (
        site.facts.vector(f"{name}{kind}_norm.weight") for kind in "kq"
    )  # of a head, or of all at once
    own, other = (x if x is not None and x.size == rows[0].shape[-1] else None for x in weights)
    if site.kind == "attn.k_cache" and model.qk_norm:
        raw = _recorded(site, "attn.k_proj")
        yield "cache_before_norm", "keys are cached before their norm, though rotated", _rotated(site, raw)
        yield "cache_before_norm", "keys are cached before their norm and their rotation", raw
        if other is not None:
            by_other = [None if x is None else normalised(x, model.rms_eps) * other for x in raw]
            text = f"cached keys are normed by {name}q_norm.weight, not by {name}k_norm.weight"
            yield "cache_normed", text, _rotated(site, by_other)
    text = f"cached {words} are normed{' once more' if words == 'keys' and model.qk_norm else ''}"
    normed = [normalised(x, model.rms_eps) for x in rows]
    if own is not None:
        yield "cache_normed", f"{text} by {name}k_norm.weight", [x * own for x in normed]
    yield "cache_normed", f"{text} without a weight", [*normed]


def _rotations(site: Site) -> Iterator[_Stage]:
    """Keys that are rotated in another form on their way to the cache, or without the factor on cosine and sine."""
    if site.kind != "attn.k_cache":
        return
    plain, factor = _recorded(site, unrotated(site, "k")), magnitude(site.facts.model)
    for form, (_, words) in NAMED.items():
        text = f"cached keys are rotated otherwise than the keys are: {words}"
        yield "cache_rotated_otherwise", text, _rotated(site, plain, form)
    if factor != 1:
        text = f"cached keys lack the factor {factor:.5g} on cosine and sine"
        yield "cache_rotated_otherwise", text, [part.expected / factor for part in site.parts]


def _queries(site: Site) -> Iterator[_Stage]:
    """Heads of the queries in the cache: the first ones, or those that lead their group."""
    for kind, words in (("attn.q_rope", "queries"), ("attn.q_proj", "queries before their rotation")):
        parts = []
        for x, part in zip(history(site, kind), site.parts, strict=True):
            rows, heads = (
                None if x is None else heads_of(x, site.facts.model.head_dim),
                part.expected.shape[1],
            )
            parts.append(None if rows is None or rows.shape[1] % heads else rows)
        for which in ("the first heads", "the first head of each group"):
            chosen = []
            for x, part in zip(parts, site.parts, strict=True):
                heads = part.expected.shape[1]
                step = 1 if x is None or which == "the first heads" else x.shape[1] // heads
                chosen.append(None if x is None else x[:, ::step][:, :heads])
            text = f"the cache of {what(site)} holds {words}: {which}"
            yield "cache_queries", text, chosen
