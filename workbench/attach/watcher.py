"""The process between `lockstep attach` and the command: it outlives neither, and leaves none of the command's own.

Run by its path (`python -I -S watcher.py`), so that it begins at once and imports the standard library alone. It starts
the command in a process group of its own and hands on the terminal, signals, stops (ctrl+z) and the exit code. Where
the system has subreapers (Linux), processes whose parent has ended become its own, those that called setsid too: when
the command has ended all that is left of it is waited for, then terminated, then killed. The same happens at once when
the one who started it is gone, which a pipe shows that he alone holds open.

    arguments: the pipe's reading end, a pipe to report to, the starter's process group and pid, seconds of patience
    and of grace, the temporary folder that is the starter's ("": none), our search path, the command
    reports: "started PID", "failed ERRNO", "ended CODE" (-N: signal N ended it)
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

#: Signals that are passed on to the command. What it has written is then still there to be read.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SET_CHILD_SUBREAPER = 36  # of prctl(2)
#: Seconds between two rounds of SIGKILL, for what is started meanwhile.
_AGAIN = 0.1


class Watcher:
    """One command, from its start until nothing of it is left."""

    def __init__(
        self, starter: int, starters_group: int, patience: float, grace: float, command: list[str]
    ) -> None:
        self.starter, self.starters_group, self.patience, self.grace = (
            starter,
            starters_group,
            patience,
            grace,
        )
        self.adopts = _adopt_orphans()
        self.woken, waking = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGCHLD, signal.SIGCONT):
            if signal.getsignal(number) != signal.SIG_IGN:  # which the command is to inherit
                signal.signal(number, lambda *_: None)
        self.child = os.posix_spawnp(
            command[0], command, os.environ, setpgroup=0, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]
        )
        for number in FORWARDED:
            signal.signal(number, lambda *_: None)
        self.code: int | None = None
        self.stopped = False
        if foreground() == self.starters_group:
            give_terminal(self.child)

    def until_ended(self, lifeline: int) -> bool:
        """Until the command has ended; False: its starter has."""
        while True:
            self._reap()
            if self.code is not None:
                return True
            ready, _, _ = select.select([lifeline, self.woken], [], [])
            if lifeline in ready:
                return False
            self._forward()

    def end_rest(self, patience: float) -> None:
        """Until nothing is left: wait, terminate, kill."""
        for number, seconds in ((0, patience), (signal.SIGTERM, self.grace), (signal.SIGKILL, self.grace)):
            self.send_all(number)
            until = time.monotonic() + seconds
            while self._anything_left() and (left := until - time.monotonic()) > 0:
                select.select([self.woken], [], [], min(left, _AGAIN))
                self._forward()
                if number == signal.SIGKILL:
                    self.send_all(number)

    def _forward(self) -> None:
        """Pass on the signals that have come."""
        with suppress(BlockingIOError):
            for number in os.read(self.woken, 512):
                if number in FORWARDED:
                    self._send(number) if self.code is None else self.send_all(number)
                elif number == signal.SIGCONT and self.stopped:
                    self._go_on()

    def _reap(self) -> bool:
        """See who has ended or stopped; whether there is a child left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid != self.child:
                continue
            if os.WIFSTOPPED(status):
                self._stop(os.WSTOPSIG(status))
            else:
                self.code = os.waitstatus_to_exitcode(status)

    def _stop(self, number: int) -> None:
        """The command has stopped: so does its starter, and `fg` or `bg` sets both going."""
        owner = foreground()
        self.stopped = True
        if number in (signal.SIGTTIN, signal.SIGTTOU) and owner in (self.child, self.starters_group):
            self._go_on()  # it wanted the terminal before it had it
            return
        if owner == self.child:
            give_terminal(self.starters_group)
        if os.getppid() == self.starter:
            os.kill(self.starter, signal.SIGSTOP)

    def _go_on(self) -> None:
        self.stopped = False
        if foreground() == self.starters_group:
            give_terminal(self.child)
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child, number)

    def send_all(self, number: int) -> None:
        """To all that is left. One that is stopped would not hear of it."""
        if not number:
            return
        if self.adopts:
            for pid in descendants(os.getpid()):
                for each in (number, signal.SIGCONT):
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, each)
        else:
            self._send(number)
            self._send(signal.SIGCONT)

    def _anything_left(self) -> bool:
        if self._reap():
            return True
        if not self.adopts:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child, 0)
                return True
        return False


def descendants(top: int) -> Iterator[int]:
    """The processes below `top` (Linux), parents first."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # it ended meanwhile
                below.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    waiting = below.pop(top, [])
    while waiting:
        yield (pid := waiting.pop(0))
        waiting += below.pop(pid, [])


def give_terminal(group: int) -> None:
    """Make a group the terminal's foreground one; nothing where standard input is no terminal."""
    stopped = signal.signal(
        signal.SIGTTOU, signal.SIG_IGN
    )  # which a group in the background gets for this call
    try:
        with suppress(OSError):
            os.tcsetpgrp(0, group)
    finally:
        signal.signal(signal.SIGTTOU, stopped)


def foreground() -> int:
    """The terminal's foreground group; 0 where standard input is no terminal of ours."""
    with suppress(OSError):
        return os.tcgetpgrp(0)
    return 0


def _adopt_orphans() -> bool:
    """Become the parent of all descendants whose own has ended; False where the system knows no such thing."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        import ctypes

        return not ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return False


@contextmanager
def _held(folder: str, modules: str) -> Iterator[None]:
    """Own the starter's temporary folder, as it is gone: the command writes there until its end."""
    if not folder:
        yield
        return
    sys.path[:0] = modules.split(os.pathsep)
    from pathlib import Path

    from lockstep.engine.scratch import ScratchFolder

    with ExitStack() as stack:
        with suppress(OSError):  # swept meanwhile
            stack.enter_context(ScratchFolder.join(Path(folder)))
        yield


def main() -> None:
    lifeline, report, group, starter = map(int, sys.argv[1:5])
    patience, grace, folder, modules, *command = float(sys.argv[5]), float(sys.argv[6]), *sys.argv[7:]
    for descriptor in (lifeline, report):
        os.set_inheritable(descriptor, False)

    def send(what: str, value: int) -> None:
        with suppress(OSError):
            os.write(report, f"{what} {value}\n".encode())

    try:
        watcher = Watcher(starter, group, patience, grace, command)
    except OSError as error:
        send("failed", error.errno or 0)
        return
    send("started", watcher.child)
    if watcher.until_ended(lifeline):
        watcher.end_rest(watcher.patience)
        send("ended", watcher.code or 0)
        return
    watcher.send_all(signal.SIGTERM)
    with _held(folder, modules):
        watcher.end_rest(0.0)


if __name__ == "__main__":
    main()
