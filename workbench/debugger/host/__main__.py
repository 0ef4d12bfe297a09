"""The host: a process of its own that holds the debugger, so that a screen stays light and never stalls.

    python -m workbench.debugger.host --socket PATH MODEL [--ids 1,2,3]… [--prompt TEXT]… [--chat] [--tp N]
        [--device D] [--dtype D] [--rule NAME=VALUE]… [--capture WHAT]… [--seed N --temperature X --top-k N
        --top-p X] [--timeout S] [--listen HOST:PORT] [--session FILE]
    python -m workbench.debugger.host --socket PATH --replay FILE

It listens on a Unix socket (mode 0600; PATH's directory must be its owner's alone), serves the first client of
the same user, and ends with it, ranks included. Temporary files, the ranks' as well, go beside the socket and
are gone with the host. `host_client.HostClient` is the other side.

Messages are length-prefixed msgpack maps (`engine.ranks.wire`), arrays are {"dtype", "shape", "data"}.

    client → host                                             answer (same id)
    {"id", "do": "command", "line": "next 3"}                 {"id", "ok": true, "result": JSON, "text", "state"}
    {"id", "do": "call", "command": "next", "arguments": {}}  the same
    {"id", "do": "state"}                                     {"id", "ok": true, "state"}
    {"id", "do": "registry"}                                  {"id", "ok": true, "commands": […]}
    {"id", "do": "tensor", "tap", "rank"?, "seq"?}            {"id", "ok": true, "tensor", "note", "source", "step"}
    {"id", "do": "weight", "name"}                            {"id", "ok": true, "tensors": [one a rank]}
    {"id", "do": "interrupt"}                                 {"id", "ok": true}, at once, while a command runs
    {"id", "do": "close"}                                     {"id", "ok": true}; then the host ends

    a request that fails                                      {"id", "ok": false, "error": {"kind", "message",
                                                               "exit_code", "line"?, "caret"?}, "state"}

    host → client, unasked            body
    {"event": "ready", "body"}        {"session": path, "state", "model", "tp", "replay", "pid", "rank_pids"}; or
                                      {"error": {…}} when it could not start: the host then ends
    {"event": "step", "body"}         {"branch", "step", "seconds"?}: a pass is done (at most 30 a second are sent)
    {"event": "stopped", "body"}      a stop, as `values.Stop.to_json` has it
    {"event": "output", "body"}       {"text", "level": "warning"}
    {"event": "rankLost", "body"}     {"message"}: the session is kept; the command `restart` starts the ranks again

`state` is {"branch", "step", "tap", "last", "live", "lost", "frontier", "rules", "branches", "session"}: what a
status line shows. All else is read from the session file, which grows a commit a step. Commands run one after
another; only `interrupt` overtakes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import EngineError
from engine.ranks.wire import Connection, Disconnected, pack_array
from sessions import SessionError
from workbench.debugger.answers import jsonable
from workbench.debugger.commands.print import tensor_value
from workbench.debugger.core.debugger import Debugger
from workbench.debugger.core.registry import commands
from workbench.debugger.core.tensors import weight_of
from workbench.debugger.errors import CommandError, DebuggerError, RunEnded
from workbench.debugger.failures import exit_code
from workbench.debugger.host.endpoint import accept
from workbench.debugger.host.requests import Options, parse_options, start_debugger

#: Seconds for the debugger to end in an orderly way once its client is gone.
_GRACE = 5.0
#: Least seconds between two "step" events: a screen draws no faster.
_STEP_INTERVAL = 1 / 30

_EXPECTED = (DebuggerError, EngineError, SessionError, FileExistsError)


class Host:
    """Serves one client. `scratch` is the directory for temporary files."""

    def __init__(self, connection: Connection[dict[str, Any]], scratch: Path) -> None:
        self.connection, self.scratch = connection, scratch
        self.debugger: Debugger | None = None
        self._sending = threading.Lock()
        self._requests: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._last_step = 0.0

    def run(self, options: Options) -> int:
        """Start what is asked for and serve until the client is gone; returns an exit code."""
        threading.Thread(target=self._listen, name="requests", daemon=True).start()
        try:
            self.debugger = start_debugger(options, self._warn)
        except _EXPECTED as error:
            self._event("ready", {"error": _error(error)})
            return exit_code(error)
        with self.debugger as debugger:
            debugger.events = self._debugger_event
            self._event("ready", self._ready(debugger))
            while (request := self._requests.get()) is not None:
                if request.get("do") == "close":
                    self._answer(request, {})
                    break
                self._serve(debugger, request)
            threading.Timer(_GRACE, self._leave, (1,)).start()
        return self._leave(0)  # neither the timer nor the reading thread is waited for

    # --- requests ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Reads requests; interrupts are served here and now."""
        try:
            while True:
                request = self.connection.receive()
                if request.get("do") == "interrupt":
                    if self.debugger is not None:
                        self.debugger.interrupt()
                    self._answer(request, {})
                else:
                    self._requests.put(request)
        except (Disconnected, ValueError):
            if self.debugger is not None:
                self.debugger.interrupt()
            self._requests.put(None)
            if self.debugger is None:
                self._leave(1)  # still starting: nothing to save, and the ranks end with this process

    def _leave(self, code: int) -> NoReturn:
        shutil.rmtree(self.scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.scratch.parent.rmdir()  # the client's, who may be gone; not where it holds anything else
        os._exit(code)

    def _serve(self, debugger: Debugger, request: dict[str, Any]) -> None:
        try:
            self._answer(request, self._do(debugger, request))
        except RunEnded:
            self._answer(request, {"result": {"kind": "quit"}, "text": "", "state": state(debugger)})
            self._requests.put(None)
        except _EXPECTED as error:
            self._answer(request, {"error": _error(error), "state": state(debugger)}, ok=False)

    def _do(self, debugger: Debugger, request: Mapping[str, Any]) -> dict[str, Any]:
        do = request.get("do")
        if do == "command":
            result = debugger.execute(str(request.get("line", "")))
        elif do == "call":
            result = debugger.call(str(request.get("command")), **dict(request.get("arguments") or {}))
        elif do == "state":
            return {"state": state(debugger)}
        elif do == "registry":
            return {"commands": [one.to_json() for one in commands().values()]}
        elif do == "tensor":
            value = tensor_value(
                debugger, str(request.get("tap")), None, request.get("rank"), int(request.get("seq") or 0)
            )
            packed = pack_array(value.array, str(value.array.dtype))
            return {"tensor": packed, "note": value.note, "source": value.source, "step": value.step}
        elif do == "weight":
            shares = weight_of(debugger, str(request.get("name")))
            return {"tensors": [pack_array(shares[rank], str(shares[rank].dtype)) for rank in sorted(shares)]}
        else:
            raise CommandError(f"the host does not know how to do {str(do)[:40]!r}")
        return {"result": result.to_json(), "text": result.to_text(), "state": state(debugger)}

    # --- to the client -------------------------------------------------------------------------------

    def _answer(self, request: Mapping[str, Any], body: Mapping[str, Any], *, ok: bool = True) -> None:
        self._send({"id": request.get("id"), "ok": ok, **body})

    def _event(self, name: str, body: Mapping[str, Any]) -> None:
        self._send({"event": name, "body": dict(body)})

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending, contextlib.suppress(Disconnected):  # a client that is gone hears nothing
            self.connection.send(message)

    def _warn(self, text: str) -> None:
        self._event("output", {"text": text, "level": "warning"})

    def _debugger_event(self, name: str, body: Mapping[str, Any]) -> None:
        if name == "step":
            now = time.monotonic()
            if now - self._last_step < _STEP_INTERVAL:
                return
            self._last_step = now
        self._event(name, body)

    def _ready(self, debugger: Debugger) -> dict[str, Any]:
        replay = debugger.executor is None
        meta = debugger.session.meta
        return {
            "session": str(debugger.session.path), "state": state(debugger), "tp": debugger.timeline.ranks,
            "model": str(meta.get("model_name") or meta.get("model_path") or ""), "replay": replay,
            "pid": os.getpid(), "rank_pids": [] if replay else list(debugger.engine.inferior.client.pids),
        }  # fmt: skip


def state(debugger: Debugger) -> dict[str, Any]:
    """What a status line shows."""
    at, timeline = debugger.position, debugger.timeline
    found: dict[str, Any] = jsonable({
        "branch": at.branch, "step": at.step,
        "tap": None if at.place is None else timeline.places.names[at.place],
        "last": timeline.last(at.branch), "live": debugger.live, "lost": debugger.lost or None,
        "frontier": debugger.at_frontier, "rules": timeline.line(at.branch).rules,
        "branches": [
            {"id": line.id, "name": line.name, "parent": line.parent, "fork_step": line.fork_step,
             "forked_at": line.forked_at, "rules": line.rules, "steps": line.steps}
            for line in timeline.lines.values()
        ],
        "session": str(debugger.session.path),
    })  # fmt: skip
    return found


def _error(error: BaseException) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": type(error).__name__,
        "message": str(error),
        "exit_code": int(exit_code(error)),
    }
    if isinstance(error, CommandError) and error.caret is not None:
        found |= {"line": error.line, "caret": error.caret}
    return found


def main() -> int:
    """The program."""
    options = parse_options(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl+c is the client's to send as an interrupt
    try:
        connection = accept(options.socket)
    except (DebuggerError, OSError) as error:
        print(f"lockstep host: {error}", file=sys.stderr)
        return 2
    # The ranks and what they import see only the environment.
    scratch = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(dir=options.socket.parent)
    try:
        return Host(connection, Path(scratch)).run(options)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
