"""The right context in the wrong place: heads merged in another layout, zero, or scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.blocks import (
    all_wrong_heads,
    by_head,
    from_heads,
    in_place,
    places,
    scopes,
    usual_noise,
)
from lockstep.workbench.diagnosis.hypotheses.fits import factor_of, known_number, resolution
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array


def merged_heads(site: Site) -> Iterator[Variant]:
    """Variants of how one rank's heads are put together."""
    if not all(part.fits for part in site.parts):
        return
    half = site.facts.model.value_dim // 2
    for name, text, form in _LAYOUTS:
        guesses = [form(by_head(site, part.expected), part.inputs["v"].shape[1]) for part in site.parts]
        yield Variant(name, "context", text, {}, in_place(site, list(guesses)), noise=usual_noise(site))
    rolled = [from_heads(site, np.roll(by_head(site, part.expected), half, axis=2)) for part in site.parts]
    yield Variant("context_halves_exchanged", "context", "the halves of each head are exchanged", {}, rolled)
    yield from _factors(site)


def _merged(x: Array) -> Array:
    """[T, heads, D] -> [T, heads * D]."""
    return x.reshape(len(x), -1)


def _shifted(x: Array, by: int) -> Array:
    """Tokens of [heads, T, D] later by so many."""
    return np.concatenate([0 * x[:, :by], x[:, :-by]], axis=1) if x.shape[1] > by else x


#: (name, text, what the right context [heads, T, D] of so many KV heads becomes)
_LAYOUTS: tuple[tuple[str, str, Callable[[Array, int], Array]], ...] = (
    (
        "context_tokens_not_transposed",
        "[heads, T, D] is flattened without being transposed: tokens and heads are mixed up",
        lambda x, n: x.reshape(x.shape[1], -1),
    ),
    (
        "context_heads_by_dim",
        "heads are merged as [D, heads] instead of [heads, D]",
        lambda x, n: _merged(x.transpose(1, 2, 0)),
    ),
    (
        "context_heads_by_dim",
        "[heads, D] is read as [D, heads] and transposed",
        lambda x, n: _merged(x.swapaxes(0, 1).reshape(x.shape[1], x.shape[2], -1).swapaxes(1, 2)),
    ),
    (
        "context_groups_transposed",
        "heads are merged as [group, KV heads] instead of [KV heads, group]",
        lambda x, n: _merged(x.reshape(n, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape).swapaxes(0, 1)),
    ),
    (
        "context_tokens_reversed",
        "tokens stand in reversed order",
        lambda x, n: _merged(x[:, ::-1].swapaxes(0, 1)),
    ),
    (
        "context_of_token_before",
        "each token has the context of the token before",
        lambda x, n: _merged(_shifted(x, 1).swapaxes(0, 1)),
    ),
    (
        "context_of_last_token",
        "all tokens have the context of the last one",
        lambda x, n: _merged(np.broadcast_to(x[:, -1:], x.shape).swapaxes(0, 1)),
    ),
)


def _factors(site: Site) -> Iterator[Variant]:
    """Heads that are zero, or larger by a factor."""
    factors = {head: _factor(site, head) for head in all_wrong_heads(site)}
    if not factors:
        return
    if all(abs(factor) < resolution(site) for factor in factors.values()):
        text = f"heads {sorted(factors)} of this rank are zero: their context is never written"
        zero = _scaled(site, dict.fromkeys(factors, 0.0))
        yield Variant("context_heads_zero", "context", text, {"heads": sorted(factors)}, zero)
        return
    ranks, common = len(site.taps.ranks), float(np.median(list(factors.values())))
    known = [(ranks, ": the number of ranks"), (1 / ranks, ": 1 / the number of ranks")] if ranks > 1 else []
    match = known_number(common, known, resolution(site))
    text = f"the context is {common:.5g} times what it should be{match[1] if match else ''}"
    guesses = _scaled(site, dict.fromkeys(factors, common))
    yield Variant("context_scaled", "context", text, {"factor": common}, guesses, 0 if match else 1)
    if max(factors.values()) - min(factors.values()) > resolution(site):
        text, reported = (
            "each head's context is scaled by a factor of its own",
            {str(h): f for h, f in factors.items()},
        )
        guesses = _scaled(site, factors)
        yield Variant("context_scale_of_heads", "context", text, {"factors": reported}, guesses, len(factors))


def _factor(site: Site, head: int) -> float:
    x, y, scope = [np.empty(0)], [np.empty(0)], scopes(site)
    for i, wrong in places(site):
        if wrong == head:
            right, seen = by_head(site, site.parts[i].expected)[head], by_head(site, site.parts[i].seen)[head]
            cells = scope[i][head] & np.isfinite(seen)
            x.append(right[cells])
            y.append(seen[cells])
    return factor_of(np.concatenate(x), np.concatenate(y))


def _scaled(site: Site, factors: Mapping[int, float]) -> list[Array]:
    guesses = []
    for part in site.parts:
        made = by_head(site, part.expected).copy()
        for head, factor in factors.items():
            made[head] *= factor
        guesses.append(from_heads(site, made))
    return guesses
