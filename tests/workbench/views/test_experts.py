"""The experts of a layer, against counts of what was captured."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import Session
from lockstep.workbench.views.experts import LayerExperts, experts
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where
from tests.workbench.mixture import EXPERTS, IDS, LOGITS, OTHER_IDS, WEIGHTS, build_mixture


def look(path: Path, layer: int = 0) -> LayerExperts:
    with Session.open(path) as session:
        return experts(SessionSource(session), Where(), layer)


@pytest.mark.parametrize("batch", [False, True])
def test_loads_are_the_counts_of_what_was_captured(tmp_path: Path, batch: bool) -> None:
    found = look(build_mixture(tmp_path / "a.session", batch=batch))
    rows = [*IDS.tolist(), *(OTHER_IDS.tolist() if batch else [])]
    tokens = Counter(one for row in rows for one in set(row))
    slots = Counter(one for row in rows for one in row if one < EXPERTS)
    assert [load.tokens for load in found.loads] == [tokens[one] for one in range(EXPERTS)]
    assert [load.share for load in found.loads] == pytest.approx(
        [slots[one] / slots.total() for one in range(EXPERTS)]
    )
    assert (found.tokens, found.sequences) == (len(rows), 2 if batch else 1)
    assert found.choices is not None
    assert len(found.choices) == len(IDS), "the tokens are those of the sequence at hand"


def test_weights_are_summed_by_expert_and_nan_is_seen(tmp_path: Path) -> None:
    loads = look(build_mixture(tmp_path / "a.session")).loads
    for load in loads:
        expected = WEIGHTS[load.expert == IDS].astype(np.float64).sum()
        assert load.weight == pytest.approx(expected, nan_ok=True)
    assert np.isnan(loads[3].weight or 0)


@pytest.mark.parametrize(
    ("placed", "ranks", "word"),
    [
        ("shard(2,groups=2)", [range(1)] * 4 + [range(1, 2)] * 4, "EP"),
        ("shard(2)", [range(2)] * 8, "cut over all 2 ranks"),
        ("partial", [range(0)] * 8, "not recorded"),
        ("shard(2,groups=5)", [range(0)] * 8, "does not fit"),
    ],
)
def test_experts_lie_where_their_rows_layout_states(
    tmp_path: Path, placed: str, ranks: list[range], word: str
) -> None:
    found = look(build_mixture(tmp_path / "a.session", placed=placed))
    assert [load.ranks for load in found.loads] == ranks
    assert word in found.placement


def test_the_margin_is_to_the_best_expert_that_was_not_chosen(tmp_path: Path) -> None:
    choices = look(build_mixture(tmp_path / "a.session")).choices
    assert choices is not None
    token, logits = choices.token(1), LOGITS[1]
    others = [(logits[one], one) for one in range(EXPERTS) if one not in IDS[1]]
    assert token.runner_up == max(others)[1]
    assert token.margin == pytest.approx(min(logits[IDS[1]]) - max(others)[0])
    assert [one.logit for one in token.chosen] == pytest.approx(logits[IDS[1]])


def test_wrong_choices_are_named(tmp_path: Path) -> None:
    choices = look(build_mixture(tmp_path / "a.session")).choices
    assert choices is not None
    flaws = [choices.token(row).flaws for row in range(len(IDS))]
    assert flaws[:3] == [(), (), ()]
    assert flaws[3] == ("expert 2 2 times", "1 of 2 experts")
    assert flaws[4] == ("id 8 is no expert's (0–7)", "1 of 2 experts")
    assert flaws[5] == ("weight NaN of expert 3",)
    assert choices.flawed.tolist() == [bool(one) for one in flaws]


def test_tokens_differ_from_golden_by_their_sets(tmp_path: Path) -> None:
    choices = look(build_mixture(tmp_path / "a.session")).choices
    assert choices is not None
    assert not choices.differing.any()
    golden = choices.ids[:, ::-1].copy()  # in another order
    golden[2] = [3, 7]
    held = replace(choices, golden=golden)
    assert np.flatnonzero(held.differing).tolist() == [2]
    assert held.token(2).differs
    assert not held.token(0).differs


def test_a_layer_without_experts_names_those_that_have_some(tmp_path: Path) -> None:
    found = look(build_mixture(tmp_path / "a.session"), layer=1)
    assert found.missing == "Layer 1 is dense: it has no experts. Layer 0 has some."
    assert not found.captures
