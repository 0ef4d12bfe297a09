"""What indexers may have computed instead, against torch: their scores, on the formula's, and their choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import operation_of
from lockstep.engine.graph.formula import FORMULAS, evaluate, numbers_of
from lockstep.engine.graph.index_choice import as_seen, best_keys
from lockstep.workbench.diagnosis.hypotheses.variant import Bank, fit, preference
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.facts import LARGEST, Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps, Row
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.variants.attention.index_choices import (
    index_score_pairs,
    index_scores,
    key_choices,
    shared_choices,
)
from lockstep.workbench.diagnosis.variants.overflow import not_finite
from tests.checkpoints import tiny_config
from tests.workbench.diagnosis.variants.made import MadeTaps

WHOLE = ModelConfig.from_hf(tiny_config("deepseek_v32").to_dict())
MODEL = as_seen(operation_of(WHOLE, "attn.index_scores"), WHOLE)
TOKENS = 9
APART = np.subtract.outer(np.arange(TOKENS), np.arange(TOKENS))
#: Tokens of a prompt, and of the decode steps behind it.
PASSES = (TOKENS - 3, 1, 1, 1)
_Array = np.ndarray[Any, Any]


def made(operation: str, passes: list[tuple[Mapping[str, _Array], _Array, _Array]]) -> Site:
    """A site of passes of one sequence: inputs, what was seen, and what should have been."""
    parts, first = [], 0
    for step, (inputs, seen, expected) in enumerate(passes):
        count = expected.shape[1] if operation == "index_scores" else len(expected)
        rows = tuple(Row(step, 0, first + i, 0, first + i) for i in range(count))
        noise = 1e-5 * np.ones_like(expected)
        parts.append(Part(rows, inputs, seen, expected, noise, LARGEST["float32"]))
        first += count
    facts, taps = Facts(MODEL, "float32", {}.get), cast(RecordedTaps, MadeTaps())
    kind = {"index_scores": "index_scores", "key_choice": "index_chosen", "shared_choice": "shared_chosen"}
    tap = f"layers.0.attn.{kind[operation]}"
    return Site(tap, operation, 0, (0,), tuple(parts), facts, taps, tuple(range(len(parts))))


def site(hidden: _Array, seen: _Array | None = None) -> Site:
    """A prefill whose scores are right but for what is hidden as well; or another one's."""
    inputs = drawn()
    given: dict[str, Any] = {**numbers_of(MODEL), **inputs, "allowed": APART >= 0}
    expected = np.asarray(evaluate(FORMULAS["index_scores"], given))
    return made(
        "index_scores", [(inputs, np.where(hidden, -np.inf, expected) if seen is None else seen, expected)]
    )


def drawn() -> dict[str, _Array]:
    random, heads, dim = np.random.default_rng(0), MODEL.num_heads, MODEL.head_dim
    return {
        "q": random.normal(size=(TOKENS, heads, dim)),
        "k": random.normal(size=(TOKENS, 1, dim)),
        "weights": random.normal(size=(TOKENS, heads)),
    }


@pytest.mark.parametrize(
    ("hidden", "name", "words"),
    [
        (APART == 0, "index_own_key_hidden", "strictly causal"),
        (APART >= 3, "index_window", "the 3 newest keys"),
    ],
)
def test_keys_that_are_hidden_too_are_a_mask_s_matter(hidden: _Array, name: str, words: str) -> None:
    wrong = site(hidden)
    (found,) = (one for one in index_scores(wrong) if one.name == name)
    (guess,) = found.predicted
    assert np.array_equal(guess, wrong.parts[0].seen)
    assert words in found.text
    assert found.kind == "mask"
    assert not list(not_finite(wrong))


def scored(
    function: Callable[[Tensor], Tensor] = F.relu,
    later: int = 0,
    scale: float = MODEL.head_dim**-0.5,
    **changes: Callable[[Tensor], Tensor],
) -> _Array:
    """Scores by torch: another function of the products, so many keys after the query's own, inputs changed."""
    given = {name: torch.tensor(x) for name, x in drawn().items()}
    q, k, weights = (changes.get(name, lambda x: x)(x) for name, x in given.items())
    products = function(torch.einsum("thd,kd->htk", q, k[:, 0]) * scale)
    seen = torch.einsum("htk,th->tk", products, weights) * MODEL.num_heads**-0.5
    return np.asarray(seen.masked_fill(torch.tensor(APART + later < 0), -torch.inf)[None])


