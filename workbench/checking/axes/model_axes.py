"""A model on our engine along the axes: which variants of its run there are, and what each is held against.

Runs that must agree are metamorphic relations (Chen et al. 1998); that the bits of right engines may depend on the
batch, the chunk and the number of ranks: He et al. 2025, "Defeating Nondeterminism in LLM Inference".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.engine.config import EngineConfig, check_fit
from lockstep.engine.errors import ConfigError, RankError, RequestError
from lockstep.engine.faults.catalogue import faults_of
from lockstep.sessions import Session
from lockstep.sessions.keeping import keeping
from lockstep.sessions.limits import UNLIMITED
from lockstep.sessions.meta import SessionMeta
from lockstep.workbench.checking.axes.axis import AxisName, AxisResult
from lockstep.workbench.checking.axes.comparison import Variants
from lockstep.workbench.checking.axes.row_judge import KnownRows, RowJudge
from lockstep.workbench.checking.axes.schedules import (
    Emitted,
    Requests,
    Schedule,
    alone,
    preempted,
    reversed_order,
    rewound,
    speculated,
    together,
)
from lockstep.workbench.checking.invariants.runs import changes_with_passes, crowd
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.row_sides import RowSide
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.inferior.session import create_session
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import OpenedModel
from lockstep.workbench.models.requests import plan

#: Chunks of a prompt that are tried, in tokens, and how many passes they may take at most.
_CHUNKS, _PASSES = (1, 3), 64
#: Numbers of ranks that are tried, where they fit the model.
_RANKS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class _Run:
    """One run: its engine's configuration, and the order in which it takes the requests."""

    config: EngineConfig
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class _Pair:
    """A variant, the run that it must equal, and both in words."""

    summary: str
    base: _Run
    variant: _Run


