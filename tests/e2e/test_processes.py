"""What happens to the processes and to the terminal: a rank that dies, keys that interrupt, stop and quit, a
terminal that is closed, a crash. Nothing is left behind, whichever way it ends."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.terminal import PLAIN, Terminal, needs_tmux

pytestmark = needs_tmux

_APP, _HOST, _RANK = "lockstep.workbench.cli", "lockstep.workbench.cli.host", "lockstep.engine.faults.rank"


def _start(here: Terminal, model: Path, tp: int = 2) -> None:
    here.start(f"lockstep tui {model} --tp {tp} --ids 1,5,9,12 --save live.session")
    here.wait("● stopped", "step 0/0")


def _steps(shown: str) -> int:
    found = re.search(r"step (\d+)/", shown)
    return int(found[1]) if found else -1


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_restart_brings_it_back(
    terminals: Callable[..., Terminal], model: Path
) -> None:
    here = terminals()
    before = here.line_discipline()
    _start(here, model)
    # Running flat out, and a rank dies.
    here.type("c")
    here.until(lambda shown: _steps(shown) >= 3)
    here.signal(_RANK, signal.SIGKILL, 1)
    shown = here.wait("rank 1", "killed by SIGKILL", "● rank lost")
    kept = _steps(shown)
    assert kept >= 3, "what was recorded is still to be seen"
    here.enter(":restart")
    here.wait("● before step 0")
    here.enter(":next 2")
    here.until(lambda shown: "● stopped" in shown and _steps(shown) > 0)
    # ctrl+c interrupts; the screens stay.
    here.type("c")
    here.wait("● continue …")
    here.press("C-c")
    shown = here.until(lambda shown: re.search(rf"interrupted: step {_steps(shown)} ", shown))
    # ctrl+z gives the terminal back and fg the screens, with the engine where it was.
    here.press("C-z")
    here.wait("Stopped")
    assert here.modes() == PLAIN
    here.start("fg")
    here.wait(f"interrupted: step {_steps(shown)} ", f"step {_steps(shown)}/", "Operations")
    here.type("n")
    here.until(lambda now: _steps(now) > _steps(shown) and "● stopped" in now)
    # ctrl+q quits, also while the engine runs.
    here.type("c")
    here.wait("● continue …")
    here.press("C-q")
    shown = here.back_in_shell()
    assert (here.code(), here.line_discipline()) == (0, before), shown
    here.nothing_is_left()
    stated = here.shell_line("lockstep sessions verify live.session && echo kept")
    assert "kept" in stated, stated


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("SIGTERM", "closed")), "SIGKILL"]
)
def test_nothing_outlives_a_program_that_is_ended(
    how: str, terminals: Callable[..., Terminal], model: Path
) -> None:
    here = terminals()
    before = here.line_discipline()
    _start(here, model)
    assert (len(here.of(_HOST)), len(here.of(_RANK))) == (1, 2)
    here.type("c")  # in the middle of work
    here.until(lambda shown: _steps(shown) >= 3)
    if how == "closed":
        here.close()
    else:
        here.signal(_APP, signal.Signals[how])
    here.nothing_is_left()
    if how == "SIGTERM":
        shown = " ".join(here.back_in_shell().split())
        found = re.search(r"lockstep: ended by SIGTERM; live.session is recorded up to step (\d+)", shown)
        assert found is not None, shown
        assert here.line_discipline() == before
        assert here.code() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_what_the_killed_have_left_is_swept_by_the_next_to_start(
    terminals: Callable[..., Terminal], model: Path
) -> None:
    """Screens and host killed together, so that neither can tidy up after the other."""
    here = terminals()
    _start(here, model, tp=1)
    here.signal(_HOST, signal.SIGSTOP)
    here.signal(_APP, signal.SIGKILL)
    here.signal(_HOST, signal.SIGKILL)
    here.enter("reset")  # the screens could not
    here.until(lambda shown: not here.processes())
    assert [path.name.split("-")[1] for path in here.scratch.iterdir()] == ["host"]
    here.shell_line(f"lockstep generate {model} --ids 1 --max-tokens 1")
    assert [*here.scratch.iterdir()] == []


@pytest.mark.slow
def test_quitting_while_the_ranks_start_ends_them(terminals: Callable[..., Terminal], model: Path) -> None:
    here = terminals()
    here.start(f"lockstep tui {model} --tp 2 --ids 1,5")
    here.wait("starting the ranks")
    here.until(lambda shown: here.of(_HOST))
    here.press("C-q")
    here.back_in_shell()
    here.nothing_is_left()


def test_the_home_screen_fits_any_size_and_ends_with_its_terminal(terminals: Callable[..., Terminal]) -> None:
    here = terminals()
    here.start("lockstep")
    here.wait("demo", "open …", "^q quit")
    here.resize(20, 5)
    here.until(lambda shown: "demo" in shown and "open …" in shown and len(shown.splitlines()) <= 5)
    here.resize(80, 24)
    here.wait("a small model that writes haiku", "step, inspect and compare")
    here.type("o/nowhere")  # typed faster than the line opens
    here.wait("there is no /nowhere", "▸/nowhere")
    here.close()
    here.nothing_is_left()


@pytest.mark.slow
def test_ctrl_z_under_a_script_gives_the_terminal_back(terminals: Callable[..., Terminal]) -> None:
    """The script stops at once, and the shell takes the terminal back: by then the screens must have left it."""
    here = terminals()
    script = here.directory / "screens.sh"
    script.write_text("#!/bin/sh\nlockstep tui gallery/mask-additive\necho the script has ended\n")
    script.chmod(0o755)
    for line in ("./screens.sh", "fg"):
        here.start(line)
        here.wait("Operations", "layers.0")
        here.press("C-z")
        here.wait("Stopped")
        assert here.modes() == PLAIN
        assert here.shell_line("echo $((6 * 7))").splitlines()[-1] == "42"
    here.start("fg")
    here.wait("Operations", "layers.0")
    here.press("C-q")
    assert "the script has ended" in here.back_in_shell()
    here.nothing_is_left()


def test_a_crash_is_reported_and_restores_the_terminal(terminals: Callable[..., Terminal]) -> None:
    here = terminals()
    before = here.line_discipline()
    (here.directory / "crash.py").write_text(
        "import sys\n"
        "from lockstep.workbench.tui.launch import run_home\n"
        "from lockstep.workbench.tui.screens.home import HomeScreen\n"
        "HomeScreen.action_open = lambda self: 1 // 0\n"
        "sys.exit(run_home())\n"
    )
    here.start(f"{sys.executable} crash.py")
    here.wait("open …")
    here.type("o")
    shown = here.back_in_shell()
    assert "ZeroDivisionError" in shown, shown
    assert "a defect of lockstep" in shown, shown
    assert here.code() == 70
    assert here.line_discipline() == before
    here.nothing_is_left()


@pytest.mark.slow
def test_where_there_is_no_terminal_no_screens_are_drawn(terminals: Callable[..., Terminal]) -> None:
    here = terminals()
    for line in (
        "lockstep | cat >out",
        "true | lockstep >out",
        "lockstep tui demo 2>out",
        "TERM=dumb lockstep tui x",
    ):
        shown = here.shell_line(f"{line}; echo code ${{PIPESTATUS[@]}} $(tr -cd '\\033' <out | wc -c)")
        assert re.search(r"code (0 )?2( 0)? 0$", shown), shown
    assert "no screens" in shown, shown
