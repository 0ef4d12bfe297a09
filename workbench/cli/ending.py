"""SIGTERM and SIGHUP end a command as ctrl+c does: what it records is folded, and one line reports where that is.

The signal is raised in the main thread as `Ended`, so every `with` on the way out closes what it holds. Where that
takes too long (a disk that does not answer, a second program that must end first), the recordings are folded by a
thread and the process is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from lockstep.workbench.exit_codes import ended_by

#: The signals that end a program from outside, ctrl+c apart: `kill`, and a terminal that was closed.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: Seconds to leave in an orderly way; then, to fold the recordings from a thread.
_GRACE, _LAST_GRACE = 10.0, 5.0
#: Seconds in which what runs may stop by itself, at the end of an operation.
_PATIENCE = 3.0


class Ended(SystemExit):
    """A signal has ended the program. A SystemExit, which event loops let through."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


#: The signal that is ending this process; 0: none.
_received = 0


def on_signals() -> None:
    """From now on the signals raise `Ended` in the main thread. One that is ignored (nohup) stays so."""
    for number in SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, end)


def end(number: int, _: FrameType | None = None) -> NoReturn:
    """A signal handler: leave the program now."""
    _begin(number)
    raise Ended(number)


def end_soon(number: int) -> None:
    """Within a signal handler: leave the program in a moment, unless what runs stops by itself; see `stopped`."""
    _begin(number)
    signal.signal(signal.SIGALRM, lambda *_: end(number))
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE)


def stopped() -> None:
    """What was to stop has stopped."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _begin(number: int) -> None:
    """The program is to be over in a while, whatever keeps it; no further signal disturbs how it tidies up."""
    global _received
    for other in (*SIGNALS, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)
    if not _received:
        _in_a_while(_GRACE, _leave)
    _received = number


def _leave() -> None:
    _in_a_while(_LAST_GRACE, lambda: os._exit(128 + _received))
    os._exit(report_signal(_received))


def _in_a_while(seconds: float, act: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def received() -> int:
    """The signal that is ending this process; 0: none."""
    return _received


def report_signal(number: int) -> int:
    """Fold what this process still records; one line on stderr names what has ended it, and what is kept. Returns the
    exit code."""
    recorded = sys.modules.get("lockstep.workbench.inferior.session")  # not imported: nothing was recorded
    kept = [] if recorded is None else recorded.fold_recordings()
    with contextlib.suppress(OSError):  # a terminal that is gone
        print(f"lockstep: {ended_by(number, kept)}", file=sys.stderr, flush=True)
    return 128 + number


def at_once(what: str) -> None:
    """For a program that keeps nothing and may stand in foreign code for minutes: end where the signal finds it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # written to by whichever thread gets the signal
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)

    def wait() -> None:
        while (number := os.read(reading, 1)[0]) not in SIGNALS:
            continue  # ctrl+c, which is raised
        with contextlib.suppress(OSError):
            print(f"lockstep: {what}: {ended_by(number)}", file=sys.stderr, flush=True)
        os._exit(128 + number)

    threading.Thread(target=wait, name="signals", daemon=True).start()
