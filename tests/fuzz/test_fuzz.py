"""The first tries of `make fuzz`, and the arithmetic that judges them."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.engine.run.sampling import Sampling
from tests.fuzz.catalogue import TRIALS
from tests.fuzz.tries import deviations, exact
from tests.soak.trial import Trial, attempt


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("trial", "seed"),
    [pytest.param(one, seed, id=f"{one.name}-{seed}") for one in TRIALS for seed in range(one.quick)],
)
def test_a_random_one_is_right(trial: Trial, seed: int) -> None:
    assert attempt(trial, seed) == ""


@pytest.mark.slow
def test_keys_that_an_indexer_chooses_otherwise_without_taps_are_no_fault() -> None:
    """In float16 two index keys score alike: the run without taps takes the other, and a router follows."""
    (latents,) = (one for one in TRIALS if one.name == "latents")
    assert attempt(latents, 10) == ""


def test_what_is_exact_and_how_far_out_is_far() -> None:
    logits = np.log([0.5, 0.3, 0.2])
    assert exact(logits, Sampling(1.0)) == pytest.approx([0.5, 0.3, 0.2])
    assert exact(logits, Sampling(1.0, top_p=0.6)) == pytest.approx([0.625, 0.375, 0])
    assert exact(logits, Sampling(0.5, top_k=2)) == pytest.approx([25 / 34, 9 / 34, 0])
    assert deviations(43.8, 19) == pytest.approx(3.09, abs=0.05)  # p = 0.001
    assert deviations(19, 19) < 1
