"""A command in a process group of its own: its end, signals, and what it leaves behind."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from workbench.attach import group
from workbench.attach.group import run_in_group

#: Runs a command as `lockstep attach` does, and says how it ended.
RUN = """
import os, sys
from workbench.attach.group import run_in_group
print("ended", run_in_group(sys.argv[1:], os.environ).code)
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


def test_ctrl_c_reaches_the_command_through_its_terminal() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", RUN, sys.executable, "-c", "input()" + WAIT]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # which makes it the controlling terminal
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, b"a line that the command reads\n")
    shown = b""
    while b"ready" not in shown:
        shown += os.read(ours, 1000)
    os.write(ours, b"\x03")
    while b"ended" not in shown or not shown.endswith(b"\n"):
        shown += os.read(ours, 1000)
    assert b"ended 7" in shown
    assert process.wait() == 0
    os.close(ours)


def test_what_outlives_the_command_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_PATIENCE", 0.2)
    monkeypatch.setattr(group, "_GRACE", 0.5)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    script = (
        f'"{sys.executable}" -c "{stubborn}" >/dev/null 2>&1 & echo $! > {tmp_path}/pid; sleep 60 & sleep 0.3'
    )
    began = time.monotonic()
    assert run_in_group(["sh", "-c", script], os.environ).code == 0
    assert time.monotonic() - began < 30
    left = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
