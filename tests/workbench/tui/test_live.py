"""The workbench on a running model: two ranks of a tiny checkpoint, driven by the keys."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from textual.pilot import Pilot

from lockstep.engine.faults.catalogue import FAULTS
from lockstep.sessions.records import STATISTICS
from lockstep.workbench.debugger.host import client
from lockstep.workbench.tui import routes
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.drivers.live import LiveDriver
from lockstep.workbench.tui.panes.tensor import TensorPane
from lockstep.workbench.tui.screens.starting import StartingScreen
from lockstep.workbench.tui.screens.toggles import TogglesScreen
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.tui.settings import UserSettings, load
from lockstep.workbench.tui.widgets.grid import Grid
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.views.attention import attention
from lockstep.workbench.views.operations import operations
from lockstep.workbench.words.numbers import number
from tests.checkpoints import tiny_checkpoint
from tests.workbench.tui.conftest import enter, press, settle, text_of, until

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of three layers."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a context that no run fills before it is interrupted."""
    return tiny_checkpoint(tmp_path_factory.mktemp("roomy"), "qwen2", max_position_embeddings=4096)


@asynccontextmanager
async def running(
    model: Path, directory: Path, tp: int = 1, chosen: UserSettings | None = None
) -> AsyncIterator[Pilot[int]]:
    """The live workbench after the prefill."""
    words = [str(model), "--tp", str(tp), "--ids", "1,5,9,12", "--session", str(directory / "live.session")]
    app = LockstepApp(routes.running(words, "tiny"), chosen)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: isinstance(app.screen, WorkbenchScreen) and app.screen.present is not None, pilot)
        await settle(pilot)
        yield pilot


def _driver(pilot: Pilot[int]) -> LiveDriver:
    driver = _screen(pilot).driver
    assert isinstance(driver, LiveDriver)
    return driver


def _screen(pilot: Pilot[int]) -> WorkbenchScreen:
    assert isinstance(pilot.app.screen, WorkbenchScreen)
    return pilot.app.screen


