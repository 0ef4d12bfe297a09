"""What holds for every session file, whoever made it: a result or one of our errors, in bounded time, clean."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.engine.errors import EngineError
from lockstep.sessions import Session, SessionError
from lockstep.sessions.verify import verify
from lockstep.workbench.debugger.errors import DebuggerError, InternalError
from lockstep.workbench.debugger.failures import explain
from lockstep.workbench.debugger.host.replay import open_replay
from lockstep.workbench.export.session_files import NothingToExport, SessionFiles
from lockstep.workbench.views.request import Request

#: What acts on a terminal or on the order of the text around it; lines end as usual.
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
#: Catches what never ends; a busy machine is no failure.
MOST_SECONDS = 60.0

COMMANDS = (
    "where", "next", "where", "topk", "frame", "info ranks", "info kv", "info blocks", "info toggles", "info taps",
    "info weights", "info checkpoints", "attn 0 0", "attn 1 3", "print text", "print tokens", "print rule.mask",
    "diagnose", "golden", "origin", "expect golden == match", "catch golden", "catch nan", "catch repetition", "next",
   
    "break logits if position > 1 or token < 0 or kv_len < 9", "stepi", "step", "finish", "continue",
    "reverse-continue", "branches", "branch 1", "diff 0 1", "split", "split 0",
    "sequence 1", "export script", "export journal", "goto 1", "lens",
    "print layers.0.attn.q_proj", "print layers.0.attn.probs", "print layers.0.attn.q_proj[0, 0]",
    "print layers.0.attn.q_proj.absmax", "display where", "reverse-step", "reverse-next", "toggle load_bias true",
)  # fmt: skip
REQUESTS = (
    Request(),
    Request(branch=1, step=1, attention=((0, None), (1, 3)), biases=(0,)),
    Request(taps=("*q_proj*", "logits")),
)


def stands(path: Path) -> None:
    """Reading, checking, exporting and replaying the session."""
    for act in (_read, _check, _export, _replay):
        begun = time.monotonic()
        act(path)
        assert time.monotonic() - begun < MOST_SECONDS, act.__name__


def refused_or(act: Callable[[], object], what: str) -> None:
    """The act, or one of our errors with a clean message. A defect is raised."""
    try:
        act()
    except InternalError:
        raise
    except (SessionError, EngineError, DebuggerError, NothingToExport) as error:
        stated = explain(error)[1] if not isinstance(error, NothingToExport) else str(error)
        assert not OBEYED.search(stated), (what, stated)


def _read(path: Path) -> None:
    refused_or(lambda: Session.open(path).close(), "open")


def _check(path: Path) -> None:
    for problem in verify(path):
        assert isinstance(problem, str)


def _export(path: Path) -> None:
    def all_kinds() -> None:
        with Session.open(path) as session:
            for files in (SessionFiles(session, request) for request in REQUESTS):
                for kind in ("html", "svg", "csv", "json", "junit"):
                    refused_or(lambda: files.text(kind), f"export {kind}")  # noqa: B023

    refused_or(all_kinds, "export")


def _replay(path: Path) -> None:
    def all_commands() -> None:
        with open_replay(path) as debugger:
            for line in COMMANDS:

                def command() -> None:
                    result = debugger.execute(line)  # noqa: B023
                    json.dumps(result.to_json())
                    assert not OBEYED.search(result.to_text()) or line.startswith("export"), line  # noqa: B023

                refused_or(command, line)

    refused_or(all_commands, "replay")
