"""Two mistakes in one layer's scores: KV heads by another map or scores at another scale, and another mask as well."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.attention.scales import meanings, right_scale
from lockstep.workbench.diagnosis.hypotheses.attention.words import kv_rules
from lockstep.workbench.diagnosis.hypotheses.blocks import products
from lockstep.workbench.diagnosis.hypotheses.fits import factor_of, known_number, resolution
from lockstep.workbench.diagnosis.hypotheses.variant import Variant, where_wrong
from lockstep.workbench.diagnosis.operations.attention import soft_capped, uncapped
from lockstep.workbench.diagnosis.operations.deviation import WRONG
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.mask import masks


def combined_scores(site: Site) -> Iterator[Variant]:
    """Every map of heads, with the scale that its products give; under the right mask, and under every other."""
    if site.deviation is None or not all(part.fits for part in site.parts):
        return
    heads, kv_heads = site.parts[0].expected.shape[0], site.parts[0].inputs["k"].shape[1]
    right = np.arange(heads) * kv_heads // heads
    scale = site.facts.model.scale
    maps = {tuple(right.tolist()): ("", ""), **kv_rules(heads, kv_heads)}
    for known_map, (rule, words) in maps.items():
        reads = np.array(known_map)
        found = _scale(site, reads, scale)
        if found is None or not (rule or found != scale):
            continue
        known = known_number(found, meanings(site, scale), resolution(site))
        reported = [words] if words else []
        if found != scale:
            why = f": {known[1]}" if known else ""
            reported.append(
                f"scores are scaled by {found:.5g} instead of {right_scale(site.facts.model)}{why}"
            )
        fitted = {
            "scale": found,
            "ratio": found / scale,
            "meanings": [known[1]] if known else [],
            "map": rule,
        }
        name, kind = (rule, "heads") if rule else ("scores_scale", "scores")
        other, text = _read(site, reads, found / scale), "; and ".join(reported)
        free = 0 if known or found == scale else 1
        if len(reported) > 1:
            yield Variant(name, kind, text, fitted, [part.expected for part in other.parts], free)
        for second in masks(other) if other.deviation is not None else ():
            if second.parameters <= 1:
                yield Variant(name, kind, f"{text}; and {second.text}", fitted | {"and": second.name},
                              where_wrong(other, list(second.predicted)), free + second.parameters)  # fmt: skip


def _scale(site: Site, reads: NDArray[np.int64], right: float) -> float | None:
    """The factor on products of queries with the KV heads that they read, where it gives what was seen wherever the
    mask allows; None where none does."""
    xs, ys, noises = [], [], []
    for part in site.parts:
        raw = products(part.inputs["q"], _keys(part.inputs["k"], reads))
        cells = np.isfinite(part.expected) & np.isfinite(part.seen)
        xs.append(raw[cells])
        ys.append(uncapped(part.seen[cells], site.facts.model.score_cap))
        noises.append(part.noise[cells])
    x, y, noise = (np.concatenate(each) for each in (xs, ys, noises))
    if len(x) < 2:
        return None
    by = factor_of(x, y)
    by = right if math.isclose(by, right, rel_tol=resolution(site)) else by
    allowed = WRONG * float(np.linalg.norm(noise)) * max(1.0, abs(by / right))
    return by if float(np.linalg.norm(y - by * x)) <= allowed else None


def _keys(k: Array, reads: NDArray[np.int64]) -> Array:
    """[K, kv_heads, D] -> [K, heads, D]: each query head's own."""
    return k[:, reads]


def _read(site: Site, reads: NDArray[np.int64], by: float) -> Site:
    """The site as if that map and that factor were right."""
    scale, parts = site.facts.model.scale, []
    for part in site.parts:
        q, k = part.inputs["q"] * by, _keys(part.inputs["k"], reads)
        raw = products(q, k) * scale
        noise = part.noise * max(1.0, abs(by))
        expected = np.where(np.isfinite(part.expected), soft_capped(raw, site.facts.model.score_cap), -np.inf)
        parts.append(replace(part, inputs={**part.inputs, "q": q, "k": k}, expected=expected, noise=noise))
    return replace(site, parts=tuple(parts))
