"""Statistics alone: the first tap whose statistics leave the reference's, and silence where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.sessions import Session, SessionWriter, StepRecord, Tap
from lockstep.sessions.meta import ConfigMeta, ForeignMeta, SessionMeta
from lockstep.sessions.records import STATISTICS
from lockstep.workbench.checking.recorded_run import diagnose_recording
from lockstep.workbench.diagnosis.by_statistics import first_moved
from lockstep.workbench.diagnosis.recording import Recording
from tests.workbench.diagnosis.synthetic import Case, Place, synthetic

pytestmark = pytest.mark.sampled_file(2)


def statistics_of(run: Session, path: Path) -> Session:
    """The run without a tensor: of each tap and rank eight figures a step."""
    taps = [Tap(i, tap.name, tap.layout) for i, tap in enumerate(run.taps)]
    meta = SessionMeta(
        source="an engine", config=ConfigMeta(dtype="float32"),
        foreign=ForeignMeta(format="msprobe", ranks=tuple(range(run.ranks)), statistics_only=True),
    )  # fmt: skip
    with SessionWriter.create(path, taps=taps, ranks=run.ranks, meta=meta) as writer:
        for step in run.steps():
            known = run.step(step)
            table = np.full((len(taps), run.ranks, len(STATISTICS)), np.nan, np.float32)
            for tap in taps:
                parts = [run.parts(tap.name, step=step, seq=one.seq) for one in known.sequences]
                for rank in range(run.ranks):
                    held = [part[rank].array.astype(np.float64).reshape(-1) for part in parts if rank in part]
                    if held:
                        table[tap.index, rank] = _figures(np.concatenate(held))
            writer.step(0, StepRecord(step, known.phase, known.sequences, 0.0, stats=table))
    return Session.open(path)


def _figures(x: np.ndarray) -> list[float]:
    finite = x[np.isfinite(x)]
    return [
        finite.min(), finite.max(), finite.mean(), np.sqrt((finite**2).mean()), np.abs(finite).max(),
        np.isnan(x).sum(), np.isinf(x).sum(), (x == 0).sum(),
    ]  # fmt: skip


def moved(case: Case, path: Path, spoil: dict[str, Any], tp: int = 1) -> Any:
    with synthetic(path / "run.session", case.floor, tp=tp, spoil=spoil) as run:
        only = statistics_of(run, path / "only.session")
    with only:
        return first_moved(Recording(only), Recording(case.golden), Recording(case.floor))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_right_run_leaves_the_reference_nowhere(tp: int, case: Case, tmp_path: Path) -> None:
    assert moved(case, tmp_path, {}, tp) is None


@pytest.mark.parametrize("tp", [1, 2])
def test_the_first_tap_that_is_far_off_is_named(tp: int, case: Case, tmp_path: Path) -> None:
    def decode(x: np.ndarray, at: Place) -> np.ndarray:
        return x * 1.5 if at.step else x

    found = moved(case, tmp_path, {"layers.1.mlp.up": decode, "layers.2.mlp.up": lambda x, at: x * 2}, tp)
    assert (found.tap, found.step) == ("layers.2.mlp.up", 0)
    (tmp_path / "b").mkdir()
    found = moved(case, tmp_path / "b", {"layers.1.mlp.up": decode}, tp) if tp == 1 else found
    assert tp == 2 or (found.tap, found.step) == ("layers.1.mlp.up", 1)


def test_nan_is_far_off(case: Case, tmp_path: Path) -> None:
    def one(x: np.ndarray, at: Place) -> np.ndarray:
        x = x.copy()
        x[0, 0] = np.nan
        return x

    found = moved(case, tmp_path, {"layers.0.attn.v_proj": one})
    assert (found.tap, found.name) == ("layers.0.attn.v_proj", "NaN and infinities")


def test_the_verdict_is_inconclusive_and_reports_what_can_be_reported(case: Case, tmp_path: Path) -> None:
    with synthetic(
        tmp_path / "run.session", case.floor, spoil={"layers.1.mlp.up": lambda x, at: x * 2}
    ) as run:
        only = statistics_of(run, tmp_path / "only.session")
    with only:
        reported = diagnose_recording(only, case.model_dir, golden=case.golden.path, floor=case.floor.path)
    assert reported.judgement.verdict == "inconclusive"
    assert any(
        "first leaves the reference at layers.1.mlp.up, step 0" in note for note in reported.judgement.notes
    )
