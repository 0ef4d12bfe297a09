"""Other tensors in the place of q, k and v: of another layer, rank, sequence, stage, or role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph.formula import FORMULAS, evaluate, numbers_of
from lockstep.workbench.diagnosis.hypotheses.attention.tree import AttentionTree, Change, Changes, Given
from lockstep.workbench.diagnosis.hypotheses.blocks import (
    WRITTEN,
    cached,
    history,
    in_heads,
    others,
    shaped,
    unrotated,
)
from lockstep.workbench.diagnosis.hypotheses.edits import Detail
from lockstep.workbench.diagnosis.hypotheses.rotation.conventions import NAMED, RIGHT, Convention
from lockstep.workbench.diagnosis.hypotheses.rotation.frequencies import KNOWN_BASES
from lockstep.workbench.diagnosis.operations.rotary import frequencies, lengths_of, magnitude
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: A tensor for each part; None where there is none.
Tensors = Sequence[Array | None]


def other_rows(site: Site, which: str) -> Iterator[tuple[Detail, Tensors]]:
    """What may be read in the place of cached keys ("k") or values ("v"): (detail, rows of each part)."""
    other = "v" if which == "k" else "k"
    yield ("role", other), cached(site, other)
    for layer in range(site.facts.model.num_layers):
        if layer != site.layer:
            yield ("layer", float(layer)), cached(site, which, layer)
    for rank in site.taps.ranks:
        if rank not in site.ranks:
            yield ("rank", float(rank)), cached(site, which, rank=rank)
    for seq in sorted({one.seq for one in site.taps.passes}):
        every = range(len(site.parts))
        yield ("sequence", float(seq)), [_of_sequence(site, which, seq, i) for i in every]
        yield ("written", float(seq)), [_of_sequence(site, which, seq, i, so_far=True) for i in every]
    if which == "k":
        yield ("stage", "unrotated"), history(site, unrotated(site, "k"))
        if site.facts.model.qk_norm:
            yield ("stage", "attn.k_proj"), history(site, "attn.k_proj")


def _of_sequence(site: Site, which: str, seq: int, i: int, *, so_far: bool = False) -> Array | None:
    """What another sequence has written, or `so_far`: before this pass; beyond its rows the right ones."""
    right = site.parts[i].inputs[which]
    if seq == site.taps.passes[site.passes[i]].seq:
        return None
    tensors = site.taps.tensors(site.near(WRITTEN[which]), site.rank)
    pairs = list(zip(site.taps.passes, tensors, strict=True))[: site.passes[i] if so_far else None]
    rows = [in_heads(x, right) for one, x in pairs if one.seq == seq and x is not None]
    found = np.concatenate([x for x in rows if x is not None] or [right[:0]])[: len(right)]
    return np.concatenate([found, right[len(found) :]]) if len(found) else None


def packed_before(site: Site, which: str) -> Tensors:
    """Of each part the keys ("k") or values ("v") of the sequences before its own, as far as the step has come, in
    front of its own; None where there are none."""
    tensors = site.taps.tensors(site.near(WRITTEN[which]), site.rank)
    found: list[Array | None] = []
    for i, part in zip(site.passes, site.parts, strict=True):
        mine, own = site.taps.passes[i], part.inputs[which]
        written = (
            in_heads(x, own)
            for one, x in zip(site.taps.passes, tensors, strict=True)
            if one.seq < mine.seq and one.step <= mine.step and x is not None
        )
        others = [x for x in written if x is not None]
        found.append(np.concatenate([*others, own]) if others else None)
    return found


def seen_before(tensors: Tensors) -> Change:
    """The mask with all keys that stand in front of a part's own."""

    def change(allowed: Array, given: Given) -> Array:
        whole = tensors[given.part]
        more = 0 if whole is None else len(whole) - allowed.shape[2]
        return np.concatenate([np.ones((*allowed.shape[:2], more)), allowed], axis=2)

    return change


def in_front(tensors: Tensors) -> Change:
    """A part's own rows with what stands in front of them."""

    def change(x: Array, given: Given) -> Array:
        whole = tensors[given.part]
        return x if whole is None else whole

    return change


def in_place(tensors: Tensors) -> Change:
    """The tensor of each pass where it has as many numbers; ValueError elsewhere."""

    def change(x: Array, given: Given) -> Array:
        found = shaped(tensors[given.part], x)
        if found is None or not np.isfinite(found).all():
            raise ValueError("no such tensor here")
        return found

    return change


def other_queries(site: Site) -> Iterator[tuple[Detail, Tensors]]:
    """What may be taken for the queries."""
    yield ("stage", "unrotated"), others(site, unrotated(site, "q"))
    if site.facts.model.qk_norm:
        yield ("stage", "attn.q_proj"), others(site, "attn.q_proj")
    for layer in range(site.facts.model.num_layers):
        if layer != site.layer:
            yield ("layer", float(layer)), others(site, "attn.q_rope", layer)
    for rank in site.taps.ranks:
        if rank not in site.ranks:
            yield ("rank", float(rank)), others(site, "attn.q_rope", rank=rank)


