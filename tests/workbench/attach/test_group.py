"""A command in a process group of its own: its end, signals, and what it leaves behind."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from lockstep.workbench.attach.group import run_in_group
from tests.running import still_running

pytestmark = pytest.mark.sampled_file(2)

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere there are no subreapers")

#: Runs a command as `lockstep attach` does, and prints how it ended.
RUN = """
import os, sys
from lockstep.workbench.attach.group import run_in_group
print("ended", run_in_group(sys.argv[1:], os.environ).code)
"""
#: The same, with a temporary folder of its own.
HOLDS_A_FOLDER = """
import os, sys
from pathlib import Path
from lockstep.engine.scratch import ScratchFolder
from lockstep.workbench.attach.group import run_in_group
with ScratchFolder.make("attach", Path(sys.argv[1])) as scratch:
    run_in_group(sys.argv[2:], os.environ, scratch.path, grace=1.0)
"""
WAIT = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))  # which a shell may have it ignore
print("ready", flush=True)
time.sleep(60)
"""


def test_the_exit_code_is_the_commands() -> None:
    assert run_in_group(["sh", "-c", "exit 3"], os.environ).code == 3
    assert run_in_group(["sh", "-c", "kill -TERM $$"], os.environ).code == -signal.SIGTERM
    with pytest.raises(FileNotFoundError):
        run_in_group(["/no/such/command"], os.environ)


def test_streams_and_environment_are_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_in_group(["sh", "-c", "echo $ONE; echo two >&2"], {**os.environ, "ONE": "1"}).code == 0
    assert capfd.readouterr() == ("1\n", "two\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 7), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_are_passed_on(number: int, code: int) -> None:
    command = [sys.executable, "-c", RUN, sys.executable, "-c", WAIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == f"ended {code}\n"


@contextmanager
def in_a_terminal() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command that reads a line and waits, with a terminal of its own; and the terminal's other end."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", RUN, sys.executable, "-c", "input()" + WAIT]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # which makes it the controlling terminal
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, b"a line that the command reads\n")
    shown_until(b"ready", ours)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def shown_until(what: bytes, terminal: int) -> bytes:
    shown = b""
    while what not in shown or not shown.endswith(b"\n"):
        shown += os.read(terminal, 1000)
    return shown


def test_ctrl_c_reaches_the_command_through_its_terminal() -> None:
    with in_a_terminal() as (process, terminal):
        os.write(terminal, b"\x03")
        assert b"ended 7" in shown_until(b"ended", terminal)
        assert process.wait() == 0


def test_ctrl_z_stops_us_as_well_and_fg_sets_both_going() -> None:
    with in_a_terminal() as (process, terminal):
        for _ in range(2):
            os.write(terminal, b"\x1a")
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            assert os.tcgetpgrp(terminal) == process.pid  # as whose job it stopped
            process.send_signal(signal.SIGCONT)
            while os.tcgetpgrp(terminal) == process.pid:
                time.sleep(0.01)
        os.write(terminal, b"\x03")
        assert b"ended 7" in shown_until(b"ended", terminal)


#: Processes that leave the group and the session, with and without a parent: their pids, a line each.
LEAVES = """
import os, subprocess, sys, time
sleep = "import time; time.sleep(300)"
subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
twice = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
subprocess.run([sys.executable, "-c", twice, sleep], start_new_session=True, check=True)
stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + sleep
subprocess.Popen([sys.executable, "-c", stubborn], process_group=0)
print("ready", flush=True)
time.sleep(float(sys.argv[1]))
"""


def left_of(mark: str) -> list[psutil.Process]:
    """The processes that were started with this in their environment and still run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MARK") == mark:
                found.append(process)
    return found


@linux
def test_children_that_leave_the_session_are_ended_with_the_command(tmp_path: Path) -> None:
    environment = {**os.environ, "MARK": str(tmp_path)}
    command = [sys.executable, "-c", LEAVES, "0.1"]
    assert run_in_group(command, environment, patience=0.2, grace=1.0).code == 0
    assert left_of(str(tmp_path)) == []


@linux
@pytest.mark.parametrize("at", ["in its folder", "in one that was swept"])
def test_a_kill_of_the_starter_ends_all_and_removes_its_folder(at: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS_A_FOLDER, str(tmp_path), sys.executable, "-c", LEAVES, "300"]
    environment = {**os.environ, "MARK": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert len(left_of(str(tmp_path))) >= 6
        (folder,) = tmp_path.iterdir()
        if at != "in its folder":
            shutil.rmtree(folder)
        process.kill()
    deadline = time.monotonic() + 60
    while (left := left_of(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    assert list(tmp_path.iterdir()) == []


def test_what_outlives_the_command_is_ended(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    script = (
        f'"{sys.executable}" -c "{stubborn}" >/dev/null 2>&1 & echo $! > {tmp_path}/pid; sleep 60 & sleep 0.3'
    )
    began = time.monotonic()
    assert run_in_group(["sh", "-c", script], os.environ, patience=0.2, grace=0.5).code == 0
    assert time.monotonic() - began < 30
    left = int((tmp_path / "pid").read_text())
    assert all(one.status() == psutil.STATUS_ZOMBIE for one in still_running([left]))


@pytest.mark.parametrize(("deaf", "code"), [(False, 7), (True, -signal.SIGTERM)])
def test_a_command_that_is_done_is_asked_to_end(
    tmp_path: Path, deaf: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ctrl+c; and terminated where it does not hear that."""
    monkeypatch.setattr("lockstep.workbench.attach.group.GRACE", 0.5)
    there = tmp_path / "there"
    program = WAIT.replace("print(", f"open({str(there)!r}, 'w').close(); print(")
    if deaf:
        program = program.replace("lambda *_: sys.exit(7)", "signal.SIG_IGN")
    ended = run_in_group([sys.executable, "-c", program], os.environ, done=there.exists)
    assert ended.code == code
    assert ended.passed_on == (), "nobody else has sent a signal"
