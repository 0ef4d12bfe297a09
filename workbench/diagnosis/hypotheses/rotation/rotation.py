"""What ran instead of a rotation: one edit of its formula, then numbers that are solved for, then two edits.

Points of the formula: x, the position, the frequency, their product, cosine and sine, the convention of the pairs, the
factor on the result. Every prediction is screened in `Phases` before it is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.engine.graph.rotations import rotate
from lockstep.workbench.diagnosis.hypotheses.fits import factor, named, simple
from lockstep.workbench.diagnosis.hypotheses.rotation.conventions import (
    HALVES,
    RIGHT,
    Convention,
    conventions,
    in_place,
    in_words,
)
from lockstep.workbench.diagnosis.hypotheses.rotation.frequencies import (
    FrequencyRule,
    frequency_rules,
    rules_of_other_layers,
)
from lockstep.workbench.diagnosis.hypotheses.rotation.lookups import across_heads
from lockstep.workbench.diagnosis.hypotheses.rotation.phases import Phases
from lockstep.workbench.diagnosis.hypotheses.rotation.positions import PositionRule
from lockstep.workbench.diagnosis.hypotheses.rotation.rotated import NEAR, Rotated
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.expected import heads_of, turned
from lockstep.workbench.diagnosis.operations.rotary import frequencies, magnitude
from lockstep.workbench.diagnosis.operations.shares import head_offset
from lockstep.workbench.diagnosis.operations.site import Site


def rotations(site: Site) -> Iterator[Variant]:
    """One edit, of a fixed list or with positions that follow a rule."""
    r = Rotated.of(site, unrotated=True)
    if r is None:
        return
    yield from _other_channels(r)
    if not r.x.size:  # no other edit has anything to act on
        return
    for edits in (_conventions, across_heads, _factors, _positions, _heads, _frequencies, _inputs):
        yield from edits(r)


# --- which channels -----------------------------------------------------------------------------------------


def _other_channels(r: Rotated) -> Iterator[Variant]:
    """Other channels of each head rotated, or the same in other pairs: as other models' heads are."""
    own, whole = r.site.facts.model, r.whole
    plain, whole_heads = {"neighbours": False}, {"rotary": None, "rotary_last": False}
    options: dict[str, tuple[dict[str, Any], str]] = {
        "rope_halves": (plain, HALVES),
        "rope_first_channels": (
            {"rotary_last": False},
            "the first channels of a head are rotated, not the last",
        ),
        "rope_last_channels": (
            {"rotary_last": True},
            "the last channels of a head are rotated, not the first",
        ),
        "rope_whole_heads": (whole_heads, "whole heads are rotated, not a part"),
        "rope_whole_halves": (
            whole_heads | plain,
            "whole heads are rotated, not a part, in pairs (i, i + D/2)",
        ),
    }
    if not r.in_part:
        return
    if not r.x.size:
        options = {
            "rope_whole_heads": (whole_heads, "heads are rotated, which this model does not do in this layer")
        }
    for name, (change, text) in options.items():
        model = replace(own, **change)
        if model == own or (model.rotary is None and whole.shape[-1] != model.head_dim):
            continue
        angles = r.positions[:, None, None] * frequencies(model, r.lengths)
        predicted = turned(model, whole, angles, magnitude(model))
        yield Variant(name, "rope", text, {}, predicted, noise=r.of_head(True))
    if 0 < r.x.size < whole.size:
        yield from _parts_exchanged(r)
    if 0 < own.rotary_dim < own.head_dim == whole.shape[-1]:
        yield _padded(r)
    if r.site.kind == "attn.rope_key":
        yield from _normed(r)


def _parts_exchanged(r: Rotated) -> Iterator[Variant]:
    """What is rotated and what is not stand in the other order in a head when they come to be rotated."""
    model, width = r.site.facts.model, r.x.shape[-1]
    text = (
        "the rotated part of a head and the other one are taken for each other: they stand in the other order"
    )
    for by in sorted({width, r.whole.shape[-1] - width}):
        predicted = turned(model, np.roll(r.whole, by, -1), r.phase, r.factor)
        yield Variant("rope_parts_exchanged", "rope", text, {}, predicted, noise=r.of_head(True))