def of_another_layer(site: Site) -> Iterator[tuple[Detail, Changes]]:
    """Queries and keys of another layer: its probabilities are used again."""
    for layer in range(site.facts.model.num_layers):
        if layer != site.layer:
            q, k = others(site, "attn.q_rope", layer), cached(site, "k", layer)
            yield ("layer", float(layer)), {"q": queries_of(q), "k": in_place(k)}


def queries_of(tensors: Tensors) -> Change:
    """The tensor of each pass, of the queries that are asked for."""

    def change(x: Array, given: Given) -> Array:
        found = tensors[given.part]
        if found is None or found.size % (x.shape[1] * x.shape[2]) or not np.isfinite(found).all():
            raise ValueError("no such tensor here")
        return np.asarray(found.reshape(-1, *x.shape[1:])[given.rows])

    return change


# --- rotations inside of the kernel -------------------------------------------------------------------------


def rotations_inside(tree: AttentionTree) -> Iterator[tuple[str, Detail, Changes]]:
    """(point, detail, changes) of rotated queries and keys: turned once more, or back; where neither was recorded as
    it went in, turned by another convention or base."""
    yield from _inside(tree)
    model, whole = tree.site.facts.model, tree.site.facts.whole
    if model.query_scaling is None and whole.query_scaling is not None:
        text = "queries are multiplied by the factor of their position, as they are in other layers alone"
        yield "q", ("convention", "query_scaling_of_others", text), {"q": _by_position(whole, 1.0)}
    for sign, name in ((1.0, "again"), (-1.0, "back")):
        changes = {role: _turned(tree.site, role, RIGHT, sign) for role in ("q", "k")}
        for roles in (("q",), ("k",), ("q", "k")):
            yield "+".join(roles), ("rotated", name), {role: changes[role] for role in roles}


def _inside(tree: AttentionTree) -> Iterator[tuple[str, Detail, Changes]]:
    """Of queries and keys that were not recorded as they went in: other conventions and bases."""
    if any(tree.site.taps.captured(tree.site.near(f"attn.{which}_rope")) for which in "qk"):
        return  # judged there
    model = tree.site.facts.model
    if model.query_scaling is not None:
        text = "queries are not multiplied by the factor of their position"
        yield "q", ("convention", "query_scaling_missing", text), {"q": _by_position(model, -1.0)}
    if not model.rotary_dim:
        return
    none = without_rotation(tree.site)
    yield "q+k", ("convention", "rope_not_applied", "the rotation is not applied at all"), none
    for form in NAMED:
        both = {role: _turned(tree.site, role, form, 1.0, plain=True) for role in ("q", "k")}
        yield "q+k", ("convention", NAMED[form][0], NAMED[form][1]), both
    for base in KNOWN_BASES:
        if base != model.rope_theta:
            both = {role: _turned(tree.site, role, RIGHT, 1.0, base, plain=True) for role in ("q", "k")}
            yield "q+k", ("theta", base), both


def without_rotation(site: Site) -> Changes:
    """Queries and keys as they were before it."""
    return {
        "q": queries_of(others(site, unrotated(site, "q"))),
        "k": in_place(history(site, unrotated(site, "k"))),
    }


def _by_position(model: ModelConfig, power: float) -> Change:
    """Queries with the factor of their position once more, or without it."""

    def change(x: Array, given: Given) -> Array:
        at = {"x": np.ones((len(x), 1, 1)), "position": given.at[:, None, None]}
        return np.asarray(x * evaluate(FORMULAS["query_scaling"], {**numbers_of(model), **at}) ** power)

    return change


def _turned(
    site: Site, role: str, form: Convention, sign: float, base: float | None = None, *, plain: bool = False
) -> Change:
    """Queries or keys rotated in a form; `plain`: from what they were before their rotation."""
    tensors = (others if role == "q" else history)(site, unrotated(site, role)) if plain else []

    def change(x: Array, given: Given) -> Array:
        if plain:
            x = (queries_of(tensors) if role == "q" else in_place(tensors))(x, given)
        at = (given.at if role == "q" else given.key_at).astype(np.float64)
        turns = frequencies(site.facts.model, lengths_of(site.parts[given.part].rows[-1:]), base)
        return form.rotate(x, sign * at[:, None, None] * turns) * (
            magnitude(site.facts.model) if plain else 1.0
        )

    return change


def exchanged_roles(site: Site) -> Mapping[str, Change]:
    """Keys and values in each other's place."""
    return {which: in_place(cached(site, other)) for which, other in (("k", "v"), ("v", "k"))}
