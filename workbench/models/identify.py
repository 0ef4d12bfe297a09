"""What a path or a name is that somebody wants to open: a session, a model, neither, and why."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from lockstep.engine.checkpoint.files import gguf_file
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.config import EngineConfig, ModelConfig, check_fit
from lockstep.engine.errors import CheckpointError, EngineError, RequestError
from lockstep.sessions.errors import SessionError
from lockstep.sessions.session import Session
from lockstep.sessions.text import clean
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.demo.checkpoints import DEMOS, demo_path
from lockstep.workbench.paths import find_session, gallery_names
from lockstep.workbench.settings import session_limits


@dataclass(frozen=True, slots=True)
class Found:
    """What was found. `summary` is one line; `tps` are degrees of parallelism that a model may have."""

    kind: Literal["session", "model", "directory", "nothing"]
    path: Path
    summary: str
    tps: tuple[int, ...] = ()
    needs_prompt: bool = True


def identify(text: str) -> Found:
    """What `text` names. Reads headers only."""
    name = text.strip()
    try:
        path = demo_path(name) or find_session(name)
    except RequestError as error:
        return Found("nothing", Path(name), str(error))
    if not name:
        return Found("nothing", path, "a session file, or a model's directory")
    if not os.path.exists(path):  # unlike Path.exists, of a name that is too long as well
        hub = "; a hub id is opened with `lockstep tui OWNER/NAME`" if name.count("/") == 1 else ""
        return Found("nothing", path, f"there is no {clean(name, limit=80)}{hub}")
    if path.is_file() and path.suffix == ".session":
        return _session(path)
    try:
        gguf = gguf_file(path)
    except CheckpointError as error:  # several of them
        return Found("directory", path, clean(str(error), limit=200))
    if path.is_dir() and gguf is None and not (path / "config.json").exists():
        return Found("directory", path, "a directory")
    return _model(gguf or path)


def _session(path: Path) -> Found:
    try:
        with Session.open(path, session_limits()) as session:
            return Found("session", path, summary_of(session))
    except SessionError as error:
        return Found("nothing", path, clean(str(error), limit=200))


def summary_of(session: Session) -> str:
    """A session in one line."""
    branches = session.branches()
    steps = max((len(session.steps(branch.id)) for branch in branches), default=0)
    name = clean(session.meta.model.name or "session", limit=30)
    forks = "" if len(branches) == 1 else f", {len(branches)} branches"
    return f"{name}: {_several(steps, 'step')}, {_several(session.ranks, 'rank')}{forks}"


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _model(path: Path) -> Found:
    try:
        model, checkpoint = open_checkpoint(path)
        checkpoint.close()
    except (EngineError, OSError) as error:
        return Found("nothing", path, clean(str(error), limit=200))
    tps = tuple(tp for tp in (1, 2, 3, 4, 6, 7, 8, 12, 14, 16, 28, 32) if _fits(model, tp))
    reported = (
        f"{of_wrapper(model)}: {model.num_layers} layers, {model.num_heads} heads, {model.num_kv_heads} KV heads, "
        f"hidden {model.hidden_size}; tp {', '.join(map(str, tps[:6]))}"
    )
    return Found("model", path, reported, tps, needs_prompt=path != MODEL_DIR and path.stem not in DEMOS)


def of_wrapper(model: ModelConfig) -> str:
    """The family, and of which model it is the text model."""
    return f"{model.family}, text of {model.wrapper}" if model.wrapper else model.family


def _fits(model: ModelConfig, tp: int) -> bool:
    try:
        check_fit(model, EngineConfig(tp=tp))
    except EngineError:
        return False
    return True


def completions(text: str, limit: int = 40) -> list[str]:
    """Paths that begin with `text`: directories, sessions, model files; and names of the gallery."""
    if not text or text.startswith("-"):
        return []
    if of_gallery := [name for name in gallery_names() if name.startswith(text)]:
        return of_gallery
    typed = Path(text).expanduser()
    directory, start = (typed, "") if text.endswith("/") else (typed.parent, typed.name)
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    found = []
    for entry in entries:
        if not entry.name.startswith(start) or (entry.name.startswith(".") and not start.startswith(".")):
            continue
        head = text[: len(text) - len(start)]
        if entry.is_dir():
            found.append(f"{head}{entry.name}/")
        elif entry.suffix in (".session", ".safetensors", ".gguf"):
            found.append(f"{head}{entry.name}")
        if len(found) >= limit:
            break
    return found


def ago(seconds: float) -> str:
    """How long ago, in the largest unit that makes sense."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            many = int(seconds // size)
            return f"{many} {unit}{'s' if many > 1 else ''} ago"
    return "just now"


@dataclass(frozen=True, slots=True)
class Recent:
    """One line of the recent list."""

    path: Path
    summary: str
    when: str


#: How the note on what a recorded bug looks like begins.
_SEEN = "Seen: "


@cache
def gallery() -> tuple[Recent, ...]:
    """The recorded bugs that come with the package, each with what one saw of it; read once, as they do not change."""
    found = []
    for path in map(find_session, gallery_names()):
        with Session.open(path, session_limits()) as session:
            notes = [clean(event.text) for event in session.events(kind="note")]
        seen = next((note.removeprefix(_SEEN) for note in notes if note.startswith(_SEEN)), "")
        found.append(Recent(path, seen, ""))
    return tuple(found)


def recents(paths: list[Path]) -> list[Recent]:
    """What the recent paths are, as far as they can be read."""
    found = []
    for path in paths:
        what = identify(str(path))
        if what.kind in ("session", "model"):
            age = max(0.0, time.time() - path.stat().st_mtime)
            found.append(Recent(path, what.summary, ago(age) if what.kind == "session" else "model"))
    return found
