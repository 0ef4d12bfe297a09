"""What an indexer may have computed instead: its scores, and which keys it chooses by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph.formula import FORMULAS, SCALED, evaluate, numbers_of
from lockstep.engine.graph.index_choice import best_keys
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, apply
from lockstep.workbench.diagnosis.hypotheses.functions import edited_value
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Leaves that stand for a mask that hides nothing, and for weights that are all alike.
_EVERY_KEY, _ONES = "every key", "ones"

#: What an indexer may have scored by instead: edits of its formula, with name, class and sentence.
_EDITS: tuple[tuple[Edit, str, str, str], ...] = (
    (
        Edit("allowed", "operand", (_EVERY_KEY,)), "index_not_causal", "mask",
        "an indexer scores keys after the query: its scores have no causal mask",
    ),
    (
        Edit((1, 1), "left_out", (0.0,)), "index_weights_unscaled", "index_scores",
        "the weights of an indexer's heads are not divided by the root of their number",
    ),
    (
        Edit((1, 0, 0), "left_out", (0.0,)), "index_products_unscaled", "index_scores",
        "an indexer's products are not divided by the root of the width of its heads",
    ),
    (
        Edit("above_zero", "left_out", (0.0,)), "index_without_relu", "index_scores",
        "an indexer's scores lack ReLU: negative products count as well",
    ),
    (
        Edit("weights", "operand", (_ONES,)), "index_unweighted", "index_scores",
        "an indexer's heads are added up without their weights",
    ),
    *(
        (
            Edit("weights", "applied", (function,)), f"index_weights_{function}", "index_scores",
            f"the weights of an indexer's heads go through a {function}: they should be as they are",
        )
        for function in ("softmax", "sigmoid", "softplus", "relu")
    ),
)  # fmt: skip


def index_scores(site: Site) -> Iterator[Variant]:
    """Single edits of the formula, and keys that the mask hides."""
    if not all(part.fits for part in site.parts):
        return
    for edit, name, kind, text in _EDITS:
        tree = apply(edit, FORMULAS["index_scores"])
        guesses = [np.asarray(edited_value(tree, _given(site.facts.model, part))) for part in site.parts]
        yield Variant(name, kind, text, {}, guesses)
    yield from _hidden(site)
    yield from _later(site)


def _later(site: Site) -> Iterator[Variant]:
    """So many keys after the query's own are scored as well."""
    behind = [_behind(part.expected) for part in site.parts]
    seen = [-at[~np.isneginf(part.seen)] for part, at in zip(site.parts, behind, strict=True)]
    most = int(max((one.max(initial=0) for one in seen), default=0))
    if most < 1:
        return
    guesses = []
    for part, at in zip(site.parts, behind, strict=True):
        given = {**_given(site.facts.model, part), "allowed": at >= -most}
        guesses.append(np.asarray(edited_value(FORMULAS["index_scores"], given)))
    keys = "the key" if most == 1 else f"{most} keys"
    text = f"an indexer scores {keys} after the query's own as well: its mask ends too late"
    yield Variant("index_sees_later_keys", "mask", text, {"keys": most}, guesses)


def _given(model: ModelConfig, part: Part) -> Mapping[str, Any]:
    """The leaves of the formula, and what they may be exchanged for."""
    own = {**numbers_of(model), **part.inputs, "allowed": ~np.isneginf(part.expected)}
    return {**own, _ONES: np.ones_like(part.inputs["weights"]), _EVERY_KEY: np.True_}


def _hidden(site: Site) -> Iterator[Variant]:
    """Keys that a query should see and does not: its own one, or all but the newest."""
    behind = [_behind(part.expected) for part in site.parts]
    visible = [at[~np.isneginf(part.seen) & (at >= 0)] for part, at in zip(site.parts, behind, strict=True)]
    newest = int(max((one.max(initial=0) for one in visible), default=0)) + 1
    strictly = "an indexer hides each query's own key: its mask is strictly causal"
    yield _without("index_own_key_hidden", strictly, site, [at == 0 for at in behind])
    window = f"an indexer scores the {newest} newest keys alone"
    yield _without("index_window", window, site, [at >= newest for at in behind])