def _padded(r: Rotated) -> Variant:
    """The frequencies of a part, in pairs of whole heads: channels behind them are not rotated."""
    model, own = r.site.facts.model, r.positions[:, None, None] * r.frequencies
    half = r.whole.shape[-1] // 2
    angles = np.concatenate([own, np.zeros((*own.shape[:-1], half - own.shape[-1]))], axis=-1)
    by = np.where(np.arange(2 * half) % half < own.shape[-1], r.factor, 1.0)
    plain = replace(model, rotary=None, rotary_last=False, neighbours=False)
    text = (
        f"pairs (i, i + {half}) of whole heads are rotated, by the frequencies of the part that should be: "
        "the tables are padded, not the part cut out"
    )
    predicted = turned(plain, r.whole, angles, 1.0) * by
    return Variant("rope_padded_tables", "rope", text, {}, predicted, noise=r.of_head(True))


def _normed(r: Rotated) -> Iterator[Variant]:
    """The part of a key that is rotated was normed first: by itself, or with the latent."""
    written, scales = r.site.rows_of(r.site.near("attn.kv_a_proj")), {"by itself": r.x}
    if written is not None:
        scales["together with the latent"] = written[:, None]
    for words, of in scales.items():
        x = r.x / np.sqrt((of**2).mean(-1, keepdims=True))
        text = f"what is rotated is normed before, {words}: the norm is of the latent alone"
        yield r.variant(
            "rope_key_normed", "norm", text, {"normed": words}, rotate(x, r.phase, r.factor), moved=True
        )


# --- the convention -----------------------------------------------------------------------------------------


def _conventions(r: Rotated) -> Iterator[Variant]:
    # Else the position is stuck at 0: the prefill is rotated, and where queries are recorded they stand still too.
    if r.factor != 1 or not r.decode_only or r.queries_turn:
        yield r.variant("rope_not_applied", "rope", "the rotation is not applied at all", {}, r.x)
    twice = r.turned(2 * r.phase) * r.factor
    yield r.variant("rope_twice", "rope", "the rotation is applied twice", {}, twice, moved=True)
    for one, (name, text) in _reported_conventions(r):
        for by in r.factors:
            if r.share(r.phases(one, by), r.phase) <= NEAR:
                predicted = r.turned(r.phase, one, by)
                yield r.variant(
                    name, "rope", text + _also(r, by), {"attention_factor": by}, predicted, moved=True
                )
    for first, words in enumerate(
        ("second half is rotated with the first", "first half is rotated with the second")
    ):
        text = f"the {words} one as it is after its rotation: written in place"
        predicted = in_place(r.x, r.phase, first) * r.factor
        yield r.variant("rope_in_place", "rope", text, {}, predicted, moved=True)


def _reported_conventions(r: Rotated) -> Iterator[tuple[Convention, tuple[str, str]]]:
    """The conventions with their names. Of a model that turns neighbours, whose pairs are put apart here: other signs,
    and the model's halves for its neighbours, where what comes out is put apart as it is of neighbours."""
    every = conventions(r.x.shape[-1])
    if not r.site.facts.model.neighbours:
        yield from ((one, in_words(one)) for one in every)
        return
    yield from ((one, in_words(one)) for one in every if one.in_pairs)
    yield Convention(read="zip"), ("rope_halves", HALVES)


def _also(r: Rotated, by: float) -> str:
    return "" if by == r.factor else "; the attention factor is missing"


# --- a factor -----------------------------------------------------------------------------------------------


