"""Starting a live debugger: engine, sequences, session, timeline, in this order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.run.sampling import Sampling
from lockstep.sessions import Session, SessionMeta
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.executor import Executor
from lockstep.workbench.debugger.core.timeline import Timeline
from lockstep.workbench.debugger.stops.locations import Places
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.inferior.session import create_session
from lockstep.workbench.models.capture import STATS, Capture
from lockstep.workbench.models.tokenizer import Tokenizer
from lockstep.workbench.references.request import ReferenceName
from lockstep.workbench.settings import session_limits
from lockstep.workbench.views.token_texts import TokenTexts


@dataclass(frozen=True)
class DebugTarget:
    """What is to be debugged. `prompts` are token ids; `session` is where it is recorded."""

    path: Path
    model: ModelConfig
    config: EngineConfig
    prompts: Sequence[Sequence[int]]
    session: Path
    sampling: Sampling = field(default_factory=Sampling)
    rules: Mapping[str, str] | None = None
    capture: Capture = STATS
    tokenizer: Tokenizer | None = None
    meta: SessionMeta | None = None  # what else the session is to state of itself
    overwrite: bool = False
    reference: ReferenceName = "transformers"  # whom `golden` asks


def start(target: DebugTarget, on_warning: Callable[[str], None] = lambda text: None) -> Debugger:
    """A debugger before the first step. EngineError and SessionError state what is wrong; nothing is left then."""
    inferior = Inferior(target.path, target.model, target.config, target.rules, target.capture, on_warning)
    try:
        for ids in target.prompts:
            inferior.add(list(ids), target.sampling)
        create_session(inferior, target.session, target.meta, overwrite=target.overwrite)
        session = Session.open(target.session, session_limits(), follow=False)
    except BaseException:
        inferior.close()
        raise
    timeline = Timeline(
        session, Places([spec.name for spec in inferior.specs]), target.config.tp, inferior.rules
    )
    inferior.recorder.advice = " `record FILE` records it all to another file."
    executor = Executor(inferior, timeline)
    debugger = Debugger(timeline, executor, texts=TokenTexts({}, lambda: target.tokenizer))
    debugger.settings.reference = target.reference
    return debugger
