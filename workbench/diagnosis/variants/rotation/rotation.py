"""The rotation of q and k as engines get it wrong. Positions are fitted first, token by token; frequencies only where
the angle is proportional to the position."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lockstep.engine.graph.formula import rotate
from lockstep.workbench.diagnosis.operations.expected import heads_of
from lockstep.workbench.diagnosis.operations.rotary_forms import (
    FORMS,
    complex_pairs,
    rotate_by,
)
from lockstep.workbench.diagnosis.operations.shares import head_offset
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import (
    factor,
    named,
    simple,
)
from lockstep.workbench.diagnosis.variants.rotation.positions import TokenPlaces, patterns
from lockstep.workbench.diagnosis.variants.rotation.rotated import Rotated
from lockstep.workbench.diagnosis.variants.variant import Variant


def rotations(site: Site) -> Iterator[Variant]:
    """Every variant of the rotation that may have given what was seen."""
    r = Rotated.of(site)
    if r is None or not r.wrong.any():
        return
    for bank in (_forms, _factors, other_positions, _heads, _inputs):
        yield from bank(r)


def _forms(r: Rotated) -> Iterator[Variant]:
    """Other pairs, directions and tables, by the right angles."""
    for form in FORMS:
        if form.name == "rope_not_applied" and r.factor == 1 and _decode_only(r):
            continue  # the position is stuck at 0: the prefill is rotated
        for by in r.factors:
            predicted = form.rotate(r.x, r.right, by)
            text = form.text if by == r.factor else f"{form.text}; the attention factor is missing"
            yield Variant(form.name, "rope", text, {"attention_factor": by}, predicted, noise=_noise(r))
            if form.name == "rope_not_applied":
                break


def _noise(r: Rotated) -> Array:
    """What rounding leaves of an element, whichever other one it is rotated with."""
    halves, neighbours = np.abs(complex_pairs(r.x)), np.hypot(r.x[..., ::2], r.x[..., 1::2])
    largest = np.maximum(np.concatenate([halves, halves], -1), neighbours.repeat(2, axis=-1))
    return np.asarray(4 * r.site.facts.unit * r.factor * largest + r.site.parts[0].noise)


def _decode_only(r: Rotated) -> bool:
    """Whether decode tokens are wrong, and those of the prompt, which turn as well, are right."""
    first = np.array([row.step for row in r.site.rows]) == min(row.step for row in r.site.rows)
    return bool(not (first & r.wrong).any() and (first & (r.positions > 0)).any())


def _factors(r: Rotated) -> Iterator[Variant]:
    """The right angles with another factor on cosine and sine."""
    turned, own = rotate(r.x, r.right), r.factor
    by = float(factor(r.wrong_part(r.seen), r.wrong_part(turned)))
    if own != 1:
        ways = {
            1.0: "not applied",
            own**2: "applied twice",
            1 / own: "divided by",
            math.sqrt(own): "applied as its root",
        }
        for value, text in ways.items():
            fitted = {"attention_factor": value, "expected": own}
            yield Variant(
                "attention_factor",
                "rope",
                f"the attention factor {own:.5g} is {text}",
                fitted,
                turned * value,
            )
        both = np.concatenate([r.right, r.right], -1)
        for table, cos, sin in (("cosine", own, 1.0), ("sine", 1.0, own)):
            text = f"the attention factor is applied to the {table} alone"
            predicted = rotate_by(r.x, np.cos(both) * cos, np.sin(both) * sin)
            yield Variant("attention_factor", "rope", text, {"attention_factor": own, "on": table}, predicted)
    by = simple(by / own) * own
    text = f"the rotated tensor is {named(by / own)} times what it should be"
    yield Variant("factor", "rope", text, {"factor": by / own}, turned * by, 1)


def other_positions(r: Rotated) -> Iterator[Variant]:
    """Positions that follow a rule, and positions that follow none."""
    places = TokenPlaces.of(r.site.rows)
    within = 1e-3 + 8 * r.noise
    known = list(patterns(places, r.fitted.at, r.wrong, within))
    if r.fitted.left[r.wrong].max() > 0.2 + 4 * r.noise:
        return
    for pattern in known:
        doubled = pattern.name == "positions_scaled" and pattern.fitted["factor"] == 2.0 and r.factor == 1
        if doubled or (not (pattern.at != 0).any() and r.factor == 1 and not _decode_only(r)):
            continue  # told as a rotation applied twice, or not at all
        yield from _at(r, pattern.at, pattern.name, pattern.text, pattern.fitted, 0)
    if not known:
        told = {
            str(int(p)): float(np.round(q, 3))
            for p, q in zip(r.positions[r.wrong], r.fitted.at[r.wrong], strict=True)
        }
        words = ", ".join(f"{p} at {q:g}" for p, q in list(told.items())[:4])
        text = f"tokens are rotated by wrong positions: {words}{', …' if len(told) > 4 else ''}"
        yield from _at(r, r.fitted.at, "positions", text, {"positions": told}, int(r.wrong.sum()))


def _at(
    r: Rotated, at: Array, name: str, text: str, fitted: dict[str, object], parameters: int
) -> Iterator[Variant]:
    turned = rotate(r.x, at[:, None, None] * r.frequencies)
    said = np.array([row.recorded_position for row in r.site.rows], dtype=np.float64)
    fitted = fitted | {"recorded": bool(np.allclose(said[r.wrong], at[r.wrong], atol=0.01))}
    for by in r.factors:
        also = "" if by == r.factor else "; the attention factor is missing"
        yield Variant(
            name,
            "positions",
            text + also,
            fitted | ({"attention_factor": by} if also else {}),
            turned * by,
            parameters,
        )


def _heads(r: Rotated) -> Iterator[Variant]:
    """The index of the head in the angle, as where the axes of heads and tokens are exchanged."""
    count = r.x.shape[1]
    for first in {0, head_offset(r.site)}:
        index = np.arange(first, first + count, dtype=np.float64)[None, :, None]
        where = " (counted over all ranks)" if first else ""
        forms = {
            "each head is rotated by its own index on top of the position": r.positions[:, None, None]
            + index,
            "heads are rotated by their index, not by the position: the axes of heads and tokens are exchanged": index,
            "the position is multiplied by the number of heads": r.positions[:, None, None] * count,
            "positions are counted through tokens and heads: token * heads + head": r.positions[:, None, None]
            * count
            + index,
        }
        for text, at in forms.items():
            predicted = rotate(r.x, at * r.frequencies, r.factor) + np.zeros_like(r.x)
            yield Variant("position_of_head", "positions", text + where, {"first_head": first}, predicted)


def _inputs(r: Rotated) -> Iterator[Variant]:
    """The right rotation of another tensor."""
    site, head_dim = r.site, r.x.shape[-1]
    own = site.kind.removesuffix("_rope")
    kinds = [
        f"{name}{part}" for name in ("attn.q", "attn.k", "attn.v") for part in ("_norm", "_proj", "_rope")
    ]
    for kind in kinds:
        found = None if kind == site.kind else site.rows_of(site.near(kind))
        if found is None or found.size != r.x.size:
            continue
        x = heads_of(found, head_dim)
        if np.array_equal(x, r.x):
            continue
        rotated = x if kind.endswith("_rope") else rotate(x, r.right, r.factor)
        if r.near(rotated):
            missing = kind == f"{own}_proj"
            text = f"{kind} is rotated: {own}_norm is left out" if missing else f"{kind} is taken for {own}"
            yield Variant(
                "norm_skipped" if missing else "rope_input",
                "norm" if missing else "rope",
                text,
                {"input": kind},
                rotated,
            )
    name = f"model.layers.{site.layer}.self_attn.{own.removeprefix('attn.')}_proj.bias"
    bias = site.facts.vector(name)
    if bias is not None and site.rows_of(site.near(f"{own}_norm")) is None:
        first = head_offset(site) * head_dim
        b = (
            bias[first : first + r.x.shape[1] * head_dim].reshape(1, -1, head_dim)
            if len(bias) >= first + r.x.shape[1] * head_dim
            else None
        )
        if b is not None:
            text = f"{name} is added after the rotation, not before"
            yield Variant(
                "bias_after_rope", "rope", text, {"bias": name}, rotate(r.x - b, r.right, r.factor) + b
            )
