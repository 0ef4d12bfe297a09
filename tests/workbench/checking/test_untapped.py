"""The path that runs while no tap is on is judged as well, and distinguished from the one that taps take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.engine.config import EngineConfig
from lockstep.workbench.checking.forced_run import check, record_reference
from lockstep.workbench.checking.untapped import UNTAPPED, judge_untapped
from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.verdict import judge
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.judgements.golden_event import UntappedRun
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import open_model
from lockstep.workbench.models.requests import plan
from tests.checkpoints import tiny_checkpoint
from tests.workbench.diagnosis.synthetic import Case, Place, synthetic, tiny_case

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return tiny_case(tmp_path_factory.mktemp("untapped"))


def spoilt(logits: np.ndarray, at: Place) -> np.ndarray:
    return logits if at.step == 0 else logits * 1.01


def reported(case: Case, path: Path, *, tapped: bool, untapped: bool) -> UntappedRun:
    """What is reported where the logits of either run are wrong from step 1 on."""
    with (
        synthetic(path / "a.session", case.floor, spoil={"logits": spoilt} if tapped else {}) as with_taps,
        synthetic(
            path / "b.session",
            case.floor,
            spoil={"logits": spoilt} if untapped else {},
            skip=lambda tap: tap not in UNTAPPED.full,
        ) as without,
    ):
        sides = Recordings.of(with_taps, case.golden, case.floor)
        return judge_untapped(without, sides, judge(sides))


@pytest.mark.parametrize("tap", ["mlp.router", "mlp.topk_ids", "attn.index_scores", "attn.index_chosen"])
def test_choices_are_recorded_without_taps(tap: str) -> None:
    assert f"layers.*.{tap}" in UNTAPPED.full


def test_what_is_wrong_without_taps_alone_is_reported(case: Case, tmp_path: Path) -> None:
    found = reported(case, tmp_path, tapped=False, untapped=True)
    assert found.verdict == "diverged"
    assert found.first is not None
    assert (found.first.tap, found.first.step) == ("logits", 1)
    assert found.first.reason.startswith("without taps: ")


def test_what_both_paths_share_is_not_reported_twice(case: Case, tmp_path: Path) -> None:
    found = reported(case, tmp_path, tapped=True, untapped=True)
    assert (found.verdict, found.first, found.max_abs_tapped) == ("diverged", None, 0.0)


@pytest.mark.parametrize("tapped", [False, True])
def test_right_without_taps_is_a_match(case: Case, tmp_path: Path, tapped: bool) -> None:
    found = reported(case, tmp_path, tapped=tapped, untapped=False)
    assert (found.verdict, found.first) == ("match", None)
    assert (found.max_abs_tapped > 0) is tapped


def test_a_wrong_fused_attention_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(str(tiny_checkpoint(tmp_path, "llama")))
    prompts, steps = [[5, 6, 7, 8, 9, 130]], 2
    reference = record_reference(model.directory, prompts, steps, "float32")
    monkeypatch.setattr(
        "lockstep.workbench.inferior.inferior.RANK_PROGRAM", "tests.workbench.checking.fused_rank"
    )
    config = plan(model, EngineConfig(tp=1), prompts, steps + 1, FULL)
    with Inferior(model.path, model.config, config) as inferior:
        result = check(inferior, reference, tmp_path / "run.session")
    assert result.judgement.verdict == "match"  # every tap is right
    assert not result.matches
    assert result.event.words.startswith("logits at step 0: without taps: ")
    assert "the fused attention" in result.causes[0].text