@pytest.mark.slow
async def test_step_toggle_and_compare(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as pilot:
        await press(pilot, "n", "n", "n")
        assert _screen(pilot).where.step == 3
        await press(pilot, "s", "i")
        assert any("step 4/4" in line and "at layers.0" in line for line in text_of(pilot))
        await press(pilot, "N")
        assert _screen(pilot).where.step < 4
        await press(pilot, "x")
        assert isinstance(pilot.app.screen, TogglesScreen)
        await press(pilot, "escape")
        await enter(pilot, "colon", "toggle load_bias false")
        assert _screen(pilot).where.branch == 1
        lines = text_of(pilot)
        assert any("faults  load_bias=false" in line for line in lines)
        assert any(line.startswith(" main ") for line in lines), "the old branch stays beside the new"
        await press(pilot, "2", "3", "4", "5", "6", "7", "8")
        assert any("toggle load_bias false" in line for line in text_of(pilot))


async def test_a_toggle_is_a_before_and_after(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as pilot:
        await press(pilot, "n", "n")
        await press(pilot, "x")
        assert isinstance(pilot.app.screen, TogglesScreen)
        await press(pilot, *["down"] * BIASES, "enter")
        await until(lambda: _screen(pilot).where.branch == 1 and _driver(pilot).running is None, pilot)
        await settle(pilot)
        lines = text_of(pilot)
        reported = next(found for line in lines if (found := _DIFFERS.search(line)))
        step = int(reported[1])
        assert step >= 3, "the steps up to the fork run on the same tokens"
        assert f"step {step}/10" in lines[0], "it stopped at the first different token, 8 steps are there"
        assert [line.split()[0] for line in lines[2:4]] == ["load_bias=false", "main"]
        cells = [line.split("│")[4 + step] for line in lines[2:4]]
        assert [cell.strip() for cell in cells] == [reported[2], reported[3]]
        widths = [len(line.rstrip().split("│")) for line in lines[2:4]]
        assert widths[0] == widths[1], "both have the same steps"
        await press(pilot, "n", "N", "N")
        await enter(pilot, "colon", "goto 10")
        assert any(f"first difference at step {step}" in line for line in text_of(pilot)), "the mark stays"
        await enter(pilot, "colon", "toggle load_bias true")
        lines = text_of(pilot)
        assert any(
            f"back on branch 0 (main): differs from load_bias=false at step {step}" in line for line in lines
        )
        assert "branch main" in lines[0]
        assert any("faults  none" in line for line in lines)
        assert [line.split()[0] for line in lines[2:4]] == ["main", "load_bias=false"], (
            "what was left stays beside"
        )
        await press(pilot, "N")
        assert any(f"first difference at step {step}" in line for line in text_of(pilot))
        assert len(_screen(pilot).overview.branches) == 2, "no third branch"


#: Where the toggle of the biases stands in the list.
BIASES = [fault.id for fault in FAULTS].index("bias-not-loaded")
_DIFFERS = re.compile(
    r"branch 1 \(load_bias=false\): differs from main at step (\d+): “(.+?)” instead of “(.+?)”"
)


@pytest.mark.slow
async def test_a_pane_has_what_it_lacks_brought(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, tp=2) as pilot:
        await press(pilot, "n", "5", "l")
        assert any("layer 2" in line for line in text_of(pilot)), "the lens was taken and is shown"
        await press(pilot, "3")
        assert any("were not captured" in line for line in text_of(pilot))
        await press(pilot, "a")
        assert any("norm of the cached keys" in line for line in text_of(pilot))
        await enter(pilot, "colon", "toggle load_bias false")
        await press(pilot, "4", "a")
        assert any("shares are not what the checkpoint has" in line for line in text_of(pilot))
        await press(pilot, "u")
        assert any("nothing but zeros" in line for line in text_of(pilot))
        await press(pilot, "enter", "R", "d")
        assert any("rank 0 less the checkpoint" in line for line in text_of(pilot))


@pytest.mark.slow
async def test_where_the_engine_stands_and_where_it_stops(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path) as pilot:
        await _a_look_elsewhere_states_where_the_debugger_stands_and_one_key_returns(pilot)
        await _the_engines_place_and_breakpoints_are_marked(pilot)
        await _the_journal_leads_back_to_an_operation_and_on_from_there(pilot)
        await _a_breakpoint_stops_and_output_opens_a_sheet(pilot)


async def _the_journal_leads_back_to_an_operation_and_on_from_there(pilot: Pilot[int]) -> None:
    await press(pilot, "n", "n", "8")
    at, pane = _driver(pilot).at, _screen(pilot).front
    assert (at.step, at.tap) == (5, None)
    events = pane.query_one("#events", Grid)
    events.focus()
    events.cursor = [entry.tap for entry in pane.entries].index("layers.0.attn.q_proj")
    await press(pilot, "enter")
    at = _driver(pilot).at
    assert (at.step, at.tap) == (4, "layers.0.attn.q_proj")
    assert any("▶   attn.q_proj" in line for line in text_of(pilot)), "the tree has the arrow there"
    await press(pilot, "n", "1")
    assert (_driver(pilot).at.step, _driver(pilot).at.tap) == (4, None), "on to the end of that step"


async def _a_breakpoint_stops_and_output_opens_a_sheet(pilot: Pilot[int]) -> None:
    await enter(pilot, "colon", "break layers.1.attn.q_proj")
    await press(pilot, "c")
    assert any("layers.1.attn.q_proj" in line and "●" in line for line in text_of(pilot)[:1])
    await enter(pilot, "colon", "info breakpoints")
    assert any("layers.1.attn.q_proj" in line for line in text_of(pilot))


@pytest.mark.slow
async def test_commands_wait_for_their_turn_and_are_taken_back(roomy: Path, tmp_path: Path) -> None:
    async with running(roomy, tmp_path) as pilot:
        await _keys_that_are_typed_ahead_all_act(pilot)
        await _keys_that_are_typed_while_a_toggle_is_applied_act_in_turn(pilot)
        await _more_keys_than_can_wait_are_reported_of(pilot)
        await _ctrl_c_takes_back_what_waits(pilot)
        await _what_is_cancelled_while_it_waits_waits_no_more(pilot)
        await _an_interrupt_stops_a_long_run(pilot)


async def _keys_that_are_typed_ahead_all_act(pilot: Pilot[int]) -> None:
    screen = _screen(pilot)
    await pilot.press("n", "n", "n", "n")  # faster than the engine
    await until(lambda: screen.where.step == 4 and screen.driver.running is None, pilot)
    await settle(pilot)
    assert screen.where.step == 4
    assert screen.runner.waiting == 0


async def _keys_that_are_typed_while_a_toggle_is_applied_act_in_turn(pilot: Pilot[int]) -> None:
    screen = _screen(pilot)
    screen.commands.run("toggle load_bias false")  # reads weights again: longer than a step
    await until(lambda: screen.driver.running is not None and screen.runner.elapsed > 0.01, pilot)
    await pilot.press("n", "n")
    await until(lambda: screen.driver.running is None and screen.runner.waiting == 0, pilot)
    await settle(pilot)
    first = int(re.search(r"first difference at step (\d+)", "\n".join(text_of(pilot)))[1])
    assert (screen.where.branch, screen.where.step) == (1, first + 2)


async def _more_keys_than_can_wait_are_reported_of(pilot: Pilot[int]) -> None:
    screen = _screen(pilot)
    screen.commands.run("next 3000")
    await until(lambda: screen.driver.running == "next 3000", pilot)
    await pilot.press(*"nnnnnnnnn")
    await until(lambda: screen.runner.waiting == 8, pilot)
    await until(
        lambda: any("8 commands waiting (no more are taken)" in line for line in text_of(pilot)), pilot
    )
    await pilot.press("ctrl+c")
    await until(lambda: screen.driver.running is None and screen.runner.waiting == 0, pilot)


async def _ctrl_c_takes_back_what_waits(pilot: Pilot[int]) -> None:
    screen = _screen(pilot)
    screen.commands.run("next 3000")
    screen.commands.run("next")
    await until(lambda: screen.driver.running == "next 3000" and screen.runner.waiting == 1, pilot)
    await pilot.press("ctrl+c")
    await until(lambda: screen.driver.running is None and screen.runner.waiting == 0, pilot)
    await settle(pilot)
    stopped = screen.where.step
    await pilot.pause(0.3)
    assert screen.where.step == stopped < 3000


async def _what_is_cancelled_while_it_waits_waits_no_more(pilot: Pilot[int]) -> None:
    screen = _screen(pilot)
    screen.commands.run("next 3000")
    await until(lambda: screen.driver.running == "next 3000", pilot)
    waits = asyncio.create_task(screen.runner.run("next"))
    await until(lambda: screen.runner.waiting == 1, pilot)
    waits.cancel()
    await until(lambda: screen.runner.waiting == 0, pilot)
    await pilot.press("ctrl+c")
    await until(lambda: screen.driver.running is None, pilot)
    await press(pilot, "n")
    assert screen.driver.running is None


async def _an_interrupt_stops_a_long_run(pilot: Pilot[int]) -> None:
    await pilot.press("colon", *"next", "space", *"3000", "enter")
    screen = _screen(pilot)
    await until(lambda: screen.where.step > 3, pilot)
    await pilot.press("2")
    assert screen.pane == 2, "the screen answers while the engine runs"
    await pilot.press("ctrl+c")
    await until(lambda: screen.driver.running is None, pilot)
    await settle(pilot)
    assert screen.where.step < 3000


async def test_a_lost_rank_is_named_and_restart_brings_it_back(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, tp=2) as pilot:
        screen = _screen(pilot)
        os.kill(_driver(pilot).rank_pids[1], signal.SIGKILL)
        await until(lambda: "● rank lost" in text_of(pilot)[0], pilot)  # while nothing runs
        assert any("rank 1" in line and "✗" in line for line in text_of(pilot))
        await enter(pilot, "colon", "restart")
        await until(lambda: "● before step 0" in text_of(pilot)[0], pilot)
        await press(pilot, "n", "n")
        await until(lambda: screen.where.step >= 1, pilot)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_processes")
async def test_the_processes_of_a_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand back for the screens, are reported while they do not answer, and end with them."""
    monkeypatch.setattr(client, "_SILENT_AFTER", 2.0)
    async with running(model, tmp_path) as pilot:
        pids = [*_driver(pilot).rank_pids, _driver(pilot).host_pid]
        await _the_engine_stands_back_for_the_screens(pilot)
        await _a_stopped_host_is_reported_until_it_answers_again(pilot)
    for _ in range(200):
        if not any(_alive(pid) for pid in pids):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still alive: {[pid for pid in pids if _alive(pid)]}")


async def _a_stopped_host_is_reported_until_it_answers_again(pilot: Pilot[int]) -> None:
    os.kill(_driver(pilot).host_pid, signal.SIGSTOP)
    try:
        await until(lambda: any("the host has not answered for" in line for line in text_of(pilot)), pilot)
        assert "● host does not answer" in text_of(pilot)[0]
        assert any("state T" in line for line in text_of(pilot))
    finally:
        os.kill(_driver(pilot).host_pid, signal.SIGCONT)
    await until(lambda: any("the host answers again" in line for line in text_of(pilot)), pilot)
    assert "● stopped" in text_of(pilot)[0]
    await press(pilot, "n")
    assert _screen(pilot).where.step == 1


async def _the_engine_stands_back_for_the_screens(pilot: Pilot[int]) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    groups = set()
    for pid in (_driver(pilot).host_pid, *_driver(pilot).rank_pids):
        assert os.getpriority(os.PRIO_PROCESS, pid) > mine
        group = Path(f"/proc/{pid}/autogroup")
        if group.is_file():  # Linux, with grouping by session
            groups.add(group.read_text())
    assert len(groups) <= 1, "the processor is shared out by session: all of the engine is one"
    assert all(int(group.rpartition(" ")[2]) > 0 for group in groups)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("folder", ["short", "a-folder-with-a-long-name-" * 7])
async def test_a_model_that_cannot_be_loaded_reports_why(tmp_path: Path, folder: str) -> None:
    model = tmp_path / folder
    model.mkdir()
    app = LockstepApp(routes.running([str(model), "--ids", "1"], "nothing"))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(lambda: any("config.json" in line for line in text_of(pilot)), pilot)
        assert isinstance(app.screen, StartingScreen)
        await press(pilot, "escape")
    assert app.return_value == 3


def _knocks(where: tuple[str, int]) -> bool:
    with socket.socket() as stranger:
        return stranger.connect_ex(where) == 0


async def test_while_ranks_are_awaited_strangers_are_reported_of(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_KEY", "5a1c0f9e" * 8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
    app = LockstepApp(routes.running([str(model), "--ids", "1", "--listen", f"127.0.0.1:{where[1]}"], "tiny"))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(lambda: _knocks(where), pilot)
        await until(lambda: "from 127.0.0.1 and did not prove" in "\n".join(text_of(pilot)), pilot)
        assert isinstance(app.screen, StartingScreen)
        await press(pilot, "escape")
    assert app.return_value == 130


async def test_keys_pressed_while_the_ranks_start_act_in_turn(model: Path, tmp_path: Path) -> None:
    words = [str(model), "--ids", "1,5,9,12", "--session", str(tmp_path / "live.session")]
    app = LockstepApp(routes.running(words, "tiny"))
    async with app.run_test(size=(80, 24)) as pilot:
        assert isinstance(app.screen, StartingScreen)
        await pilot.press("n", "n", "down", *"2:goto", "space", "1", "enter")
        await until(lambda: isinstance(app.screen, WorkbenchScreen), pilot)
        await until(lambda: _screen(pilot).pane == 2, pilot)  # each key acts in its turn: the steps are first
        await until(lambda: any("step 1/2" in line for line in text_of(pilot)), pilot)
        assert _screen(pilot).pane == 2


async def test_keys_that_wait_for_the_ranks_are_shown() -> None:
    class Slow(LiveDriver):
        async def start(self) -> Path:
            await asyncio.sleep(60)
            raise AssertionError

    app = LockstepApp(lambda chosen: StartingScreen(Slow([]), "slow", lambda *made: StartingScreen(*made)))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("n", "n", "down", *"2:goto")
        await until(lambda: any("then  n n ↓ 2 : g o t o" in line for line in text_of(pilot)), pilot)
        await pilot.press(*"n" * 40)
        await until(lambda: any("no more are taken" in line for line in text_of(pilot)), pilot)
        await pilot.press("escape")


async def test_inside_a_step_the_screens_show_the_step_that_is_stopped_in(
    model: Path, tmp_path: Path
) -> None:
    """The values are those of the operations that have passed; what has not is dimmed and shows whose it is."""
    async with running(model, tmp_path) as pilot:
        await press(pilot, "n", "n")
        await press(pilot, *"iiii")  # embed, attn_norm, q_proj, k_proj of step 3
        lines = text_of(pilot)
        assert "step 3/3" in lines[0]
        assert "at layers.0.attn.k_proj" in lines[0]
        assert _screen(pilot).where.step == 3
        passed = await _screen(pilot).reader.ask(operations, _screen(pilot).where)
        assert passed.passed == 3
        row = next(line for line in lines if "▶    attn.k_proj" in line)
        shown = number(float(passed.stats[3, 0, STATISTICS.index("rms")]))
        assert shown in row
        assert f"({shown})" not in row
        later = next(line for line in lines if "attn.v_proj" in line)
        before = await _screen(pilot).reader.ask(lambda source: source.stats(2, 0))
        assert f"({number(float(before[4, 0, STATISTICS.index('rms')]))})" in later
        await press(pilot, "enter")  # the tensor of the operation just passed, without finishing the step
        assert any("layers.0.attn.k_proj  all ranks  1×" in line for line in text_of(pilot))
        assert isinstance(_screen(pilot).front, TensorPane)
        await press(pilot, "i")  # and of the next one, as the debugger goes on
        await settle(pilot)
        assert any("layers.0.attn.v_proj  all ranks  1×" in line for line in text_of(pilot))
        assert any("value   " in line for line in text_of(pilot))
        await press(pilot, "escape")
        assert _driver(pilot).at.tap == "layers.0.attn.v_proj"
        await press(pilot, "n")
        assert _screen(pilot).where.step == 3
        whole = await _screen(pilot).reader.ask(operations, _screen(pilot).where)
        assert whole.passed is None
        assert (whole.stats[:4] == passed.stats[:4]).all(), "what was shown inside is what was recorded"


@pytest.mark.slow
async def test_attention_of_the_layer_just_passed_is_shown_inside_the_step(
    model: Path, tmp_path: Path
) -> None:
    async with running(model, tmp_path, tp=2) as pilot:
        await press(pilot, "n", "n", "2")
        screen = _screen(pilot)
        await enter(pilot, "colon", "until layers.1.attn.probs")
        assert screen.where.step == 3
        pane = screen.front
        assert pane.snapshot.step == 3
        assert (pane.snapshot.layer, pane.snapshot.values is not None) == (1, True)
        inside = pane.snapshot.values[:, -1].copy()
        assert not any("has not come here yet" in line for line in text_of(pilot))
        await press(pilot, "full_stop")  # the next layer has not passed
        assert (pane.snapshot.layer, pane.snapshot.step) == (2, 2)
        assert any("of step 2: step 3 has not come here yet" in line for line in text_of(pilot))
        await press(pilot, "3")
        text = "\n".join(text_of(pilot))
        assert "step 3 is under way: slot 6 " in text
        assert "written in layers 0–1   layer 2 to come" in text
        assert "has not come here yet" not in text
        await press(pilot, "a")
        reported = " ".join("\n".join(text_of(pilot)[-5:]).split())
        assert "2 taps of step 3 added" in reported
        assert _driver(pilot).at.tap == "layers.1.attn.probs", "the step was not finished"
        norms = screen.front.query_one("#norms", Heatmap).matrix.values
        assert np.isfinite(norms[:4, 6]).all(), "the rows just written, of layers 0 and 1 on both ranks"
        assert norms.shape == (6, 7)
        assert np.isneginf(norms[4:, 6]).all()
        await enter(pilot, "colon", "goto 3")
        await press(pilot, "2")
        attended = await screen.reader.ask(attention, screen.where, 1)
        assert (attended.values[:, -1] == inside).all()


async def _the_engines_place_and_breakpoints_are_marked(pilot: Pilot[int]) -> None:
    await press(pilot, "n", "i", "i", "i")
    assert any("▶    attn.q_proj" in line for line in text_of(pilot)), "table and tree"
    await press(pilot, "down", "down")  # the cursor does not carry the arrow along
    assert any("▶    attn.q_proj" in line for line in text_of(pilot))
    await press(pilot, "b")
    assert any("◆   attn.v_proj" in line for line in text_of(pilot))
    await enter(pilot, "colon", "watch layers.0.attn.probs absmax > 50")
    assert any("◇   attn.probs" in line for line in text_of(pilot))
    await press(pilot, "b")
    assert not any("◆" in line for line in text_of(pilot)), "b takes it away again"


async def _a_look_elsewhere_states_where_the_debugger_stands_and_one_key_returns(pilot: Pilot[int]) -> None:
    await press(pilot, "n", "n", "i", "left_square_bracket", "left_square_bracket")
    assert _screen(pilot).where.step == 1
    assert "looking · stopped in step 3 at embed (= returns)" in text_of(pilot)[0]
    await press(pilot, "equals_sign")
    assert _screen(pilot).where.step == 3
    assert "looking" not in text_of(pilot)[0]


@pytest.mark.slow
async def test_nan_is_caught_and_gone_to(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, tp=2) as pilot:
        await _nan_is_caught_where_it_begins_without_asking_and_once(pilot)
        await _going_to_an_alarm_moves_the_debugger(pilot)


async def _going_to_an_alarm_moves_the_debugger(pilot: Pilot[int]) -> None:
    assert "from layers.0.attn.scores on, rank 0 1" in text_of(pilot)[1]
    await press(pilot, "6", "enter")
    at = _driver(pilot).at
    assert (at.branch, at.step, at.tap) == (1, 0, "layers.0.attn.scores")
    assert _screen(pilot).where.step == 0
    await press(pilot, "n")
    assert (_driver(pilot).at.branch, _driver(pilot).at.step) == (1, 0), "the debugger goes on from there"
    await press(pilot, "8")
    _screen(pilot).front.query_one("#branches").focus()
    await press(pilot, "home", "enter")
    assert _driver(pilot).at.branch == 0
    assert "NaN" not in text_of(pilot)[1]


async def _nan_is_caught_where_it_begins_without_asking_and_once(pilot: Pilot[int]) -> None:
    await press(pilot, "n", "B")
    lines = text_of(pilot)
    assert all(any("catch" in line and what in line for line in lines) for what in ("nan", "desync"))
    await press(pilot, "escape")
    assert "NaN" not in text_of(pilot)[1]
    await enter(pilot, "colon", "toggle mask additive")
    assert _driver(pilot).at.tap is None, "a toggle compares: both branches ran ahead"
    step = _driver(pilot).at.step + 1
    await press(pilot, "n")
    at = _driver(pilot).at
    assert (at.branch, at.step, at.tap) == (1, step, "layers.0.attn.scores")
    lines = text_of(pilot)
    assert f"● NaN in step {step}, from layers.0.attn.scores on, rank 0 1: 0 × -inf in the mask" in lines[1]
    assert any(f"catch 1, nan: step {step}, at layers.0.attn.scores" in line for line in lines)
    await enter(pilot, "colon", "next 4")
    at = _driver(pilot).at
    assert (at.step, at.tap) == (step + 3, None), "neither at all that follows nor in the next steps"


@pytest.mark.slow
async def test_what_is_caught_from_the_beginning_is_a_setting(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("catch = []\n")
    async with running(model, tmp_path, tp=1, chosen=load(file)) as pilot:
        await enter(pilot, "colon", "info breakpoints")
        assert any("no breakpoints: " in line for line in text_of(pilot))
        await enter(pilot, "colon", "toggle mask additive")
        step = _driver(pilot).at.step + 1
        await press(pilot, "n")
        assert (_driver(pilot).at.step, _driver(pilot).at.tap) == (step, None)
        assert "from layers.0.attn.scores on" in text_of(pilot)[1], "the header states it all the same"


async def test_latents_are_stepped_into_and_captured(tmp_path: Path) -> None:
    """What a model caches in place of keys: the key of the pane captures that."""
    model = tiny_checkpoint(tmp_path, "deepseek_v2")
    async with running(model, tmp_path) as pilot:
        await press(pilot, "s", "s", "3")
        assert any("step 1 is under way" in line for line in text_of(pilot))
        await press(pilot, "n", "a")
        text = "\n".join(text_of(pilot))
        assert "norm of the cached rotated parts of keys" in text
        await press(pilot, "v")
        assert any("The cached latents were not captured." in line for line in text_of(pilot))
        await press(pilot, "a")
        assert any("norm of the cached latents" in line for line in text_of(pilot))


@pytest.mark.slow
async def test_layers_that_keep_a_state_name_it_and_show_it(tmp_path: Path) -> None:
    """Qwen3-Next: layer 1 attends, the others hand on a state."""
    async with running(tiny_checkpoint(tmp_path, "qwen3_next"), tmp_path) as pilot:
        await press(pilot, "2")
        lines = text_of(pilot)
        assert any("Layer 0 has linear attention: it keeps a state" in line for line in lines)
        assert any(", .  layer 1 attends to tokens" in line for line in lines)
        await press(pilot, "full_stop")
        assert any("layer 1 probs" in line for line in text_of(pilot))
        await press(pilot, "3", "a", "n")
        lines = text_of(pilot)
        assert any(re.search(r"state 0 .* norm .*, changed by .*% in this step", line) for line in lines)
        assert any("norm of the cached keys" in line for line in lines)