def _factors(r: Rotated) -> Iterator[Variant]:
    """The right phases with another factor on cosine and sine, or on one of them."""
    turned, own = rotate(r.x, r.phase), r.factor
    if own != 1:
        ways = {
            1.0: "not applied",
            own**2: "applied twice",
            1 / own: "divided by",
            math.sqrt(own): "applied as its root",
        }
        for value, words in ways.items():
            text, fitted = (
                f"the attention factor {own:.5g} is {words}",
                {"attention_factor": value, "expected": own},
            )
            yield r.variant("attention_factor", "rope", text, fitted, turned * value)
        a, b, table = RIGHT.terms(r.x)
        cos, sin = np.cos(r.phase)[..., table], np.sin(r.phase)[..., table]
        for words, predicted in (("cosine", own * a * cos + b * sin), ("sine", a * cos + own * b * sin)):
            text = f"the attention factor is applied to the {words} alone"
            yield r.variant(
                "attention_factor", "rope", text, {"attention_factor": own, "on": words}, predicted
            )
    by = simple(float(factor(r.wrong_part(r.seen), r.wrong_part(turned))) / own) * own
    text = f"the rotated tensor is {named(by / own)} times what it should be"
    yield r.variant("factor", "rope", text, {"factor": by / own}, turned * by, 1)


# --- positions ----------------------------------------------------------------------------------------------


def _positions(r: Rotated) -> Iterator[Variant]:
    for by in r.factors:
        for rule in r.position_rules(r.phases(RIGHT, by)):
            as_twice = rule.fitted.get("factor") == 2.0 and r.factor == 1
            phase = rule.at[:, None, None] * r.frequencies
            as_others = any(
                np.allclose(phase, r.positions[:, None, None] * one.values) for one in _of_others(r)
            )
            as_it_is = not rule.at.any() and r.factor == 1 and (not r.decode_only or r.queries_turn)
            if as_twice or as_others or as_it_is:
                continue  # reported as a rotation applied twice, as another layer's, or not at all
            yield from at_positions(r, rule, by)


def at_positions(r: Rotated, rule: PositionRule, by: float) -> Iterator[Variant]:
    """The rotation at the positions of a rule, or of none."""
    stated = np.array([row.recorded_position for row in r.site.rows], dtype=np.float64)
    recorded = bool(np.allclose(stated[r.wrong], rule.at[r.wrong], atol=0.01))
    fitted = {**rule.fitted, "recorded": recorded, **({} if by == r.factor else {"attention_factor": by})}
    predicted = r.turned(rule.at[:, None, None] * r.frequencies, factor=by)
    free = 0 if rule.name else int(r.wrong.sum())
    yield r.variant(rule.name or "positions", "positions", rule.text + _also(r, by), fitted, predicted, free)


def _heads(r: Rotated) -> Iterator[Variant]:
    """The index of the head in the phase, as where the axes of heads and tokens are exchanged."""
    count, at = r.x.shape[1], r.positions[:, None, None]
    for first in sorted({0, head_offset(r.site)}):
        index = np.arange(first, first + count, dtype=np.float64)[None, :, None]
        where = " (counted over all ranks)" if first else ""
        forms = {
            "each head is rotated by its own index on top of the position": at + index,
            "heads are rotated by their index, not by the position: the axes of heads and tokens are exchanged": index,
            "the position is multiplied by the number of heads": at * count,
            "positions are counted through tokens and heads: token * heads + head": at * count + index,
        }
        for text, places in forms.items():
            predicted = r.turned(places * r.frequencies) + np.zeros_like(r.x)
            yield r.variant("position_of_head", "positions", text + where, {"first_head": first}, predicted)


# --- frequencies --------------------------------------------------------------------------------------------


def _frequencies(r: Rotated) -> Iterator[Variant]:
    phases = {by: r.phases(RIGHT, by) for by in r.factors}
    of_others = _of_others(r)
    for rule in of_others:
        yield from with_frequencies(r, rule, phases)
    for rule in frequency_rules(r.model, r.site.rows, r.lengths):
        if not any(np.allclose(rule.values, one.values) for one in of_others):
            yield from with_frequencies(r, rule, phases)


def _of_others(r: Rotated) -> list[FrequencyRule]:
    """The frequencies of other layers of the model: their numbers are known, so that they mean more than the same by a
    factor would."""
    return list(rules_of_other_layers(r.site.facts.whole, r.model, r.lengths))


