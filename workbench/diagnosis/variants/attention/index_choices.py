"""What an indexer may have computed instead: its scores, and which keys it chooses by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph.formula import FORMULAS, SCALED, evaluate, numbers_of
from lockstep.engine.graph.index_choice import best_keys, summed_heads
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

_Inputs = Mapping[str, Array]


def index_scores(site: Site) -> Iterator[Variant]:
    """Without the mask, without a factor, without ReLU or without weights."""
    if not all(part.fits for part in site.parts):
        return
    model = site.facts.model
    heads, dim = model.num_heads, model.head_dim

    def variant(
        name: str, kind: str, text: str, made: Callable[[_Inputs], Array], masked: bool = True
    ) -> Variant:
        guesses = []
        for part in site.parts:
            found = made(part.inputs)
            guesses.append(np.where(np.isneginf(part.expected), -np.inf, found) if masked else found)
        return Variant(name, kind, text, {}, guesses)

    text = "an indexer scores keys after the query: its scores have no causal mask"
    yield variant("index_not_causal", "mask", text, lambda x: _scores(model, x), masked=False)
    yield from _hidden(site)
    text = "the weights of an indexer's heads are not divided by the root of their number"
    yield variant("index_weights_unscaled", "scores", text, lambda x: _scores(model, x) * math.sqrt(heads))
    text = "an indexer's products are not divided by the root of the width of its heads"
    yield variant("index_products_unscaled", "scores", text, lambda x: _scores(model, x) * math.sqrt(dim))
    text = "an indexer's scores lack ReLU: negative products count as well"
    yield variant("index_without_relu", "scores", text, lambda x: _summed(model, x, x["weights"]))
    text = "an indexer's heads are added up without their weights"
    plain = np.ones_like(site.parts[0].inputs["weights"][:1])
    yield variant(
        "index_unweighted",
        "scores",
        text,
        lambda x: _scores(model, {**x, "weights": plain + 0 * x["weights"]}),
    )


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


def _scores(model: ModelConfig, inputs: _Inputs) -> Array:
    """[1, T, K], no key hidden."""
    found = evaluate(FORMULAS["index_scores"], {**numbers_of(model), **inputs, "allowed": np.True_})
    return np.asarray(found)


def _summed(model: ModelConfig, inputs: _Inputs, weights: Array) -> Array:
    numbers = numbers_of(model)
    return summed_heads(evaluate(SCALED, {**numbers, **inputs}), weights * numbers["index_weight"])


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
