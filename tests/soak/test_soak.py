"""A tenth of `make soak`, as far as other tests do not have it; and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.catalogue import TRIALS
from tests.soak.processes import run_live
from tests.soak.run import SOAK, Tally, renewed, table
from tests.soak.trial import Trial, attempt


@pytest.mark.sampled(40)
@pytest.mark.parametrize(
    ("trial", "seed"),
    [pytest.param(one, seed, id=f"{one.name}-{seed}") for one in TRIALS for seed in range(one.quick)],
)
def test_nothing_is_lost(trial: Trial, seed: int) -> None:
    assert attempt(trial, seed) == ""


@pytest.mark.slow
def test_nothing_is_lost_in_150_steps() -> None:
    trial = Trial("live", "", "", lambda _, directory: run_live(150, directory / "a.session"), 1)
    assert attempt(trial, 0) == ""


def test_what_is_lost_hangs_or_stays_behind_is_reported() -> None:
    def fails(seed: int, directory: Path) -> None:
        raise ValueError(f"no {directory}/x")

    def hangs(seed: int, directory: Path) -> None:
        while True:
            pass

    def litters(seed: int, directory: Path) -> None:
        (directory / "tmp" / "file").touch()

    def printed(act: object) -> str:
        return attempt(Trial("x", "", "", act, 1, seconds=0.2), 0)  # type: ignore[arg-type]

    assert printed(fails).endswith("ValueError no …/x")
    assert printed(hangs).endswith("TooSlow took more than 0.2 s")
    assert printed(litters) == "left in the temporary folder: file"


def test_the_table_reports_losses_and_tries_that_were_not_made() -> None:
    tally = Tally(TRIALS[0], tries=7, seconds=12.3, lost={3: "a step"})
    page = table([tally])
    assert f"| 7 of {TRIALS[0].tries} | 6 | 1 | 12 |" in page
    assert f"- `ONLY={TRIALS[0].name} SEED=3`: a step" in page


def test_one_row_is_renewed_and_the_others_stay() -> None:
    first, second, third = (Tally(trial, tries=trial.tries, seconds=1.0) for trial in TRIALS[:3])
    first.lost[4], second.lost[5] = "kept", "old"
    page = table([first, second])
    again = renewed(page, Tally(second.trial, tries=2, seconds=9.0, lost={6: "new"}), SOAK)
    assert again == table([first, Tally(second.trial, tries=2, seconds=9.0, lost={6: "new"})])
    assert renewed(table([first, third]), second, SOAK) == table([first, second, third])
