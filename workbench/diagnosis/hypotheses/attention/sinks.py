"""What became of attention sinks, of a model that has them: edits of what stands beside the keys in the softmax's sum.

A sink is each head's own number, whose exponential is one term more in the sum of its queries (arXiv:2309.17453).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from lockstep.engine.parallel.shards import SINKS
from lockstep.workbench.diagnosis.hypotheses.edits import Detail
from lockstep.workbench.diagnosis.hypotheses.head_orders import groups_in, interleaved
from lockstep.workbench.diagnosis.operations.attention import own_sinks, probabilities
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: From masked scores [heads, T, K] to probabilities.
Form = Callable[[Array], Array]
#: Into how many parts keys may be split, of which each counts the sink.
_SPLITS = (2, 3, 4, 8, 16)
#: Form -> the name of the variant, and its sentence; of another operand with its number.
SINK_WORDS: Mapping[str, tuple[str, str]] = {
    "left_out": ("sinks_left_out", "the sinks are left out: the softmax is over the keys alone"),
    "afterwards": (
        "sinks_after_softmax",
        "the sinks do not count in the softmax's sum: probabilities, made already, are divided by 1 + exp(sink)",
    ),
    "unshifted": (
        "sinks_not_shifted",
        "the largest score is taken off the scores, and not off the sinks, before exponentials are taken",
    ),
    "in_front": (
        "sinks_in_front",
        "the sinks stand in front of the scores, and the column behind is cut off: each key has the probability of the "
        "key before it, and the first one that of the sink",
    ),
    "zero": (
        "sinks_zero",
        "each sink is 0: the softmax's sum has 1 more, and the checkpoint's sinks are not read",
    ),
    "negative": ("sinks_negated", "minus the sinks stand in the softmax's sum"),
    "logarithm": (
        "sinks_logarithm",
        "the sinks themselves, not their exponentials, are in the softmax's sum",
    ),
    "counted": (
        "sinks_counted_again",
        "the sink stands {0:g} times in the softmax's sum, as where {0:g} splits of the keys each count it",
    ),
    "scaled": ("sinks_scaled", "the sinks are multiplied by {0:.5g}, the scale of the scores"),
    "divided": ("sinks_scaled", "the sinks are divided by {0:.5g}, the scale of the scores"),
    "binary": (
        "sinks_scaled",
        "the sinks count {0:.4g} times (ln 2 or its inverse): of powers of 2 and of e one is taken for the other",
    ),
    "head": ("sinks_of_other_heads", "the sink of each head is that of the head {0:g} after it"),
    "group": (
        "sinks_of_neighbours",
        "heads that share a KV head have the sinks of the heads {0:g} after them",
    ),
    "interleaved": (
        "sinks_of_other_heads",
        "the sinks are in another order than the heads: the first of each of {0:g} groups, then the second of each",
    ),
    "backwards": ("sinks_of_other_heads", "the sinks are in the reverse order of the heads"),
    "first": ("sinks_of_other_heads", "all heads have the sink of the first one"),
    "rank": ("sinks_of_other_rank", "the sinks are those of rank {0:g}'s heads"),
    "layer": ("sinks_of_other_layer", "the sinks are those of layer {0:g}"),
}


def sink_forms(site: Site) -> Iterator[tuple[Detail, Form]]:
    """Every one of them: (the form and its number, what it makes of scores). None of a model without sinks."""
    sinks = site.parts[0].inputs.get("sinks")
    if sinks is None:
        return
    yield ("left_out",), partial(probabilities, sinks=None)
    yield ("afterwards",), partial(_afterwards, sinks)
    yield ("unshifted",), partial(_unshifted, np.exp(sinks))
    for sliced in (False, True):
        yield ("in_front", float(sliced)), partial(_in_front, sinks, sliced)
    yield ("logarithm",), partial(_of_sinks, np.log(np.maximum(sinks, 1e-30)))
    for detail, other in _other_sinks(site, sinks):
        if not np.array_equal(other, sinks):
            yield detail, partial(_of_sinks, other)


def _other_sinks(site: Site, sinks: Array) -> Iterator[tuple[Detail, Array]]:
    """Other numbers in their place."""
    model = site.facts.model
    yield ("zero",), np.zeros_like(sinks)
    yield ("negative",), -sinks
    yield ("backwards",), sinks[::-1]
    for count in _SPLITS:
        yield ("counted", float(count)), sinks + np.log(count)
    yield ("scaled", model.scale), sinks * model.scale
    yield ("divided", model.scale), sinks / model.scale
    yield ("binary", math.log(2)), sinks * math.log(2)
    yield ("binary", 1 / math.log(2)), sinks / math.log(2)
    for count in groups_in(len(sinks)):
        yield ("interleaved", float(count)), sinks[interleaved(len(sinks), count)]
    yield ("first",), np.full_like(sinks, sinks[0])
    for by in range(1, len(sinks)):
        yield ("head", float(by)), np.roll(sinks, -by)
    group = model.num_heads // model.num_kv_heads
    if len(sinks) % group == 0:
        for by in range(1, group):
            yield ("group", float(by)), np.roll(sinks.reshape(-1, group), -by, 1).ravel()
    for rank in site.taps.ranks:
        yield ("rank", float(rank)), own_sinks(site.facts, site.weights, len(sinks), rank)["sinks"]
    for layer in range(site.facts.model.num_layers):
        name = f"model.layers.{layer}.{SINKS}"
        if site.facts.vector(name) is not None:
            yield (
                ("layer", float(layer)),
                own_sinks(site.facts, {"sinks": name}, len(sinks), site.rank)["sinks"],
            )


def _of_sinks(sinks: Array, scores: Array) -> Array:
    return probabilities(scores, sinks)


def _afterwards(sinks: Array, scores: Array) -> Array:
    return np.asarray(probabilities(scores, None) / (1 + np.exp(sinks)[:, None, None]))


def _in_front(sinks: Array, sliced: bool, scores: Array) -> Array:
    """`sliced`: of a single query the keys before its window are not read at all."""
    probs = probabilities(scores, sinks)
    out = np.concatenate([1 - probs.sum(-1, keepdims=True), probs[..., :-1]], -1)
    if sliced and scores.shape[1] == 1 and (seen := np.isfinite(scores).any((0, 1))).any():
        first = int(seen.argmax())
        out[..., first] = out[..., 0]
        out[..., :first] = 0.0
    return out


def _unshifted(more: Array, scores: Array) -> Array:
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    return np.asarray(weights / (weights.sum(-1, keepdims=True) + more[:, None, None]))
