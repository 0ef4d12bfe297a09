"""What an indexer may have computed instead: its scores, and which keys it chooses by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph.formula import FORMULAS, SCALED, evaluate, numbers_of
from lockstep.engine.graph.index_choice import best_keys
from lockstep.workbench.diagnosis.hypotheses.edits import Detail, Edit
from lockstep.workbench.diagnosis.hypotheses.functions import last_seen
from lockstep.workbench.diagnosis.hypotheses.generate import Choices, edits_of
from lockstep.workbench.diagnosis.hypotheses.pass_trial import PassTrial, passed
from lockstep.workbench.diagnosis.hypotheses.search import pairs, single
from lockstep.workbench.diagnosis.hypotheses.solve import Solved
from lockstep.workbench.diagnosis.hypotheses.trial import Tried, mixing
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: A leaf that stands for weights that are all alike.
_ONES = "ones"
#: What weights of heads may go through.
_THROUGH = ("softmax", "sigmoid", "softplus", "relu")
#: Factors of eight-bit codes that are read without their scales, and of none.
_CODES = (1.0, 127.0, 448.0)


def index_scores(site: Site) -> Iterator[Variant]:
    """Every single edit that explains something of what was seen, the nearest first."""
    return _edited(site, single)


def index_score_pairs(site: Site) -> Iterator[Variant]:
    """Two edits at once; of the numbers that are solved for only factors, since others cost more."""
    return _edited(
        site,
        lambda tried, edits: pairs(
            tried, (one for one in edits if not one.free or one.detail[0] == "scaled")
        ),
    )


def _edited(site: Site, search: Callable[[Tried, Iterable[Edit]], list[Solved]]) -> Iterator[Variant]:
    if site.deviation is None or not all(part.fits for part in site.parts):
        return
    numbers = numbers_of(site.facts.model)
    given = [
        {
            **numbers,
            **part.inputs,
            "allowed": 1.0 - np.isneginf(part.expected[0]),
            _ONES: np.ones_like(part.inputs["weights"]),
        }
        for part in site.parts
    ]
    trial = PassTrial(site, FORMULAS["index_scores"], given, ("q", "weights", "allowed", _ONES))
    yield from passed(trial, search(trial, edits_of(trial.formula, _choices(site))))


def _choices(site: Site) -> Choices:
    """What indexers get wrong beside all that may be done to any value: which keys are seen, codes in place of
    numbers."""
    seen = [last_seen(~np.isneginf(part.expected))[~np.isneginf(part.seen)] for part in site.parts]
    newest, later = (
        max((int(one.max(initial=-1)) for one in some), default=-1) for some in (seen, [-one for one in seen])
    )
    codes: list[Detail] = [("codes", factor) for factor in _CODES]
    return Choices(
        operands={"weights": [_ONES]},
        numbers={"scale": (), "index_weight": ()},
        applied={
            "allowed": [("own_hidden",), ("newest_seen", newest + 1.0), ("later_seen", float(later))],
            "weights": [*((function,) for function in _THROUGH), *codes],
            "q": codes,
            "k": codes,
        },
    )


def key_choices(site: Site) -> Iterator[Variant]:
    """Another number of keys, the worst ones, or the newest."""
    if not all(part.fits for part in site.parts):
        return
    yield _of_step_before(site)
    slots = site.parts[0].expected.shape[1]
    scores = [part.inputs["scores"] for part in site.parts]
    most = max(int((part.seen >= 0).sum(-1).max(initial=0)) for part in site.parts)
    if most != slots:
        text = f"an indexer chooses {most} keys instead of {slots}"
        name = "choice_one_fewer" if most == slots - 1 else "choice_of_fewer_keys"
        yield _choice(site, name, text, {"keys": most}, [_padded(x, most, slots) for x in scores])
    worst = [np.where(np.isneginf(x), x, -x) for x in scores]
    yield _choice(
        site,
        "choice_of_worst_keys",
        "an indexer chooses the keys of the lowest scores",
        {},
        [best_keys(x, slots) for x in worst],
    )
    for by in (1, -1):
        text = f"the numbers of the chosen keys are {'one too high' if by > 0 else 'one too low'}"
        moved = [
            np.where(part.expected >= 0, np.clip(part.expected + by, 0, x.shape[-1] - 1), part.expected)
            for part, x in zip(site.parts, scores, strict=True)
        ]
        yield _choice(site, "choice_one_off", text, {"by": by}, moved)
    newest = [np.where(np.isneginf(x), x, np.arange(float(x.shape[-1]))) for x in scores]
    text = "the newest keys are attended to, as in a sliding window, not those of the highest scores"
    yield _choice(site, "choice_of_newest_keys", text, {}, [best_keys(x, slots) for x in newest])


def _padded(scores: Array, count: int, slots: int) -> Array:
    found = best_keys(scores, count)[:, -slots:]
    return np.pad(found, ((0, 0), (slots - found.shape[1], 0)), constant_values=-1)


def shared_choices(site: Site) -> Iterator[Variant]:
    """The choice of another layer than that whose choice it should take, of another sequence or of the step before."""
    for layer in range(site.facts.model.num_layers):
        for kind in ("index_chosen", "shared_chosen"):
            found = site.rows_of(f"layers.{layer}.attn.{kind}")
            if layer != site.layer and found is not None and found.shape == site.expected.shape:
                text = f"the layer takes the choice of layer {layer}"
                yield _choice(site, "choice_of_layer", text, {"layer": layer}, [np.sort(found, -1)])
    alone, first = _first_of_step(site)
    if len(first):
        found = site.expected.copy()
        found[alone] = found[first]
        text = "all sequences of a decode step take the choice of the first one in the batch"
        yield _choice(site, "choice_of_first_sequence", text, {}, [found])
    if site.seen.shape == site.expected.shape:
        yield _of_step_before(site)


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


def _of_step_before(site: Site) -> Variant:
    """Of each token what is right for the one before it in its sequence."""
    ends = np.cumsum([len(part.rows) for part in site.parts])[:-1]
    every = mixing([row for part in site.parts for row in part.rows])["rows_before_of_sequence"]
    found = np.split(every(np.concatenate([part.expected for part in site.parts])), ends)
    text = "the choice is stale: it is that of the sequence's token before, in decode of the step before"
    return _choice(site, "choice_of_step_before", text, {}, found)


def _choice(
    site: Site, name: str, text: str, fitted: Mapping[str, object], predicted: Sequence[Array]
) -> Variant:
    return Variant(name, site.operation, text, fitted, predicted)
