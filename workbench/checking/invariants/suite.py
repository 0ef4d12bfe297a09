"""`lockstep invariant`: what is true of every right engine, tried on this one without any reference.

Runs of the same tokens that differ in one respect must agree (metamorphic relations, Chen et al. 1998): which of them
do not shows where to look before anything is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lockstep.engine.api import Engine
from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.errors import EngineError
from lockstep.engine.ranks.messages import ReadWeights
from lockstep.engine.run.estimates import (
    LeftBehind,
    kept_run_bytes,
    largest_passes,
    loaded_bytes,
    refuse_beyond,
    run_bytes,
)
from lockstep.engine.taps.names import model_taps
from lockstep.workbench.checking.invariants.invariant import Invariant
from lockstep.workbench.checking.invariants.properties import PROPERTIES, finite, loaded
from lockstep.workbench.checking.invariants.runs import (
    Run,
    changes_with_passes,
    crowd,
    first_apart,
    other_bits,
    run,
    tolerance,
)
from lockstep.workbench.inferior.rank_program import RANK_PROGRAM

#: Tokens of the long prompt, where the model's context has room for it.
LONG = 256
#: How many of the highest ids make a prompt.
_HIGHEST = 8

#: Called with the one being tried.
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Suite:
    """A model on our engine, as `config` runs it under `rules`, on a prompt and some decode steps. Ranks get the room
    that a small batch and the long prompt need, whatever `config` states."""

    path: Path
    model: ModelConfig
    config: EngineConfig
    rules: Mapping[str, str]
    prompt: Sequence[int]
    steps: int
    progress: Progress = lambda what: None
    found: list[Invariant] = field(default_factory=list)

    def run(self) -> list[Invariant]:
        """Try them all. EngineError where the engine does not even run as it was asked to, and where what its runs
        leave behind would not fit into memory."""
        self._check_room()
        with self._engine(self._roomy) as engine:
            before = engine.client.call(ReadWeights(compare=True), timeout=None)
            base = self._run(engine, self.prompt)
            for one in PROPERTIES:
                self.found.append(one(base, self.model, self.tolerance))
            self._same_engine(engine, base)
            highest = self._highest(engine)
            after = engine.client.call(ReadWeights(), timeout=None)
            self.found.extend(loaded(before, after))
        self._poisoned(base)
        self._chunked(base, long=True)
        self._one_rank(base, highest)
        return self.found

    def compare_runs(self) -> list[Invariant]:
        """Only those that hold two short runs against each other, which narrow down where a fault is."""
        with self._engine(self._roomy) as engine:
            base = self._run(engine, self.prompt)
            self._same_engine(engine, base)
        self._chunked(base, long=False)
        self._one_rank(base, None)
        return self.found

    def _check_room(self) -> None:
        """RequestError where two runs and their tensors, the second of a batch, would take more than is free."""
        prompt = len(self.prompt)
        batch = [prompt, min(2 * prompt, self._room), max(1, prompt // 3)]
        specs = model_taps(self.model, self.config.tp, self.config.ep)
        wanted = LeftBehind(full=range(len(specs)), statistics=True)

        def parts(chunk: int | None) -> dict[str, int]:
            config = replace(self._roomy, chunk_tokens=chunk)
            kept = sum(
                kept_run_bytes(self.model, config, wanted, one, self.steps) for one in ([prompt], batch)
            )
            return {
                "weights and cache": loaded_bytes(self.model, config),
                **run_bytes(self.model, config, wanted, largest_passes(batch, chunk)),
                "tensors of the runs that are compared": kept,
            }

        refuse_beyond(f"the invariants of {prompt} tokens", parts, batch, self.config.chunk_tokens)

    @property
    def tolerance(self) -> float:
        return tolerance(self.config.dtype)

    @property
    def _roomy(self) -> EngineConfig:
        longest = max(LONG, 2 * len(self.prompt)) + self.steps + 1
        batch = max(3, self.config.max_sequences)
        return replace(self.config, max_sequences=batch, max_tokens=min(longest, self.model.context))

    @property
    def _changing(self) -> str:
        return changes_with_passes(self.model)

    def _same_engine(self, engine: Engine, base: Run) -> None:
        self._relation(
            "the same bits twice",
            "nondeterminism: memory read before it was written, a race, or sums in an order that varies",
            lambda: other_bits(base, self._run(engine, self.prompt, base.emitted)),
        )
        self._agree(
            "prefill = decode",
            "decode: the positions of its tokens, which cached rows it reads, what its cache was given",
            lambda: (base, self._run(engine, base.tokens, steps=0)),
            self._changing,
        )
        other = [*self.prompt[:-1], (self.prompt[-1] + 1) % self.model.vocab_size]
        self._agree(
            "no token sees a later one",
            "causality: the mask, or an operation that mixes the rows of tokens",
            lambda: (base.prefill, self._run(engine, other, steps=0)),
            "the prompt is a single token" if len(self.prompt) < 2 else "",
            below=len(self.prompt) - 1,
        )
        batch = crowd(self.prompt, self._room)
        self._agree(
            "alone = in a batch",
            "batching: slots or block tables of one sequence used for another, padding, a mask over packed rows",
            lambda: (base, run(engine, self.rules, batch, self.steps, base.emitted)),
        )

    def _highest(self, engine: Engine) -> Run | None:
        """The ids at the end of the vocabulary, which padding and the cut by ranks get wrong first."""
        name, means = (
            "highest token ids",
            "the vocabulary's shards or their padding: an id that no rank holds",
        )
        ids = [self.model.vocab_size - 1 - i for i in range(min(_HIGHEST, self.model.vocab_size, self._room))]
        try:
            ran = self._run(engine, ids, steps=0)
        except EngineError as error:
            self.found.append(Invariant.of(name, means, "", str(error)))
            return None
        held, broken = finite(ran, self.model, self.tolerance), ""
        if held.result == "broken":
            broken = held.summary
        elif empty := [ids[i] for i, row in ran.rows("embed").items() if not np.any(row)]:
            broken = f"embed: the row of token {empty[0]} is empty"
        self.found.append(Invariant.of(name, means, f"ids {ids[-1]} to {ids[0]}", broken, held.tap))
        return ran

    def _poisoned(self, base: Run) -> None:
        with self._another(replace(self._roomy, poison_cache=True)) as engine:
            self._agree(
                "unused cache slots are not read",
                "attention reads a slot that nobody wrote: a length, a block table or a mask that is one too wide",
                lambda: (base, self._run(engine(), self.prompt, base.emitted)),
            )

    def _chunked(self, base: Run, *, long: bool) -> None:
        size = max(1, len(self.prompt) // 3)
        asked = self.config.chunk_tokens
        in_chunks = asked is not None and asked < len(self.prompt)  # then it is the other run that is whole
        with self._another(replace(self._roomy, chunk_tokens=None if in_chunks else size)) as engine:
            self._agree(
                "prefill in chunks = whole",
                "chunks: the positions of later ones, or the mask between a chunk and what is cached",
                lambda: (base, self._run(engine(), self.prompt, base.emitted)),
                self._changing or ("the prompt is a single token" if len(self.prompt) < 2 else ""),
            )
            if long:
                self._long(engine)

    def _one_rank(self, base: Run, highest: Run | None) -> None:
        if self.config.tp == 1:
            self.found.append(
                Invariant(name="tp 1 = tp N", result="not tried", summary="there is one rank (--tp 2)")
            )
            return
        with self._another(replace(self._roomy, tp=1, ep=1)) as engine:
            means = "sharding: a shard cut wrongly, a reduce left out or done twice, heads given to the wrong rank"
            name = f"tp 1 = tp {self.config.tp}"
            self._agree(name, means, lambda: (base, self._run(engine(), self.prompt, base.emitted)))
            if highest is not None:
                ids = highest.tokens
                means = "the vocabulary's shards: an id that no rank holds, or that two hold"
                self._agree(
                    f"{name}, highest ids", means, lambda: (highest, self._run(engine(), ids, steps=0))
                )

    def _long(self, chunked: Callable[[], Engine]) -> None:
        """Positions and blocks far beyond the prompt's."""
        length = min(LONG, self._room)
        ids = [self.prompt[i % len(self.prompt)] for i in range(length)]
        self._agree(
            f"{length} tokens, in chunks = whole",
            "long context: positions in low precision, a second block of the cache, a window",
            lambda: self._long_runs(chunked(), ids),
            self._changing or ("the context has no room for it" if length <= 2 * len(self.prompt) else ""),
        )

    def _long_runs(self, chunked: Engine, ids: Sequence[int]) -> tuple[Run, Run]:
        chunked.capture("logits", "*.mlp_residual")
        few = run(chunked, self.rules, [ids], 0)
        unlike = None if chunked.client.config.chunk_tokens else self.config.chunk_tokens
        with self._engine(replace(self._roomy, chunk_tokens=unlike)) as engine:
            engine.capture("logits", "*.mlp_residual")
            return run(engine, self.rules, [ids], 0), few

    @property
    def _room(self) -> int:
        """Tokens that a prompt may have."""
        return (self._roomy.max_tokens or self.model.context) - self.steps - 1

    def _run(
        self, engine: Engine, ids: Sequence[int], forced: Sequence[int] = (), steps: int | None = None
    ) -> Run:
        return run(engine, self.rules, [list(ids)], self.steps if steps is None else steps, forced)

    @contextmanager
    def _engine(self, config: EngineConfig) -> Iterator[Engine]:
        with Engine(config, program=RANK_PROGRAM) as engine:
            engine.load(self.path, self.rules)
            engine.capture("*", statistics=True)
            yield engine

    @contextmanager
    def _another(self, config: EngineConfig) -> Iterator[Callable[[], Engine]]:
        """An engine under another configuration, started when it is first asked for."""
        started: list[Engine] = []
        with ExitStack() as stack:

            def engine() -> Engine:
                if not started:
                    started.append(stack.enter_context(self._engine(config)))
                return started[0]

            yield engine

    def _agree(
        self,
        name: str,
        means: str,
        runs: Callable[[], tuple[Run, Run]],
        why_not: str = "",
        below: int | None = None,
    ) -> None:
        """Two runs must have the same rows; of the tokens `below` an index, where it is given."""

        def compare() -> tuple[str, str, str]:
            ours, theirs = runs()
            apart = first_apart(ours, theirs, self.tolerance, below)
            reported = f"{len(ours.tokens)} tokens, {len(ours.taps)} taps"
            return reported, "" if apart is None else apart.in_words(), "" if apart is None else apart.tap

        self._relation(name, means, compare, why_not)

    def _relation(
        self, name: str, means: str, compare: Callable[[], tuple[str, str, str]], why_not: str = ""
    ) -> None:
        """One more, where nothing stands against it."""
        if why_not:
            self.found.append(Invariant(name=name, result="not tried", summary=why_not))
            return
        self.progress(name)
        try:
            reported, broken, tap = compare()
        except EngineError as error:
            reported, broken, tap = "", str(error), ""
        self.found.append(Invariant.of(name, means, reported, broken, tap))