def _without(name: str, text: str, site: Site, hidden: Sequence[NDArray[np.bool_]]) -> Variant:
    """The right scores but for keys that are hidden as well."""
    guesses = [
        np.where(cells, -np.inf, part.expected) for part, cells in zip(site.parts, hidden, strict=True)
    ]
    return Variant(name, "mask", text, {}, guesses)


def _behind(expected: Array) -> Array:
    """How many keys after each one the query of scores [1, T, K] sees, below 0 of hidden ones."""
    keys = np.arange(expected.shape[-1])
    last = np.where(np.isneginf(expected), -1, keys).max(-1, keepdims=True)
    return np.asarray(last - keys)


def key_choices(site: Site) -> Iterator[Variant]:
    """Another number of keys, the worst ones, or the newest."""
    if not all(part.fits for part in site.parts):
        return
    slots = site.parts[0].expected.shape[1]
    scores = [part.inputs["scores"] for part in site.parts]
    most = max(int((part.seen >= 0).sum(-1).max(initial=0)) for part in site.parts)
    if most != slots:
        text = f"an indexer chooses {most} keys instead of {slots}"
        name = "choice_one_fewer" if most == slots - 1 else "choice_of_fewer_keys"
        yield _choice(name, text, {"keys": most}, [_padded(x, most, slots) for x in scores])
    worst = [np.where(np.isneginf(x), x, -x) for x in scores]
    yield _choice(
        "choice_of_worst_keys",
        "an indexer chooses the keys of the lowest scores",
        {},
        [best_keys(x, slots) for x in worst],
    )
    newest = [np.where(np.isneginf(x), x, np.arange(float(x.shape[-1]))) for x in scores]
    text = "the newest keys are attended to, as in a sliding window, not those of the highest scores"
    yield _choice("choice_of_newest_keys", text, {}, [best_keys(x, slots) for x in newest])


def _padded(scores: Array, count: int, slots: int) -> Array:
    found = best_keys(scores, count)[:, -slots:]
    return np.pad(found, ((0, 0), (slots - found.shape[1], 0)), constant_values=-1)


def shared_choices(site: Site) -> Iterator[Variant]:
    """The choice of another layer than that whose choice it should take."""
    for layer in range(site.facts.model.num_layers):
        for kind in ("index_chosen", "shared_chosen"):
            found = site.rows_of(f"layers.{layer}.attn.{kind}")
            if layer != site.layer and found is not None and found.shape == site.expected.shape:
                text = f"the layer takes the choice of layer {layer}"
                yield _choice("choice_of_layer", text, {"layer": layer}, [np.sort(found, -1)])
    alone, first = _first_of_step(site)
    if len(first):
        found = site.expected.copy()
        found[alone] = found[first]
        text = "all sequences of a decode step take the choice of the first one in the batch"
        yield Variant("choice_of_first_sequence", "input", text, {}, [found])


def _first_of_step(site: Site) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The rows of steps in which each sequence has one, and of each the first of its step."""
    by_step: dict[int, list[int]] = {}
    for i, row in enumerate(site.rows):
        by_step.setdefault(row.step, []).append(i)
    decoded = [rows for rows in by_step.values() if len({site.rows[i].seq for i in rows}) == len(rows) > 1]
    pairs = [(i, rows[0]) for rows in decoded for i in rows]
    found = np.array(pairs, dtype=np.intp).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def unsparse_scores(site: Site) -> Iterator[Variant]:
    """Scores of all keys that a query sees."""
    if not all(part.fits and "chosen" in part.inputs for part in site.parts):
        return
    guesses = []
    for part in site.parts:
        q, k = part.inputs["q"], part.inputs["k"]
        positions = np.array([row.position for row in part.rows])
        seen = np.arange(len(k)) <= positions[:, None]
        right = evaluate(SCALED, {"q": q, "k": k, "scale": site.facts.model.scale})
        guesses.append(np.where(seen, right, -np.inf))
    text = "queries attend to all keys that they see: what the indexer chose is ignored"
    yield Variant("choice_ignored", "mask", text, {}, guesses)


def _choice(name: str, text: str, fitted: Mapping[str, object], predicted: Sequence[Array]) -> Variant:
    return Variant(name, "mask", text, fitted, predicted)
