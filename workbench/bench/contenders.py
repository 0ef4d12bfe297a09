"""Who is timed: this engine with taps off or on, and peers in processes of their own (torch-free)."""

from __future__ import annotations

import socket
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec

from lockstep.engine.api import Engine
from lockstep.engine.children import start_python
from lockstep.engine.config import EngineConfig
from lockstep.engine.config.engine import FEW_SEQUENCES
from lockstep.engine.errors import EngineError
from lockstep.engine.peaks import Held
from lockstep.engine.ranks.messages import MeasureMemory
from lockstep.workbench.bench.messages import (
    ANSWERS,
    PeerAnswer,
    PeerFailure,
    PeerReady,
    PeerSpec,
    PeerTiming,
    Timing,
    Workload,
    prompt_ids,
)


class ContenderFailure(EngineError):
    """A contender that cannot be had, or cannot run a workload; the message states why."""


class Contender(Protocol):
    """One that runs workloads. `load_seconds` as it was loaded; `load_bytes` are what it holds since."""

    @property
    def name(self) -> str: ...

    @property
    def load_seconds(self) -> float: ...

    @property
    def load_bytes(self) -> int: ...

    def run(self, work: Workload) -> Timing:
        """Run it from an empty cache. ContenderFailure where it cannot."""
        ...


@dataclass(slots=True)
class EngineContender:
    """This engine with the model at `path`, timed at its host. Several may share an engine."""

    name: str
    engine: Engine
    path: Path
    load_seconds: float
    load_bytes: int
    statistics: bool = False

    def run(self, work: Workload) -> Timing:
        """Every pass from the command to the last rank's report."""
        engine = self.engine
        self._make_room(work.batch)
        engine.capture(statistics=self.statistics)
        vocab = engine.model.vocab_size
        seqs = [engine.add(prompt_ids(work.prompt, vocab, i)) for i in range(work.batch)]
        taken, before = [], memory_of(engine)
        try:
            for _ in range(1 + work.steps):
                begun = time.perf_counter()
                engine.step()
                taken.append(time.perf_counter() - begun)
        finally:
            for seq in seqs:
                engine.remove(seq)
        above = memory_of(engine).peak - before.now
        return Timing(taken[0], tuple(taken[1:]), above)

    def _make_room(self, batch: int) -> None:
        """Load the model anew where it lies as an engine for other numbers of sequences has it: each is timed as
        those who run so many would see it."""
        client = self.engine.client
        config = replace(client.config, max_sequences=max(batch, FEW_SEQUENCES))
        if config.for_many != client.config.for_many or batch > client.config.max_sequences:
            client.config = config
            self.engine.load(self.path)


def memory_of(engine: Engine) -> Held:
    """What its ranks hold together, and have held at most each since this was asked before."""
    reports = engine.client.call(MeasureMemory())
    return Held(sum(one.now for one in reports), sum(one.peak for one in reports))


def loaded_engine(path: Path, config: EngineConfig) -> tuple[Engine, float]:
    """An engine with the model, and the seconds that loading took once its ranks had met."""
    engine = Engine(config)
    try:
        begun = time.perf_counter()
        engine.load(path)
    except BaseException:
        engine.close()
        raise
    return engine, time.perf_counter() - begun


@dataclass(slots=True)
class PeerContender:
    """Another library in a child process. Use as a context manager."""

    name: str
    model: Path
    dtype: str
    threads: int
    context: int
    device: str = "cpu"
    load_seconds: float = 0.0
    load_bytes: int = 0
    _process: subprocess.Popen[bytes] = field(init=False)
    _ours: socket.socket = field(init=False)
    _rest: bytes = b""

    def __enter__(self) -> PeerContender:
        self._ours, theirs = socket.socketpair()
        spec = PeerSpec(
            self.name, str(self.model), self.dtype, self.threads, self.context, theirs.fileno(), self.device
        )
        with theirs:
            self._process = start_python(
                "-m", "lockstep.workbench.bench.peer", msgspec.json.encode(spec).decode(),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                settings={"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        try:
            reported = self._answer()
            if not isinstance(reported, PeerReady):
                raise ContenderFailure(f"{self.name}: it answered out of turn")
            self.load_seconds, self.load_bytes = reported.seconds, reported.bytes
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._process.kill()
        self._process.wait()

    def run(self, work: Workload) -> Timing:
        """As the child has timed it."""
        self._ours.sendall(msgspec.json.encode(work) + b"\n")
        reported = self._answer()
        if not isinstance(reported, PeerTiming):
            raise ContenderFailure(f"{self.name}: it answered out of turn")
        return reported.timing

    def _answer(self) -> PeerAnswer:
        while b"\n" not in self._rest:
            if not (more := self._ours.recv(1 << 16)):
                code = self._process.wait()
                how = f"exit code {code}" if code >= 0 else f"signal {-code}"
                raise ContenderFailure(f"{self.name} has ended with {how}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        reported: PeerAnswer = ANSWERS.decode(line)
        if isinstance(reported, PeerFailure):
            raise ContenderFailure(f"{self.name}: {reported.why}")
        return reported
