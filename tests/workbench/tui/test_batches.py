"""A batch of three prompts on screen: live on two ranks, paused inside a step, and in replay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot

from lockstep.sessions import SequenceStep, SessionWriter, StepRecord, Tap
from lockstep.sessions.meta import SessionMeta
from lockstep.workbench.tui import routes
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.drivers.live import LiveDriver
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from tests.checkpoints import tiny_checkpoint
from tests.workbench.tui.conftest import Bench, enter, press, settle, text_of

PROMPTS = ("1,5,9,12", "7,8", "30")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of three layers."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@asynccontextmanager
async def running(
    model: Path, session: Path, tp: int = 2, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[Pilot[int]]:
    """The live workbench on the batch after its prefill."""
    words = [str(model), "--tp", str(tp), "--session", str(session)]
    words += [word for ids in PROMPTS for word in ("--ids", ids)]
    app = LockstepApp(routes.running(words, "tiny"))
    async with app.run_test(size=size) as pilot:
        for _ in range(1200):
            if isinstance(app.screen, WorkbenchScreen) and app.screen.present is not None:
                break
            await pilot.pause(0.05)
        await settle(pilot)
        yield pilot


def _screen(pilot: Pilot[int]) -> WorkbenchScreen:
    assert isinstance(pilot.app.screen, WorkbenchScreen)
    return pilot.app.screen


def _chosen(pilot: Pilot[int]) -> list[int]:
    """The lines of the strip that are marked as the chosen one."""
    return [i for i, line in enumerate(text_of(pilot)[2:5]) if line.startswith(f"▸seq {i} ")]


@pytest.mark.slow
async def test_keys_mouse_and_command_choose_the_sequence(model: Path, tmp_path: Path, bench: Bench) -> None:
    async with running(model, tmp_path / "live.session") as pilot:
        driver = _screen(pilot).driver
        assert isinstance(driver, LiveDriver)
        lines = text_of(pilot)
        assert "seq 0 of 3" in lines[0]
        assert "pos 3" in lines[0]
        assert [len(line.split("│")) - 1 for line in lines[2:5]] == [5, 3, 2], (
            "prompt and the first token of each"
        )
        assert any("of all 3 sequences" in line for line in lines), "the statistics are the batch's"
        await press(pilot, "right_parenthesis")
        assert _chosen(pilot) == [1]
        assert "seq 1 of 3" in text_of(pilot)[0]
        assert "pos 1" in text_of(pilot)[0]
        await enter(pilot, "colon", "where")
        assert any("seq 1 of 3 reads" in line and "position 1" in line for line in text_of(pilot))
        await press(pilot, "escape")
        assert driver.at is not None
        assert driver.at.sequence == 1, "the debugger knows"
        await enter(pilot, "colon", "sequence 2")
        assert _chosen(pilot) == [2]
        await press(pilot, "right_parenthesis")
        assert _chosen(pilot) == [0], "around the end"
        await press(pilot, "left_parenthesis", "n")
        assert _chosen(pilot) == [2], "a step leaves the choice alone"
        await pilot.click("#tokens", offset=(3, 1))
        await settle(pilot)
        assert _chosen(pilot) == [1]
        await press(pilot, "s", "i", "i")
        lines = text_of(pilot)
        assert any("of all 3 sequences" in line for line in lines)
        await enter(pilot, "colon", "where")
        assert any("seq 1 of 3 reads" in line and "position 3" in line for line in text_of(pilot))
        await press(pilot, "escape")
        assert "pos 3" in text_of(pilot)[0]
        await press(pilot, "n")
        await _every_pane_shows_the_chosen_one(pilot)
    async with bench(path=tmp_path / "live.session") as pilot:
        await _every_pane_shows_the_chosen_one(pilot)


async def _every_pane_shows_the_chosen_one(pilot: Pilot[int]) -> None:
    """At step 2, whose positions are as many as the prompt's tokens and two more."""
    screen = _screen(pilot)
    for _ in PROMPTS:
        await press(pilot, "right_parenthesis", "2")
        seq = screen.where.seq
        length = len(PROMPTS[seq].split(",")) + 2
        assert any(f"k 0…{length - 1}" in line for line in text_of(pilot)), "attention over its positions"
        await press(pilot, "3")
        assert any(f"▸ sequence {seq}   rows {length} " in line for line in text_of(pilot))
        reported = await screen.reader.ask(lambda source, seq=seq: source.sequence(2, 0, seq))
        await press(pilot, "5")
        assert any(f"chosen ‹{reported.emitted}› " in line for line in text_of(pilot)), "its logits"
    await press(pilot, "1")


@pytest.fixture
def ragged(tmp_path: Path) -> Path:
    """Four steps: sequence 0 in all of them, 1 in the first two, 2 joins at the third."""
    path = tmp_path / "ragged.session"
    fed: dict[int, dict[int, list[int]]] = {0: {0: [1, 2, 3], 1: [4, 5]}, 1: {0: [6], 1: [7]}}
    fed |= {2: {0: [8], 2: [9, 10]}, 3: {0: [11], 2: [12]}}
    begins: dict[int, int] = {}
    taps = [Tap(0, "embed", "replicate"), Tap(1, "logits", "replicate")]
    with SessionWriter.create(path, taps=taps, ranks=1, meta=SessionMeta()) as writer:
        for step, batch in fed.items():
            sequences = []
            for seq, ids in batch.items():
                first = begins.get(seq, 0)
                begins[seq] = first + len(ids)
                positions = list(range(first, first + len(ids)))
                sequences.append(
                    SequenceStep(seq, ids, positions, [[begins[seq]]], emitted=20 + 4 * seq + step)
                )
            phase = "prefill" if step == 0 else "decode"
            writer.step(0, StepRecord(step, phase, sequences, 0.1))
    return path


async def test_sequences_that_are_not_in_a_step_are_reported(bench: Bench, ragged: Path) -> None:
    async with bench(path=ragged) as pilot:
        lines = text_of(pilot)
        assert "seq 0 of 3" in lines[0]
        assert lines[3].count("·│") == 2, "sequence 1 has left"
        await press(pilot, "right_parenthesis")
        assert any("sequence 1 is not in step 3: its last was step 1" in line for line in text_of(pilot))
        for pane in "259":  # those of one sequence
            await press(pilot, pane)
            reported = [line.strip() for line in text_of(pilot)]
            assert any(
                line.endswith("Sequence 1 is not in step 3: its last was step 1.") for line in reported
            ), pane
            assert any(line.endswith("( )  choose another sequence") for line in reported), pane
        await enter(pilot, "colon", "where")
        assert any("sequence 1 is not in step 3" in line for line in text_of(pilot))
        await press(pilot, "escape", "right_parenthesis")
        await press(pilot, *["left_square_bracket"] * 2)
        assert any(
            "sequence 2 is not in step 1: it joins the batch at step 2" in line for line in text_of(pilot)
        )
        await enter(pilot, "colon", "sequence 5")
        assert any("there is no sequence 5: sequences are 0, 1 and 2" in line for line in text_of(pilot))
