"""What a wrong context may be instead of probabilities times values: other values, or other probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.blocks import (
    cached,
    history,
    in_place,
    others,
    shaped,
    usual_noise,
    written_to,
)
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.attention import expand
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.softmax import divided, hot, newest


def contexts(site: Site) -> Iterator[Variant]:
    """Variants of one layer's context on one rank."""
    if not all(part.fits for part in site.parts):
        return
    probs = [part.inputs["probs"] for part in site.parts]
    values = [part.inputs["v"] for part in site.parts]
    for name, text, form in _PROBABILITIES:
        yield _of(site, name, text, [form(p) for p in probs], values)
    scores = [_finite(x, p) for x, p in zip(others(site, "attn.scores"), probs, strict=True)]
    text = "values are weighted by the scores: the softmax is left out"
    yield _of(site, "context_of_scores", text, scores, values)
    for name, text, moved in _MOVED:
        yield _of(site, name, text, probs, [moved(v) for v in values])
    yield from _of_other_sequences(site)
    for name, text, theirs in _other_values(site, values):
        yield _of(site, name, text, probs, theirs)


def _of(
    site: Site, name: str, text: str, probs: Sequence[Array | None], values: Sequence[Array | None]
) -> Variant:
    guesses = [_times(p, v) for p, v in zip(probs, values, strict=True)]
    return Variant(name, "context", text, {}, in_place(site, guesses), noise=usual_noise(site))


def _of_other_sequences(site: Site) -> Iterator[Variant]:
    """The contexts of another sequence's tokens in the same step: its first ones, or its last."""
    passes = [site.taps.passes[i] for i in site.passes]
    for seq in sorted({one.seq for one in passes}):
        theirs = {
            one.step: part.expected for one, part in zip(passes, site.parts, strict=True) if one.seq == seq
        }
        for words, first in (("first", True), ("last", False)):
            guesses: list[Array | None] = []
            for one, part in zip(passes, site.parts, strict=True):
                rows, count = theirs.get(one.step), len(part.expected)
                fits = rows is not None and one.seq != seq and len(rows) >= count
                guesses.append(
                    (rows[:count] if first else rows[-count:]) if fits and rows is not None else None
                )
            if any(guess is not None for guess in guesses):
                text = f"the contexts are those of sequence {seq}'s {words} tokens of the step"
                yield Variant(
                    "context_of_sequence", "context", text, {"sequence": seq}, in_place(site, guesses)
                )


def _times(probs: Array | None, values: Array | None) -> Array | None:
    """[heads, T, K] times [K, kv_heads, D] -> [T, heads * D]; None where they do not fit."""
    if probs is None or values is None or values.ndim != 3 or probs.shape[2] != len(values):
        return None
    if len(probs) % values.shape[1]:
        return None
    out = np.einsum("htk,khd->thd", probs, expand(values, len(probs)), optimize=True)
    return np.asarray(out.reshape(len(out), -1))


def _finite(x: Array | None, like: Array) -> Array | None:
    return np.where(np.isfinite(x), x, 0.0) if x is not None and x.shape == like.shape else None


def _of_the_step(p: Array) -> Array:
    return np.asarray(p * (np.arange(p.shape[2]) >= p.shape[2] - p.shape[1]))


_Form = Callable[[Array], Array]

