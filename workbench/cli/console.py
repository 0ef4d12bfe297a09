"""Commands in, answers out: one after the other, shown on stdout, until one fails."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from lockstep.sessions import clean
from lockstep.workbench.cli import ending
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.debugger.answers import Expectation, Failure, Group, Result, Stop
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.errors import CommandError, Interrupted, RunEnded
from lockstep.workbench.debugger.failures import explain, last_operations
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.export.json import dumps

Line = tuple[str, str]  # where it stands ("file:3"), the command


class Console:
    """Carries out commands and shows their answers: text, or with `as_json` a JSON object a line."""

    def __init__(self, debugger: Debugger, *, as_json: bool) -> None:
        self.debugger, self.as_json = debugger, as_json
        self.expectations_failed = False
        self.failure: Failure | None = None  # of a command that a breakpoint has run
        self.timed_out = self.interrupted = False
        self._limit: float | None = None  # seconds that the commands may take

    def run(self, lines: Sequence[Line]) -> Exit:
        """A script: stops at the first command that fails, and reports where that is."""
        for where, line in lines:
            self.debugger.settings.in_script = True
            try:
                self.show(line, self.debugger.execute(line))
            except RunEnded:
                break
            except BrokenPipeError:
                raise  # nobody reads any more: that is for the program to end on
            except Interrupted as error:
                return self.ended(where) if self.timed_out else self.failed(where, error)
            except Exception as error:
                return self.failed(where, error)
            finally:
                self.debugger.settings.in_script = False
            if self.failure is not None:
                report_line(f"error: {where}: {self.failure.message}")
                return Exit(self.failure.exit_code)
            if self.timed_out or self.interrupted:
                return self.ended(where)
        return self.ended()

    def failed(self, where: str, error: Exception) -> Exit:
        """Report what went wrong and where."""
        code, message = explain(error)
        if isinstance(error, CommandError) and error.caret is not None:
            message = clean(error.to_text(), newlines=True)
        if self.as_json:
            shown = Failure(type(error).__name__, f"{where}: {message}" if where else message, int(code))
            print(dumps(shown.to_json()), flush=True)
        stated = f"lockstep: error: {where}: {message}" if where else message
        print(clean("\n".join([stated, *last_operations(error)]), newlines=True), file=sys.stderr)
        return code

    def ended(self, where: str = "") -> Exit:
        """What the commands so far amount to; `where` the last of them stands."""
        if self.timed_out:
            self._report_out_of_time(where)
            return Exit.TIMEOUT
        if self.interrupted:
            return Exit.INTERRUPTED
        return Exit.DIVERGED if self.expectations_failed else Exit.OK

    def _report_out_of_time(self, where: str) -> None:
        at = self.debugger.position
        stands = f"step {at.step} of branch {at.branch}" if at.step >= 0 else "the prompt"
        message = (
            f"{where or 'after the last command'}: the commands have had their {self._limit:g} s (--limit-seconds); "
            f"stopped at {stands}: give them more, or fewer steps"
        )
        if self.as_json:
            print(dumps(Failure("OutOfTime", message, int(Exit.TIMEOUT)).to_json()), flush=True)
        report_line(f"error: {message}")

    def show(self, line: str, result: Result) -> None:
        """One answer on stdout."""
        self._judge(result)
        if self.as_json:
            print(dumps({"command": line, **result.to_json()}), flush=True)
        elif text := result.to_text():
            print(clean(text, newlines=True), flush=True)

    def _judge(self, result: Result) -> None:
        if isinstance(result, Expectation) and not result.holds:
            self.expectations_failed = True
        if isinstance(result, Failure):
            self.failure = result
        if isinstance(result, Group):
            for part in result.parts:
                self._judge(part)
        if isinstance(result, Stop):
            for part in result.output:
                self._judge(part)

    # --- interruptions -------------------------------------------------------------------------------

    @contextmanager
    def interruptible(self, limit: float | None, *, batch: bool) -> Iterator[None]:
        """Ctrl+c stops what is running, not the program (in a batch it then ends with 130); so does the
        limit of seconds, with 4. SIGTERM and SIGHUP end the program; what runs may come to an operation boundary
        first."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.interrupted = batch
            self.debugger.interrupt(ahead=batch)

        def on_end(number: int, frame: FrameType | None) -> None:
            if not self.debugger.interrupts.running:
                ending.end(number)
            ending.end_soon(number)
            self.interrupted = True
            self.debugger.interrupt(ahead=True)

        def on_limit() -> None:
            self.timed_out = True
            self.debugger.interrupt(ahead=True)

        before = {signal.SIGINT: signal.signal(signal.SIGINT, on_signal)}
        for number in ending.SIGNALS:
            if signal.getsignal(number) is ending.end:  # else it is ignored
                before[number] = signal.signal(number, on_end)
        self._limit = limit
        timer = threading.Timer(limit, on_limit) if limit is not None else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            ending.stopped()
            for number, handler in before.items():
                if not ending.received():
                    signal.signal(number, handler)
            if timer is not None:
                timer.cancel()
