"""What a debugger is started on, from a command line: the host's, and `lockstep run`'s."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.engine.checkpoint.files import gguf_file
from lockstep.engine.run.sampling import Sampling
from lockstep.sessions.meta import ModelMeta, SessionMeta
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.host.launch import DebugTarget, start
from lockstep.workbench.debugger.host.replay import open_replay
from lockstep.workbench.inferior.destination import may_write
from lockstep.workbench.models import requests
from lockstep.workbench.models.opening import open_to_run
from lockstep.workbench.paths import new_session_path
from lockstep.workbench.references.request import REFERENCES, ReferenceName


@dataclass(frozen=True)
class Launch:
    """A live run as the user asked for it. `room`: tokens that the cache must have room for after the prompt."""

    model: str
    prompts: Sequence[str] = ()
    ids: Sequence[str] = ()
    chat: bool = False
    tp: int = 1
    device: str = "cpu"
    dtype: str = "auto"
    rules: Sequence[str] = ()
    capture: Sequence[str] = ()
    sampling: Sampling = field(default_factory=Sampling)
    timeout: float = 60.0
    session: Path | None = None
    listen: str = ""
    room: int = 4096
    start_timeout: float = 300.0
    catch: Sequence[str] = ()  # sentinels that stop it from the beginning
    weights: str = "dequantised"
    ep: int = 1  # groups of ranks that divide the experts
    chunk: int | None = None  # tokens of a prompt that are read in one pass; None: all
    reference: ReferenceName = "transformers"  # whom `golden` asks of a GGUF file, until it is given another


@dataclass(frozen=True)
class HostOptions:
    """The host's command line: a replay or a launch. `lifeline`: a descriptor; see `engine.lifeline`."""

    socket: Path
    lifeline: int | None = None
    replay: Path | None = None
    launch: Launch | None = None


def target_of(launch: Launch) -> DebugTarget:
    """The run that is meant. EngineError and OSError state what is wrong with it, before any rank is started."""
    model = open_to_run(launch.model)
    texts, chat = requests.texts_of(model, launch.prompts, launch.ids, launch.chat)
    prompts = requests.prompt_ids(model, texts, launch.ids, chat)
    config = requests.engine_config(
        model,
        tp=launch.tp,
        ep=launch.ep,
        device=launch.device,
        dtype=launch.dtype,
        weights=launch.weights,
        chunk=launch.chunk,
        timeout=launch.timeout,
        start_timeout=launch.start_timeout,
        listen=launch.listen,
    )
    capture = requests.capture_of(launch.capture, model, launch.tp)
    config = requests.plan(model, config, prompts, launch.room, capture)
    rules = requests.faults_of(launch.rules, model, launch.tp)
    return DebugTarget(
        model.path, model.config, config, prompts,
        session=may_write(launch.session) if launch.session else new_session_path(model.name),
        sampling=launch.sampling, rules=rules, tokenizer=model.tokenizer, overwrite=launch.session is not None,
        capture=capture,
        reference=launch.reference if gguf_file(model.path) else "transformers",
        meta=SessionMeta(
            source="lockstep run", model=ModelMeta(name=model.name), prompts=tuple(texts), chat=chat
        ),
    )  # fmt: skip


def start_debugger(options: HostOptions, on_warning: Callable[[str], None]) -> Debugger:
    """What the host's command line asks for."""
    if options.launch is not None:
        debugger = start(target_of(options.launch), on_warning)
        for sentinel in options.launch.catch:
            debugger.call("catch", sentinel=sentinel)
        return debugger
    assert options.replay is not None, "the parser lets nothing else through"
    return open_replay(options.replay)


def parse_options(words: Sequence[str]) -> HostOptions:
    """The host's command line; ends the process on a wrong one, as argparse does."""
    parser = argparse.ArgumentParser(prog="lockstep.workbench.cli.host")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--lifeline", type=int)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("model", nargs="?")
    for name in ("prompt", "ids", "fault", "capture", "catch"):
        parser.add_argument(f"--{name}", action="append", default=[])
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", default="dequantised")
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--reference", choices=REFERENCES, default="transformers")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--listen", default="")
    parser.add_argument("--session", type=Path)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    found = parser.parse_args(words)
    if (found.replay is None) == (found.model is None):
        parser.error("give a MODEL or --replay FILE")
    if found.replay is not None:
        return HostOptions(found.socket, found.lifeline, replay=found.replay)
    sampling = Sampling(found.temperature, found.top_k, found.top_p, found.seed)
    launch = Launch(
        found.model, found.prompt, found.ids, found.chat, found.tp, found.device, found.dtype, found.fault,
        found.capture, sampling, found.timeout, found.session,
        found.listen, start_timeout=found.start_timeout, catch=found.catch, weights=found.weights,
        chunk=found.chunk, reference=found.reference, ep=found.ep,
    )  # fmt: skip
    return HostOptions(found.socket, found.lifeline, launch=launch)
