"""A real terminal to drive the screens in: a tmux server of its own, with a shell in it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that anything may take on a busy machine; what is waited for ends the waiting.
PATIENCE = 120.0
#: Names every process that a terminal started, whoever its parent is by now.
_MARK = "LOCKSTEP_E2E_TERMINAL"
_PROMPT = "ready$"
_CONFIG = "set -g status off\nset -s escape-time 0\nset -g default-terminal xterm-256color\n"

needs_tmux = pytest.mark.skipif(
    shutil.which("tmux") is None, reason="tmux is not installed: no real terminal to drive"
)


class Terminal:
    """A shell in a terminal of some size. `directory` holds all that its programs leave behind."""

    def __init__(self, directory: Path, columns: int = 120, rows: int = 40) -> None:
        self.directory, self.mark = directory, uuid.uuid4().hex
        self.scratch = Path(
            tempfile.mkdtemp(prefix="lockstep-e2e-", dir="/tmp")
        )  # short: sockets lie below it
        for name in ("bin", "data", "cache", "config", "state"):
            (directory / name).mkdir(exist_ok=True)
        program = directory / "bin" / "lockstep"
        program.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m lockstep.workbench.cli "$@"\n'
        )
        program.chmod(0o755)
        (directory / "tmux.conf").write_text(_CONFIG)
        # A size in the environment would be believed, and never change.
        (directory / "bashrc").write_text(
            f"unset COLUMNS LINES; PS1='{_PROMPT} ' PATH='{directory}/bin':$PATH\n"
        )
        # A socket's path must be short, a test's directory is not.
        self._socket = Path("/tmp") / f"lockstep-{self.mark[:12]}.tmux"
        settings = [word for name, value in self._environment().items() for word in ("-e", f"{name}={value}")]
        self._tmux(
            "-f", str(directory / "tmux.conf"), "new-session", "-d", "-x", str(columns), "-y", str(rows),
            "-c", str(directory), *settings, "bash --noprofile --rcfile bashrc",
        )  # fmt: skip
        self._lines = 0
        self.shell = int(self._tmux("display", "-p", "#{pane_pid}"))
        self.wait(_PROMPT)

    def _environment(self) -> dict[str, str]:
        directory = self.directory
        return {
            _MARK: self.mark, "TMPDIR": str(self.scratch), "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "LOCKSTEP_DATA_DIR": str(directory / "data"), "LOCKSTEP_CACHE_DIR": str(directory / "cache"),
            "XDG_CONFIG_HOME": str(directory / "config"), "LOCKSTEP_STATE_DIR": str(directory / "state"),
            "LOCKSTEP_DEBUG": "1",  # what nobody expected ends the program, and so the test
            "HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8",
        }  # fmt: skip

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-S", str(self._socket), *words], capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"tmux {words[0]}: {done.stderr.strip()}")
        return done.stdout.rstrip("\n")

    # --- hands ---------------------------------------------------------------------------------------

    def type(self, text: str) -> None:
        """Type characters as they are."""
        self._tmux("send-keys", "-l", "--", text)

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names: Enter, Escape, C-c, Down."""
        self._tmux("send-keys", *keys)

    def enter(self, line: str) -> None:
        """Type a line and enter it."""
        self.type(line)
        self.press("Enter")

    def start(self, line: str) -> None:
        """Have the shell start a program; `code` shows how it ended."""
        self.enter(f"{line}; code=$?")

    def code(self) -> int:
        """The exit code of what was started last."""
        return int(self.shell_line("echo $code"))

    def shell_line(self, line: str) -> str:
        """Have the shell carry out a line; what it printed."""
        self._lines += 1
        end = f"end of line {self._lines}"
        self.enter(f"clear; {line}; echo 'end of line' {self._lines}")
        shown = self.wait(f"{end}\n{_PROMPT}")
        return shown[: shown.rindex(end)].strip()

    def resize(self, columns: int, rows: int) -> None:
        """Another size, as when a window is dragged."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def close(self) -> None:
        """Close the terminal, whatever runs in it: its programs get SIGHUP."""
        with contextlib.suppress(AssertionError):  # already closed
            self._tmux("kill-server")
        self._socket.unlink(missing_ok=True)

    # --- eyes ----------------------------------------------------------------------------------------

    def text(self) -> str:
        """What is on the screen, trailing blanks cut."""
        return "\n".join(line.rstrip() for line in self._tmux("capture-pane", "-p").splitlines()) + "\n"

    def wait(self, *wanted: str | re.Pattern[str], seconds: float = PATIENCE) -> str:
        """Wait until all of it is on the screen; the screen then."""

        def missing(shown: str) -> list[str | re.Pattern[str]]:
            return [w for w in wanted if (w not in shown if isinstance(w, str) else not w.search(shown))]

        return self.until(
            lambda shown: not missing(shown), lambda shown: f"missing: {missing(shown)}", seconds
        )

    def until(
        self,
        met: Callable[[str], object],
        why: Callable[[str], str] = lambda shown: "",
        seconds: float = PATIENCE,
    ) -> str:
        """Wait until the screen meets a condition; the screen then."""
        deadline = time.monotonic() + seconds
        while not met(shown := self.text()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{why(shown)} after {seconds:g} s on this screen:\n{shown}")
            time.sleep(0.1)
        return shown

    def back_in_shell(self) -> str:
        """Wait for the shell's prompt on the normal screen."""
        return self.until(
            lambda shown: self.modes() == PLAIN and shown.rstrip().endswith(_PROMPT),
            lambda shown: f"the shell is not back (modes {self.modes()})",
        )

    def modes(self) -> str:
        """What programs switched on: alternate screen, mouse reports, a hidden cursor, keypad mode."""
        flags = ("alternate_on", "mouse_any_flag", "mouse_all_flag", "cursor_flag", "keypad_flag")
        return self._tmux("display", "-p", " ".join(f"#{{{flag}}}" for flag in flags))

    def line_discipline(self) -> str:
        """The terminal's settings, as `stty` knows them."""
        self.shell_line("stty -g > stty")
        return (self.directory / "stty").read_text()

    # --- what is left --------------------------------------------------------------------------------

    def processes(self) -> dict[int, list[str]]:
        """The command line of every living process that was started in this terminal, the shell not counted."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it ended while it was looked at
                if process.environ().get(_MARK) == self.mark and process.pid != self.shell:
                    found[process.pid] = process.cmdline()
        return found

    def of(self, module: str) -> list[int]:
        """Those of them that run a Python module, in the order of their ids."""
        return sorted(pid for pid, words in self.processes().items() if module in words)

    def signal(self, module: str, number: signal.Signals, which: int = 0) -> None:
        """Send a signal to a process by the module that it runs."""
        os.kill(self.of(module)[which], number)

    def nothing_is_left(self, seconds: float = PATIENCE) -> None:
        """No process, no temporary file, no half-written session file."""
        deadline = time.monotonic() + seconds
        while left := [*(" ".join(words[:6]) for words in self.processes().values()), *self._litter()]:
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: {left}")
            time.sleep(0.05)

    def _litter(self) -> list[str]:
        journals = [file for end in ("wal", "shm") for file in self.directory.rglob(f"*.session-{end}")]
        return [str(file) for file in (*self.scratch.iterdir(), *journals)]


#: The modes of a terminal that nobody changed: the cursor is shown and nothing else is on.
PLAIN = "0 0 0 1 0"


@contextlib.contextmanager
def terminal(directory: Path, columns: int = 120, rows: int = 40) -> Iterator[Terminal]:
    """A terminal that is closed at the end, with all that still runs in it."""
    opened = Terminal(directory, columns, rows)
    try:
        yield opened
    finally:
        opened.close()
        for pid in opened.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(opened.scratch, ignore_errors=True)