#: What the probabilities [heads, T, K] may have become: (name, text, form).
_PROBABILITIES: tuple[tuple[str, str, _Form], ...] = (
    (
        "context_probs_transposed",
        "the probabilities are transposed: queries and keys are exchanged",
        lambda p: p.swapaxes(1, 2) if p.shape[1] == p.shape[2] else p,
    ),
    (
        "context_own_value",
        "each token gets its own value: no other one is attended to, nor the cache",
        newest,
    ),
    (
        "context_first_value",
        "each token gets the value of the first one",
        lambda p: hot(p, np.zeros(p.shape[1])),
    ),
    (
        "context_mean",
        "each token gets the mean of the values that it may see: probabilities are not used",
        lambda p: divided((p > 0).astype(np.float64)),
    ),
    (
        "context_hard",
        "each token gets the value of its likeliest key alone",
        lambda p: hot(p, p.argmax(-1)),
    ),
    (
        "context_mean_of_heads",
        "all heads use the mean of the heads' probabilities",
        lambda p: np.broadcast_to(p.mean(0), p.shape),
    ),
    (
        "context_of_the_step",
        "only the values of this step's tokens are added up: those of the cache are left out",
        _of_the_step,
    ),
    (
        "context_of_the_step",
        "only this step's tokens are attended to: their probabilities add up to 1 without the cache",
        lambda p: divided(_of_the_step(p)),
    ),
)

#: Where the values [K, kv_heads, D] may have moved: (name, text, form).
_MOVED: tuple[tuple[str, str, _Form], ...] = (
    (
        "context_values_behind",
        "values are read one row behind: each key brings the value of the token before",
        lambda v: np.concatenate([0 * v[:1], v[:-1]]),
    ),
    (
        "context_values_ahead",
        "values are read one row ahead: each key brings the value of the token after",
        lambda v: np.concatenate([v[1:], 0 * v[:1]]),
    ),
    (
        "context_values_rolled",
        "values are read one row behind, the first one from the end",
        lambda v: np.roll(v, 1, axis=0),
    ),
    ("context_values_reversed", "values are read in reversed order", lambda v: v[::-1]),
    (
        "context_newest_value_missing",
        "the newest value is not there yet: its row is read as zero",
        lambda v: np.concatenate([v[:-1], 0 * v[:1]]),
    ),
)


def _other_values(site: Site, values: Sequence[Array]) -> Iterator[tuple[str, str, list[Array | None]]]:
    """Keys, other layers' and sequences' values, those of the step before."""

    def like(found: Sequence[Array | None]) -> list[Array | None]:
        return [shaped(x, v) for x, v in zip(found, values, strict=True)]

    text = "probabilities are multiplied with the keys instead of the values"
    yield "context_of_keys", text, like(cached(site, "k"))
    for layer in range(site.facts.model.num_layers):
        if layer != site.layer:
            theirs = like(cached(site, "v", layer))
            yield "context_values_of_layer", f"values are those of layer {layer}", theirs
    text = "values are those of the step before: the newest rows are not there yet"
    yield "context_values_stale", text, [_stale(site, i, v) for i, v in enumerate(values)]
    text = "values are those that were projected, not those that the cache holds"
    yield "context_values_written", text, like(history(site, written_to(site, "v")))
    for seq in sorted({one.seq for one in site.taps.passes}):
        foreign = [_of_sequence(site, seq, i, v) for i, v in enumerate(values)]
        if any(x is not None for x in foreign):
            yield "context_values_of_sequence", f"values are those of sequence {seq}", foreign


def _of_sequence(site: Site, seq: int, i: int, right: Array) -> Array | None:
    """Another sequence's values of the same step, where it has as many."""
    own = site.taps.passes[site.passes[i]]
    tensors = site.taps.tensors(site.near("attn.v_cache"), site.rank)
    for one, x in zip(site.taps.passes, tensors, strict=True):
        if one.seq == seq != own.seq and one.step == own.step and x is not None and len(x) >= len(right):
            return x[: len(right)]
    return None


def _stale(site: Site, i: int, right: Array) -> Array | None:
    """The cache of the sequence's step before, with zeros for the rows that it lacks."""
    passes, index = site.taps.passes, site.passes[i]
    before = [j for j in range(index) if passes[j].seq == passes[index].seq]
    held = site.taps.tensors(site.near("attn.v_cache"), site.rank)[before[-1]] if before else None
    if held is None or held.shape[1:] != right.shape[1:] or len(held) > len(right):
        return None
    return np.concatenate([held, np.zeros_like(right[len(held) :])])