def with_frequencies(r: Rotated, rule: FrequencyRule, phases: dict[float, Phases]) -> Iterator[Variant]:
    """The rotation by the frequencies of a rule, with the factors that are near."""
    phase = r.positions[:, None, None] * rule.values
    for by in dict.fromkeys((*r.factors, rule.factor)):
        phases.setdefault(by, r.phases(RIGHT, by))
        if r.share(phases[by], phase) <= NEAR:
            text = rule.text + _factor_words(r, by)
            fitted = {**rule.fitted, **({} if by == r.factor else {"attention_factor": by})}
            choices = rule.parameters + (by not in (r.factor, rule.factor))  # another mistake
            yield r.variant(rule.name, "rope", text, fitted, r.turned(phase, factor=by), choices)


def _factor_words(r: Rotated, by: float) -> str:
    if by == r.factor:
        return ""
    return (
        ", nor is the attention factor"
        if by == 1
        else f", with the attention factor {by:.5g} instead of {r.factor:.5g}"
    )


# --- another x ----------------------------------------------------------------------------------------------


def _inputs(r: Rotated) -> Iterator[Variant]:
    """The right rotation of another tensor of the layer, or of one whose bias is added afterwards."""
    own = r.site.kind.removesuffix("_rope")
    for name in ("attn.q", "attn.k", "attn.v"):
        for part in ("_norm", "_proj", "_rope"):
            kind = f"{name}{part}"
            found = None if kind == r.site.kind else r.site.rows_of(r.site.near(kind))
            if found is None or found.size != r.whole.size:
                continue
            x = heads_of(found, r.whole.shape[-1])[..., r.order]
            if np.array_equal(x, r.x):
                continue
            predicted = x if part == "_rope" else rotate(x, r.phase, r.factor)
            skipped = kind == f"{own}_proj"
            text = f"{kind} is rotated: {own}_norm is left out" if skipped else f"{kind} is taken for {own}"
            name_of, class_of = ("norm_skipped", "norm") if skipped else ("rope_input", "rope")
            yield r.variant(name_of, class_of, text, {"input": kind}, predicted)
    yield from _front_of_latent(r)
    yield from _late_bias(r, own)


def _front_of_latent(r: Rotated) -> Iterator[Variant]:
    """Of a written latent the first channels are rotated, where a key's rotated part lies at its end."""
    written = r.site.rows_of(r.site.near("attn.kv_a_proj")) if r.site.kind == "attn.rope_key" else None
    if written is None or written.shape[-1] <= r.whole.shape[-1]:
        return
    first = written[:, None, : r.whole.shape[-1]][..., r.order]
    text = "what is rotated is taken from the front of the written latent, where the part of the key lies at its end"
    yield r.variant(
        "rope_input", "rope", text, {"input": "front"}, rotate(first, r.phase, r.factor), moved=True
    )


def _late_bias(r: Rotated, own: str) -> Iterator[Variant]:
    name = f"model.layers.{r.site.layer}.self_attn.{own.removeprefix('attn.')}_proj.bias"
    bias = r.site.facts.vector(name)
    size, first = r.x.shape[1] * r.whole.shape[2], head_offset(r.site) * r.whole.shape[2]
    if bias is None or len(bias) < first + size or r.site.rows_of(r.site.near(f"{own}_norm")) is not None:
        return
    b = bias[first : first + size].reshape(1, *r.whole.shape[1:])[..., r.order]
    text = f"{name} is added after the rotation, not before"
    yield r.variant("bias_after_rope", "rope", text, {"bias": name}, rotate(r.x - b, r.phase, r.factor) + b)


def possible(r: Rotated) -> Iterator[tuple[Convention, Phases]]:
    """The conventions but the right one in which phases of some kind give what was seen."""
    for one in conventions(r.x.shape[-1]):
        phases = r.phases(one, r.factor)
        if phases.free() <= NEAR**2 / 4 * float(r.right_errors.sum()):
            yield one, phases
