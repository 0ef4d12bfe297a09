"""Attention as one tree of named points, from what was recorded to where it is judged.

    keys, values = k and v for each query head;  products = q . keys
    raw = scale * products, capped where the model caps scores
    scores = raw where allowed, else hidden
    probs = softmax(scores);  context = probs . values

A change is a function of a point's value and of all that is given to the pass. Attention in one kernel is the same tree
judged at its root; scores, probabilities and contexts that were recorded one by one are parts of it, each made of what
was recorded before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import formula
from lockstep.workbench.diagnosis.hypotheses.blocks import by_head, cached, key_positions, others, positions
from lockstep.workbench.diagnosis.hypotheses.trial import evenly
from lockstep.workbench.diagnosis.operations.attention import probabilities, soft_capped, visible, weighed
from lockstep.workbench.diagnosis.operations.deviation import Mask, distance
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: The axes of the tensor at each point.
AXES: Mapping[str, tuple[str, str, str]] = {
    "q": ("query", "head", "dim"),
    "k": ("key", "kv head", "dim"),
    "v": ("key", "kv head", "dim"),
    "keys": ("key", "head", "dim"),
    "values": ("key", "head", "dim"),
    "products": ("head", "query", "key"),
    "scores": ("head", "query", "key"),
    "probs": ("head", "query", "key"),
    "context": ("query", "head", "dim"),
}
_OF_SCORES = ("q", "k", "keys", "products", "allowed", "hidden", "scores")
#: Operation -> the points that are made there.
POINTS: Mapping[str, frozenset[str]] = {
    "scores": frozenset(_OF_SCORES),
    "softmax": frozenset(("scores", "softmax", "probs")),
    "context": frozenset(("probs", "v", "values", "context")),
    "weights": frozenset((*_OF_SCORES, "softmax", "probs")),
    "attention": frozenset((*_OF_SCORES, "softmax", "probs", "v", "values", "context")),
}
#: Passes, and wrong queries of each, on which changes are tried before they are made whole.
_PASSES, _QUERIES = 4, 8
#: How far of the way down to no probability a score is near enough to it.
_NEARLY = 0.95
#: What a number that is not finite where another is counts as an error.
GROSS = 1e30


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What is given to one pass of a sequence, or to some of its queries.

    q [T, heads, D], k and v [K, kv_heads, D] (v is empty where probabilities are judged), raw and allowed
    [heads, T, K], positions of queries [T] and keys [K]; `new` keys are of the pass itself, `prompt` of the prompt.
    Where scores or probabilities were recorded, and are not judged, `raw` holds these, and q and k are empty.
    `sinks` [heads], None of a model without. `hidden` [heads, T, 1]: what a query gives each key where it sees none, by
    what came out. `part` is the number of the pass at the site, `rows` its queries there.
    """

    part: int
    rows: NDArray[np.intp]
    q: Array
    k: Array
    v: Array
    raw: Array
    allowed: Mask
    at: NDArray[np.int64]
    key_at: NDArray[np.int64]
    new: int
    prompt: int
    hidden: Array
    seen: Array
    right: Array
    scope: Mask
    sinks: Array | None = None

    @property
    def heads(self) -> int:
        return len(self.raw)

    @property
    def far(self) -> NDArray[np.int64]:
        """How many positions each key [T, K] stands before its query."""
        return np.asarray(self.at[:, None] - self.key_at[None, :])

    @property
    def scores(self) -> Array:
        return np.where(self.allowed, self.raw, -np.inf)

    def softmax(self, scores: Array) -> Array:
        """What the model makes of scores."""
        return softmax(scores) if self.sinks is None else probabilities(scores, self.sinks)


#: Another value of a point: of its value, and of what is given.
Change = Callable[[Array, Given], Array]
#: Changes by the points at which they are made.
Changes = Mapping[str, Change]


def softmax(scores: Array) -> Array:
    """Over the keys; zero where a query sees none."""
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    return np.asarray(weights / np.where(total == 0, 1.0, total))


