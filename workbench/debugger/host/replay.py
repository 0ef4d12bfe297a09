"""Replay: the same debugger on a saved session, without engine, model, torch or GPU; and its verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.errors import ConfigError
from lockstep.engine.run.sampling import Sampling
from lockstep.sessions import Session, SessionError
from lockstep.workbench.debugger.answers import Result
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.executor import Executor
from lockstep.workbench.debugger.core.timeline import open_timeline
from lockstep.workbench.debugger.errors import ReplayMismatch
from lockstep.workbench.inferior.identity import checkpoint_digest
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.settings import session_limits
from lockstep.workbench.views.token_texts import TokenTexts


def open_replay(path: Path) -> Debugger:
    """A debugger before the first step of a saved session. SessionError states what is wrong with the file."""
    session = Session.open(path, session_limits())
    try:
        return Debugger(open_timeline(session), texts=TokenTexts.of(session.meta))
    except BaseException:
        session.close()
        raise


@dataclass(frozen=True)
class Verification(Result):
    """Every pass of every branch run again and held against the recording."""

    passes: int
    unverifiable: int  # passes without checksums
    divergences: tuple[str, ...]  # the first of each branch, in words
    other_checkpoint: bool  # the session was recorded from another one
    kind: ClassVar[str] = "verification"

    def _text(self) -> str:
        if self.divergences:
            other = "the session was recorded from another checkpoint"
            return "\n".join([*self.divergences, *[other] * self.other_checkpoint])
        rest = f"; {self.unverifiable} have no checksums" if self.unverifiable else ""
        return f"{self.passes} passes run again, every checksum equal{rest}"


def verify(
    session: Session,
    path: Path,
    model: ModelConfig,
    progress: Callable[[int], None] = lambda done: None,
    on_warning: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Run a whole session again on `model` (the checkpoint at `path`) and compare every checksum."""
    timeline = open_timeline(session)
    passes = unverifiable = 0
    divergences = []
    rules = timeline.lines[0].rules
    with Inferior(path, model, engine_config(session), rules, on_warning=on_warning) as inferior:
        for ids, sampling in recorded_sequences(session):
            inferior.add(ids, sampling)
        executor = Executor(inferior, timeline)
        for line in timeline.lines.values():
            try:
                for step in range(line.fork_step, line.steps):
                    executor.reach(line.id, step)
                    executor.rerun(line.id, step)
                    unverifiable += timeline.record(line.id, step).checksums is None
                    passes += 1
                    progress(passes)
            except ReplayMismatch as error:
                divergences.append(f"branch {line.id} ({line.name}): {error}")
                executor.forget_cache()
    other = session.meta.model.checkpoint not in ("", checkpoint_digest(path))
    return Verification(passes, unverifiable, tuple(divergences), other)


def engine_config(session: Session) -> EngineConfig:
    """How a session's engine was run. ConfigError for a session that does not state it, or states nonsense."""
    reported = session.meta.config
    if reported.tp is None:
        raise ConfigError(
            f"{session.path.name} does not record how its engine was run: it cannot be run again"
        )
    known = msgspec.to_builtins(reported)  # without what is not known: the engine's own default
    fields = {name: known[name] for name in EngineConfig.__dataclass_fields__ if name in known}
    return EngineConfig(**fields)


def recorded_sequences(session: Session) -> list[tuple[list[int], Sampling]]:
    """Prompt ids and first sampling of each sequence."""
    reported = [one for seq, one in sorted(session.meta.sequences.items())]
    if not reported or not all(one.prompt_ids for one in reported):
        raise SessionError(f"{session.path.name} does not record what was run: its sequences are unreadable.")
    return [
        (
            list(one.prompt_ids),
            Sampling(**msgspec.structs.asdict(one.sampling)) if one.sampling else Sampling(),
        )
        for one in reported
    ]
