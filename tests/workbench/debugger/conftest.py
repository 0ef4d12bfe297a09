"""Debuggers shared by the tests of this package: starting ranks costs seconds (they import torch)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.config import EngineConfig
from lockstep.engine.run.sampling import Sampling
from lockstep.sessions import Session
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.executor import Executor
from lockstep.workbench.debugger.core.timeline import Timeline
from lockstep.workbench.debugger.host.launch import DebugTarget, start
from lockstep.workbench.debugger.stops.locations import Places
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.inferior.session import create_session
from lockstep.workbench.models.capture import STATS
from tests.checkpoints import tiny_checkpoint

PROMPT = [3, 14, 15, 92, 65]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 (it has biases, and two query heads a KV head)."""
    return tiny_checkpoint(tmp_path_factory.mktemp("debugged"), "qwen2")


class Engines:
    """One inferior for each number of ranks, started when first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model, source = open_checkpoint(path)
        source.close()
        self._running: dict[int, Inferior] = {}

    def get(self, tp: int) -> Inferior:
        """An inferior as new, without sequences."""
        if tp in self._running and not self._running[tp].client.alive:
            del self._running[tp]
        if tp not in self._running:
            config = EngineConfig(tp=tp, max_tokens=64, max_sequences=2)
            self._running[tp] = Inferior(self.path, self.model, config)
        inferior = self._running[tp]
        if inferior.paused is not None:
            inferior.abandon()
        for seq in list(inferior.sequences):
            inferior.remove(seq)
        inferior.first_sampling.clear()
        inferior.set_patches([])
        inferior.recorder.writer = None
        inferior.set_rules({})
        inferior.watch(STATS)
        return inferior

    def close(self) -> None:
        """End all ranks."""
        for inferior in self._running.values():
            inferior.close()


@pytest.fixture(scope="session")
def engines(checkpoint: Path) -> Iterator[Engines]:
    """See `Engines`."""
    made = Engines(checkpoint)
    yield made
    made.close()


Live = Callable[..., Debugger]


@pytest.fixture
def live(engines: Engines, tmp_path: Path) -> Iterator[Live]:
    """(tp=1, rules, sampling, prompts) -> a debugger before its first step, on an engine that is reused."""
    made: list[Debugger] = []

    def build(
        tp: int = 1, rules: dict[str, str] | None = None, sampling: Sampling | None = None,
        prompts: list[list[int]] | None = None,
    ) -> Debugger:  # fmt: skip
        inferior = engines.get(tp)
        inferior.set_rules(rules or {})
        for ids in prompts or [PROMPT]:
            inferior.add(ids, sampling)
        path = tmp_path / f"live-{len(made)}.session"
        create_session(inferior, path)
        places = Places([spec.name for spec in inferior.specs])
        timeline = Timeline(Session.open(path, follow=False), places, tp, inferior.rules)
        made.append(Debugger(timeline, Executor(inferior, timeline)))
        return made[-1]

    yield build
    for debugger in made:
        finish(debugger)


def finish(debugger: Debugger) -> Path:
    """End a debugger and leave its engine running; returns the session's path."""
    path = debugger.session.path
    executor, debugger.executor = debugger.executor, None
    if executor is not None:
        if executor.inferior.client.alive:
            executor.land()
        debugger.session.close()
        executor.inferior.recorder.close()
    return path


def texts(debugger: Debugger, *lines: str) -> list[str]:
    """What some commands answer."""
    return [debugger.execute(line).to_text() for line in lines]


def own_run(checkpoint: Path, session: Path, tp: int = 1, **changes: Any) -> Debugger:
    """A debugger with ranks of its own."""
    model, source = open_checkpoint(checkpoint)
    source.close()
    config = EngineConfig(**(asdict(EngineConfig(tp=tp, max_tokens=64)) | changes.pop("config", {})))
    return start(DebugTarget(checkpoint, model, config, [PROMPT], session, **changes))