@dataclass(slots=True)
class ModelAxes:
    """A model as `config` runs it with `faults`. A single prompt is joined by a longer and a shorter request. Sessions
    of the runs go to `folder`."""

    opened: OpenedModel
    config: EngineConfig
    faults: Mapping[str, str]
    prompts: Sequence[Sequence[int]]
    steps: int
    folder: Path
    progress: Callable[[str], None] = lambda what: None
    _requests: Requests = field(init=False)
    _facts: Facts = field(init=False)
    _recorded: dict[tuple[EngineConfig, str], Path] = field(default_factory=dict)
    _known: dict[Path, KnownRows] = field(default_factory=dict)
    _engine: tuple[EngineConfig, Inferior] | None = None

    def __post_init__(self) -> None:
        room = self.opened.config.context - self.steps - 1
        prompts = crowd(self.prompts[0], room) if len(self.prompts) == 1 else self.prompts
        self._requests = Requests(tuple(map(tuple, prompts)), self.steps)
        self.config = plan(self.opened, self.config, prompts, self.steps + 1, FULL)
        self._facts = Facts.of(self.opened.path, self.config.dtype)

    def run(self, axes: Sequence[AxisName]) -> list[AxisResult]:
        """Each variant of each axis. RequestError, ConfigError and RankError where the run as it was asked for cannot
        be."""
        try:
            self._record(self._base)
            return [one for axis in axes for one in self._along(axis)]
        finally:
            self._close()

    @property
    def requests(self) -> Requests:
        """What is run."""
        return self._requests

    @property
    def _base(self) -> _Run:
        return _Run(self.config, together)

    def _along(self, axis: AxisName) -> Iterator[AxisResult]:
        found = _PAIRS[axis](self)
        if isinstance(found, str):
            yield AxisResult(axis, axis, "not tried", why=found)
            return
        for pair in found:
            self.progress(f"{axis}: {pair.summary}")
            try:
                paths = self._record(pair.base), self._record(pair.variant)
            except (ConfigError, RequestError) as error:
                yield AxisResult(axis, pair.summary, "not tried", why=str(error))
            except RankError as error:
                self._close()
                yield AxisResult(axis, pair.summary, "bug", why=str(error))
            else:
                yield self._compared(axis, pair.summary, *paths)

    def _compared(self, axis: AxisName, summary: str, base: Path, variant: Path) -> AxisResult:
        facts, known = self._facts, self._known
        with (
            Session.open(base, UNLIMITED) as first,
            Session.open(variant, UNLIMITED) as second,
            keeping(first, second),
        ):
            judges = (
                RowJudge.of(first, facts, known.setdefault(base, {})),
                RowJudge.of(second, facts, known.setdefault(variant, {})),
            )
            sides = RowSide(first, counted=True), RowSide(second, counted=True)
            return Variants(*sides, judges).compare(axis, summary)

    def _record(self, run: _Run) -> Path:
        """The session of a run, recorded now or before. The first run of all decides which tokens are emitted."""
        key = run.config, run.schedule.__name__
        if key not in self._recorded:
            path = self.folder / f"{len(self._recorded)}.session"
            inferior = self._inferior(run.config)
            reported = SessionMeta(source="lockstep invariant")
            with create_session(inferior, path, reported, overwrite=True), self._recording(inferior):
                emitted = run.schedule(inferior, self._requests)
            self._recorded[key] = path
            self._keep(emitted)
        return self._recorded[key]

    def _keep(self, emitted: Emitted) -> None:
        if not self._requests.forced:
            self._requests = replace(self._requests, forced=emitted)

    @contextmanager
    def _recording(self, inferior: Inferior) -> Iterator[None]:
        """Afterwards the inferior has no sequences, and its next pass is the first."""
        try:
            yield
        finally:
            inferior.recorder.stop()
            inferior.recorder.branch = 0
        for seq in list(inferior.sequences):
            inferior.remove(seq)
        inferior.rewind(0)

    def _inferior(self, config: EngineConfig) -> Inferior:
        """The engine of that configuration; one at a time is kept."""
        if self._engine is not None and self._engine[0] == config:
            return self._engine[1]
        self._close()
        check_fit(self.opened.config, config)
        acting = {
            fault.seam: fault.value
            for fault in faults_of(self.faults)
            if fault.needs(self.opened.config, config.tp) is None
        }
        inferior = Inferior(self.opened.path, self.opened.config, config, acting, FULL)
        self._engine = config, inferior
        return inferior

    def _close(self) -> None:
        if self._engine is not None:
            self._engine[1].close()
            self._engine = None

    def _scheduled(self, summary: str, schedule: Schedule) -> list[_Pair]:
        return [_Pair(summary, self._base, _Run(self.config, schedule))]

    def _batch(self) -> list[_Pair] | str:
        if len(self._requests.prompts) < 2:
            return "there is one request"
        return self._scheduled("alone = in a batch", alone)

    def _order(self) -> list[_Pair] | str:
        if len(self._requests.prompts) < 2:
            return "there is one request"
        return self._scheduled("last request first = first request first", reversed_order)

    def _chunk(self) -> list[_Pair] | str:
        longest = max(map(len, self._requests.prompts))
        if why := changes_with_passes(self.opened.config):
            return why
        if longest < 2:
            return "the prompts are single tokens"
        least = -(-longest // _PASSES)
        sizes: list[int | None] = [*sorted({max(size, least) for size in _CHUNKS}), None]
        asked = self.config.chunk_tokens
        return [
            _Pair(
                f"{_chunks(size)} = {_chunks(asked)}",
                self._base,
                _Run(replace(self.config, chunk_tokens=size), together),
            )
            for size in sizes
            if size != asked and (size is None or size < longest)
        ]

    def _prefix(self) -> list[_Pair] | str:
        """Our cache shares no prefixes: what an engine with such a cache does is to go on from rows that are there."""
        shortest = min(map(len, self._requests.prompts))
        if shortest < 2:
            return "a prompt is a single token"
        config = replace(self.config, chunk_tokens=-(-shortest // 2))
        reported = f"from {config.chunk_tokens} kept tokens = from an empty cache"
        return [_Pair(reported, _Run(config, together), _Run(config, rewound))]

    def _preempt(self) -> list[_Pair] | str:
        if why := changes_with_passes(self.opened.config):
            return why
        if self.steps < 1:
            return "no request decodes: give --steps 2"
        return self._scheduled("dropped and read anew = undisturbed", preempted)

    def _speculation(self) -> list[_Pair] | str:
        if why := changes_with_passes(self.opened.config):
            return why
        if self.steps < 3:
            return "too few tokens to draft some and go on: give --steps 4"
        config = replace(self.config, chunk_tokens=None)
        return [
            _Pair("from verified drafts = token by token", _Run(config, together), _Run(config, speculated))
        ]

    def _tp(self) -> list[_Pair] | str:
        asked = self.config.tp
        others = [tp for tp in _RANKS if tp != asked and self._fits(tp, 1)]
        if not others:
            return f"the model fits {asked} rank alone"
        return [
            _Pair(f"tp {tp} = tp {asked}", self._base, _Run(replace(self.config, tp=tp, ep=1), together))
            for tp in others
        ]

    def _ep(self) -> list[_Pair] | str:
        if self.opened.config.experts is None:
            return f"{self.opened.config.family} has no experts"
        tp = max(2, self.config.tp)
        others = [ep for ep in (2, 4) if ep <= tp and self._fits(tp, ep)]
        if not others:
            return f"its experts cannot be divided among {tp} ranks"
        whole = _Run(replace(self.config, tp=tp, ep=1), together)
        return [
            _Pair(f"tp {tp} ep {ep} = tp {tp} ep 1", whole, _Run(replace(whole.config, ep=ep), together))
            for ep in others
        ]

    def _graph(self) -> list[_Pair] | str:
        return "what a graph replays shows no taps: `check` judges the logits of a run without taps, which replays it"

    def _fits(self, tp: int, ep: int) -> bool:
        try:
            check_fit(self.opened.config, replace(self.config, tp=tp, ep=ep))
        except ConfigError:
            return False
        return True


#: By axis the pairs of runs, or why there are none.
_PAIRS: Mapping[AxisName, Callable[[ModelAxes], list[_Pair] | str]] = {
    "batch": ModelAxes._batch,
    "order": ModelAxes._order,
    "chunk": ModelAxes._chunk,
    "prefix": ModelAxes._prefix,
    "preempt": ModelAxes._preempt,
    "tp": ModelAxes._tp,
    "ep": ModelAxes._ep,
    "speculation": ModelAxes._speculation,
    "graph": ModelAxes._graph,
}


def _chunks(size: int | None) -> str:
    return "whole prompts" if size is None else f"chunks of {size}"