def best(bank: Bank, wrong: Site) -> tuple[str, str, str]:
    """Name, class and sentence of the first variant that reproduces what was seen."""
    found = [one for variant in bank(wrong) if (one := fit(wrong, variant)) is not None and one.accepted]
    first = min(found, key=preference).variant
    return first.name, first.kind, first.text


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "relu"])
def test_weights_of_heads_that_go_through_a_function_are_named(function: str) -> None:
    along = {"dim": -1} if "max" in function else {}
    seen = scored(weights=lambda x: getattr(torch, function)(x, **along))
    wrong = site(APART < 0, seen)
    guesses = {one.name: one.predicted[0] for one in index_scores(wrong)}
    near = {name for name, guess in guesses.items() if np.allclose(guess, seen)}
    assert near == {f"index_weights_{function}"}


@pytest.mark.parametrize(
    ("seen", "name", "words"),
    [
        (scored(k=lambda k: k / k.abs().amax(-1, keepdim=True)), "index_codes", "codes of keys without"),
        (scored(q=lambda q: 127 * q / q.abs().amax(-1, keepdim=True)), "index_codes", "each row is 127"),
        (scored(F.silu), "index_scores_function", "silu"),
        (scored(lambda x: x), "index_without_relu", "lack ReLU"),
        (scored(weights=torch.ones_like), "index_unweighted", "without their weights"),
        (scored(scale=1.0), "index_products_unscaled", "root of the width"),
        (scored(k=lambda k: 0.7 * k), "index_scores_applied", "multiplied by 0.7"),
        (scored(later=2), "index_sees_later_keys", "2 of them"),
        (scored(later=TOKENS), "index_not_causal", "no causal mask"),
    ],
)  # fmt: skip
def test_scores_by_another_formula_are_named(seen: _Array, name: str, words: str) -> None:
    found, kind, text = best(index_scores, site(APART < 0, seen))
    assert (found, kind) == (name, "mask" if "causal" in name or "later" in name else "index_scores")
    assert words in text


def test_two_edits_of_which_neither_helps_alone_are_named() -> None:
    wrong = site(APART < 0, scored(lambda x: x, weights=torch.ones_like))
    _, kind, text = best(index_score_pairs, wrong)
    assert kind == "index_scores"
    assert "lack ReLU" in text
    assert "without their weights" in text


def _stale(chosen: _Array) -> _Array:
    return np.concatenate([chosen[:1], chosen[:-1]])


def _half(chosen: _Array) -> _Array:
    """Half of the slots, of the best keys by torch."""
    slots, found = chosen.shape[1], np.full_like(chosen, -1.0)
    for row, scores in enumerate(_SCORES):
        top = torch.tensor(scores[: row + 1]).topk(min(slots // 2, row + 1)).indices.sort().values
        found[row, slots - len(top) :] = top
    return found


def _newest(chosen: _Array) -> _Array:
    slots = chosen.shape[1]
    newest = np.arange(TOKENS)[:, None] - np.arange(slots)[::-1]
    return np.asarray(np.maximum(newest, -1.0))


_SCORES = np.random.default_rng(1).normal(size=(TOKENS, TOKENS))
_CHOSEN = best_keys(np.where(APART >= 0, _SCORES, -np.inf)[None], 4)


@pytest.mark.parametrize(
    ("operation", "change", "name"),
    [
        ("key_choice", _stale, "choice_of_step_before"),
        ("shared_choice", _stale, "choice_of_step_before"),
        ("key_choice", _half, "choice_of_fewer_keys"),
        ("key_choice", _newest, "choice_of_newest_keys"),
        (
            "key_choice",
            lambda chosen: np.where(chosen >= 0, np.maximum(chosen - 1, 0), chosen),
            "choice_one_off",
        ),
    ],
)
def test_other_choices_are_named(operation: str, change: Callable[[_Array], _Array], name: str) -> None:
    seen, scores = change(_CHOSEN), np.where(APART >= 0, _SCORES, -np.inf)
    ends = np.cumsum([0, *(PASSES if operation == "key_choice" else (TOKENS,))])
    passes = [({"scores": scores[None, a:b, :b]}, seen[a:b], _CHOSEN[a:b]) for a, b in pairwise(ends)]
    bank = key_choices if operation == "key_choice" else shared_choices
    assert best(bank, made(operation, passes))[:2] == (name, operation)