def _products(q: Array, keys: Array) -> Array:
    """Of queries [T, heads, D] and keys [K, heads, D]."""
    return np.asarray(q.swapaxes(0, 1) @ keys.transpose(1, 2, 0))


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """What changes give in a pass: the result, and the probabilities and values (for each query head) behind it."""

    out: Array
    probs: Array
    values: Array | None


@dataclass(frozen=True, eq=False)
class AttentionTree:
    """The tree of a site at which attention, or a part of it, is wrong."""

    site: Site

    @classmethod
    def of(cls, site: Site) -> AttentionTree:
        """The one of a site."""
        found: AttentionTree = site.derived.setdefault(cls, cls(site))
        return found

    @cached_property
    def given(self) -> list[Given]:
        """Of each part."""
        return [self._given(i) for i in range(len(self.site.parts))]

    def _given(self, i: int) -> Given:
        part, scopes = self.site.parts[i], self.site.deviation.scopes if self.site.deviation else ()
        raw, allowed = self._recorded(i)
        heads, queries, keys = raw.shape
        shown = by_head(self.site, part.seen)
        hidden = np.where((shown == 0).all(-1, keepdims=True), 0.0, 1 / keys)
        hidden = np.where(np.isnan(shown).any(-1, keepdims=True), np.nan, hidden)
        q, k = (
            part.inputs.get("q", np.empty((queries, heads, 0))),
            part.inputs.get("k", np.empty((keys, 1, 0))),
        )
        return Given(
            i, np.arange(queries), q, k, part.inputs.get("v", k[:0]), raw, allowed,
            positions(part), key_positions(part), len(part.rows), self._prompt(i), hidden, part.seen, part.expected,
            np.asarray(scopes[i]), part.inputs.get("sinks"),
        )  # fmt: skip

    def _recorded(self, i: int) -> tuple[Array, Mask]:
        """What is given of scores, or of probabilities, and which of them are seen."""
        part = self.site.parts[i]
        match self.site.operation:
            case "context":
                return part.inputs["probs"], part.inputs["probs"] > 0
            case "softmax":
                scores, behind = part.inputs["scores"], self._behind_mask[i]
                seen = ~np.isneginf(scores)
                return np.where(seen, scores, -np.inf if behind is None else behind), seen
        q = part.inputs["q"]
        raw = self.scores_of(q, formula.expand(part.inputs["k"], q.shape[1]))
        if self.site.operation == "scores":
            return raw, ~np.isneginf(part.expected)
        return raw, np.isfinite(part.inputs["scores"])

    @cached_property
    def _behind_mask(self) -> list[Array | None]:
        """What hidden scores were, by the queries and keys of each part; None where these were not recorded."""
        pairs = zip(others(self.site, "attn.q_rope"), cached(self.site, "k"), self.site.parts, strict=True)
        found: list[Array | None] = []
        for q, k, part in pairs:
            if q is None or k is None or not q.ndim == k.ndim == 3:
                found.append(None)
                continue
            raw = self.scores_of(q, formula.expand(k, q.shape[1]))
            found.append(raw if raw.shape == part.expected.shape else None)
        return found

    def scores_of(self, q: Array, keys: Array) -> Array:
        """Of queries [T, heads, D] and keys [K, heads, D] before the mask, [heads, T, K]."""
        return self._raw(_products(q, keys))

    def _raw(self, of_keys: Array) -> Array:
        """Of products of queries and keys [heads, T, K]."""
        return soft_capped(np.asarray(of_keys * self.site.facts.model.scale), self.cap)

    @property
    def cap(self) -> float:
        """At what the model caps its scores; 0: it does not."""
        return self.site.facts.model.score_cap

    def _prompt(self, i: int) -> int:
        """How many tokens the passes of more than one token read of the sequence."""
        seq = self.site.taps.passes[self.site.passes[i]].seq
        mine = [len(one.rows) for one in self.site.taps.passes if one.seq == seq]
        return sum(count for n, count in enumerate(mine) if count > 1 or n == 0)

    @property
    def points(self) -> frozenset[str]:
        """Those at which something may be changed."""
        return POINTS[self.site.operation]

    @property
    def roles(self) -> tuple[str, ...]:
        """Which of the cached keys ("k") and values ("v") go in."""
        return tuple(role for role in ("k", "v") if role in self.points)

    @cached_property
    def wrong(self) -> list[int]:
        return [one.part for one in self.given if one.scope.any()]

    @cached_property
    def sample(self) -> list[Given]:
        """Some wrong queries of the largest wrong passes: of as large ones those that show more than zeros, which any
        mask gives that hides all."""
        seen = [part.seen for part in self.site.parts]
        largest = sorted(self.wrong, key=lambda i: (seen[i].size, bool(seen[i].any())))[-_PASSES:]
        return [self.some(self.given[i]) for i in largest]

    def some(self, one: Given) -> Given:
        """A pass with a few of its wrong queries alone."""
        axis = self.site.token_axis
        wrong = np.flatnonzero(one.scope.any(tuple(j for j in range(one.scope.ndim) if j != axis)))
        rows = evenly(wrong, _QUERIES)
        return replace(
            one, rows=rows, q=one.q[rows], raw=one.raw[:, rows], allowed=one.allowed[:, rows], at=one.at[rows],
            hidden=one.hidden[:, rows], seen=np.take(one.seen, rows, axis), right=np.take(one.right, rows, axis),
            scope=np.take(one.scope, rows, axis),
        )  # fmt: skip

    # --- values ----------------------------------------------------------------------------------------

    def make(self, one: Given, changes: Changes) -> Made:
        """What changes give in a pass; ValueError, IndexError where they do not fit it."""

        def at(point: str, value: Array) -> Array:
            return changes[point](value, one) if point in changes else value

        if self.site.operation == "context":
            probs = at("probs", one.raw)
        else:
            scores = at(
                "scores", one.scores if self.site.operation == "softmax" else self._masked(one, changes, at)
            )
            if self.site.operation == "scores":
                scores = self._settled(one, scores)
                return Made(scores, scores, None)
            probs = changes["softmax"](scores, one) if "softmax" in changes else one.softmax(scores)
            probs = at("probs", np.where((scores == -np.inf).all(-1, keepdims=True), one.hidden, probs))
        if "context" not in self.points:
            return Made(probs, probs, None)
        values = at("values", formula.expand(at("v", one.v), len(probs)))
        out = at("context", (probs @ values.swapaxes(0, 1)).swapaxes(0, 1))
        return Made(out.reshape(len(out), -1), probs, values)

    def _masked(self, one: Given, changes: Changes, at: Callable[[str, Array], Array]) -> Array:
        """The scores of queries and keys."""
        raw = one.raw
        if {"q", "k", "keys", "products"} & changes.keys():
            q, k = at("q", one.q), at("k", one.k)
            keys = at("keys", formula.expand(k, q.shape[1]))
            raw = self._raw(at("products", _products(q, keys)))
        allowed = one.allowed
        if "allowed" in changes:
            allowed = at("allowed", allowed.astype(np.float64)).astype(bool)
        hidden = changes["hidden"](raw, one) if "hidden" in changes else -np.inf
        return np.where(allowed, raw, hidden)

    def _settled(self, one: Given, scores: Array) -> Array:
        """Scores of which those that leave no probability are -inf wherever the recorded ones are so for that reason;
        rounding may have taken either just over the limit."""
        gone = ~one.allowed & np.isneginf(one.seen)
        if not (gone & (scores != -np.inf)).any():
            return scores
        return np.where(gone & ~visible(self.site.facts, scores, _NEARLY), -np.inf, scores)

    @cached_property
    def _right(self) -> dict[tuple[int, str], Array]:
        return {}

    def right(self, part: int, point: str) -> Array:
        """The value of a point with an axis of queries in a whole pass, of which a change may be asked for some."""
        key, one = (part, point), self.given[part]
        if key not in self._right:
            if point in ("q", "scores"):
                self._right[key] = one.q if point == "q" else one.scores
            elif point == "products":
                self._right[key] = _products(one.q, formula.expand(one.k, one.heads))
            else:
                made = self.make(one, {})
                self._right[part, "probs"] = made.probs
                if made.values is not None:
                    self._right[part, "context"] = made.out.reshape(len(made.out), one.heads, -1)
        return self._right[key]

    def of_all_queries(self, point: str, change: Change) -> Change:
        """A change that mixes queries: made of a whole pass."""
        axis = AXES[point].index("query")

        def of(x: Array, given: Given) -> Array:
            made = change(self.right(given.part, point), self.given[given.part])
            return np.take(made, given.rows, axis)

        return of

    def left(self, changes: Changes) -> float:
        """What `sampled` gives of that; infinite where changes do not fit."""
        found = self.sampled(changes)
        return np.inf if found is None else found[1]

    def sampled(self, changes: Changes, most: float = np.inf) -> tuple[list[Array], float] | None:
        """What changes give in the sample, and the norm of what they leave there, over that of the error; None where
        they do not fit, or leave more than `most` of its largest part."""
        outs: list[Array] = []
        left = 0.0
        with np.errstate(all="ignore"):
            for i in reversed(range(len(self.sample))):
                try:
                    out = self.make(self.sample[i], changes).out
                except (ValueError, IndexError, KeyError):
                    return None
                if out.shape != self.sample[i].seen.shape:
                    return None
                square = self._square(i, out)
                if not outs and square > most**2 * max(self._errors[i], 1e-300):
                    return None
                outs.append(out)
                left += square
        return outs[::-1], float(np.sqrt(left / max(sum(self._errors), 1e-300)))

    @cached_property
    def _errors(self) -> list[float]:
        """The squared error of each of the sample."""
        with np.errstate(all="ignore"):
            return [self._square(i, one.right) for i, one in enumerate(self.sample)]

    @cached_property
    def _seen_wrong(self) -> list[Array]:
        return [one.seen[one.scope] for one in self.sample]

    def _square(self, i: int, out: Array) -> float:
        """How far a result is from what was seen of one of the sample where that is wrong, squared. What is not finite
        is ignored by numpy."""
        one, seen = self.sample[i], self._seen_wrong[i]
        out = out[one.scope]
        apart = seen - out
        total = float(apart @ apart)
        if total < GROSS**2:  # neither NaN nor infinities
            return total
        apart = distance(seen, out, self.site.parts[one.part].largest)
        return float(np.square(np.minimum(apart, GROSS)).sum())

    def whole(self, changes: Changes, grown: float = 1.0) -> tuple[list[Array], list[Array]] | None:
        """What changes give in every wrong pass, and what rounding may leave of it, `grown` times as large as that of
        the right attention; None where they do not fit."""
        outs, noises = [part.expected for part in self.site.parts], [part.noise for part in self.site.parts]
        try:
            with np.errstate(all="ignore"):
                for i in self.wrong:
                    made = self.make(self.given[i], changes)
                    outs[i], noises[i] = made.out, grown * self.noise(i, made)
        except (ValueError, IndexError, KeyError):
            return None
        parts = zip(outs, noises, self.site.parts, strict=True)
        fits = all(out.shape == part.seen.shape == noise.shape for out, noise, part in parts)
        return (outs, noises) if fits else None

    def noise(self, i: int, made: Made) -> Array:
        """By how far the scores of the right attention may be off."""
        part, facts = self.site.parts[i], self.site.facts
        if self.site.operation == "scores":  # numbers of other products than the right ones
            largest = np.where(np.isfinite(part.noise), part.noise, 0.0).max(-1, keepdims=True)
            return np.broadcast_to(largest, part.noise.shape)
        if self.site.operation == "softmax":  # relative, it is the same of larger ones
            by = np.divide(made.probs, part.expected, out=np.ones_like(made.probs), where=part.expected > 0)
            return np.asarray(part.noise * np.maximum(by, 1.0))
        noise = part.inputs.get("score_noise", np.zeros((*made.probs.shape[:2], 1)))
        moved = noise.max(-1, keepdims=True) + facts.unit + 8 * facts.sum_unit
        moved = np.broadcast_to(moved, (*moved.shape[:2], made.probs.shape[2]))
        return np.nan_to_num(weighed(facts, made.probs, moved, made.values)[1])
