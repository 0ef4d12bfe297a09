"""The timeline on a large screen: probability, entropy and sentinels of the chosen sequence over the steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from textual.pilot import Pilot

from lockstep.sessions import STATISTICS, SequenceStep, SessionWriter, StepRecord, Tap
from lockstep.sessions.meta import SessionMeta
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.tui.widgets.step_timeline import StepTimeline
from tests.workbench.tui.conftest import Bench, press, settle, text_of

#: Probabilities of the emitted tokens, by sequence: NaN at step 3 of the second.
CHANCES = {0: [0.9, 0.9, 0.1, 0.9, 0.9, 0.9], 1: [0.2, 0.2, 0.2, float("nan"), 0.2, 0.2]}
LABEL, WIDE = 13, 6


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """Six steps of two sequences, with NaN in the statistics of steps 3 and 4."""
    path = tmp_path / "batch.session"
    taps = [Tap(0, "embed", "replicate"), Tap(1, "logits", "replicate")]
    with SessionWriter.create(path, taps=taps, ranks=1, meta=SessionMeta()) as writer:
        for step in range(6):
            sequences = [
                SequenceStep(
                    seq, [1, 2] if step == 0 else [3], [0, 1] if step == 0 else [step + 1], [[step + 2]],
                    emitted=3, topk_ids=[3], topk_logits=[float(np.log(chances[step]))], logsumexp=0.0,
                    entropy=float("nan") if np.isnan(chances[step]) else 4 * (1 - chances[step]),
                )
                for seq, chances in CHANCES.items()
            ]  # fmt: skip
            stats = np.zeros((2, 1, len(STATISTICS)), np.float32)
            stats[1, 0, STATISTICS.index("nan")] = float(step in (3, 4))
            checksums = np.ones((2, 1), np.uint64)
            writer.step(
                0, StepRecord(step, "decode" if step else "prefill", sequences, 0.1, stats, checksums)
            )
    return path


def _timeline(pilot: Pilot[int]) -> list[str]:
    region = pilot.app.screen.query_one(StepTimeline).region
    return text_of(pilot)[region.y : region.bottom]


async def test_probability_entropy_and_sentinels_over_steps(bench: Bench, batch: Path) -> None:
    async with bench(size=(200, 60), path=batch) as pilot:
        lines = _timeline(pilot)
        assert [lines[i].split()[0] for i in (0, 2, 4)] == ["probability", "entropy", "sentinels"]
        heights = lines[1][LABEL::WIDE][:6]
        assert heights[2] in "▁▂", "one token was unlikely"
        assert set(heights) - {heights[2]} == {"█"}
        assert lines[4][LABEL::WIDE][:6] == "···××·", "where NaN was, and where not"
        assert lines[5].lstrip().startswith("▲ step 5   seq 0 of 2")
        assert lines[5].endswith("× NaN"), "what the mark means"
        await press(pilot, "right_parenthesis")
        lines = _timeline(pilot)
        assert "seq 1 of 2" in lines[5]
        assert [line[LABEL + 3 * WIDE] for line in lines[:4]] == ["×"] * 4, "NaN is seen in both figures"
        assert lines[1][LABEL] in "▂▃▄", "the other sequence's probability"
        await pilot.click(StepTimeline, offset=(LABEL + 2 * WIDE + 1, 1))
        await settle(pilot)
        screen = pilot.app.screen
        assert isinstance(screen, WorkbenchScreen)
        assert screen.where.step == 2


async def test_a_smaller_screen_has_no_timeline(bench: Bench, batch: Path) -> None:
    async with bench(size=(160, 50), path=batch) as pilot:
        assert not pilot.app.screen.query_one(StepTimeline).display
        assert pilot.app.screen.query_one(StepTimeline).steps.scanned == 0, "and nothing is read for it"
