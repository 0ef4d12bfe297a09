"""Other forms of the delta rule, against the right one where they have to agree with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from lockstep.engine.graph.recurrence import last_state, read_out
from lockstep.workbench.diagnosis.hypotheses.recurrent_rules import BY_RULES, RULES
from tests.workbench.diagnosis.hypotheses.test_recurrent_orders import Drawn


@dataclass(frozen=True)
class Rows:
    """What a rule is given, with other rates and shares."""

    drawn: Drawn
    rate: float | None = None
    share: float | None = None

    @property
    def given(self) -> tuple[np.ndarray, ...]:
        before, k, v, rate, kept = self.drawn.delta
        rates = rate if self.rate is None else np.full_like(rate, self.rate)
        return before, k, v, rates, kept if self.share is None else np.full_like(kept, self.share)


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return Drawn()


@pytest.mark.parametrize("ending", RULES)
def test_every_form_is_another_one_and_has_words(ending: str, drawn: Drawn) -> None:
    right, found = last_state(*drawn.delta), BY_RULES[f"last_state{ending}"](*drawn.delta)
    assert np.abs(found - right).max() > 1e-3
    assert RULES[ending].words


@pytest.mark.parametrize("ending", [one for one, rule in RULES.items() if rule.taken_off != "nothing"])
def test_what_beta_multiplies_is_all_the_same_where_it_is_one(ending: str, drawn: Drawn) -> None:
    rows = Rows(drawn, rate=1.0, share=1.0).given
    assert BY_RULES[f"last_state{ending}"](*rows) == pytest.approx(last_state(*rows))
    assert BY_RULES[f"read_out{ending}"](drawn.q, *rows) == pytest.approx(read_out(drawn.q, *rows))


@pytest.mark.parametrize("ending", [one for one, rule in RULES.items() if rule.taken_off == "nothing"])
def test_without_the_correction_a_state_is_a_sum_of_products(ending: str, drawn: Drawn) -> None:
    before, k, v, rate, kept = Rows(drawn, share=1.0).given
    values = v.reshape(len(v), rate.shape[1], -1) * (rate[..., None] if RULES[ending].rated else 1.0)
    expected = before + np.einsum("thd,thv->hdv", k, values)
    assert BY_RULES[f"last_state{ending}"](before, k, v, rate, kept) == pytest.approx(expected)
