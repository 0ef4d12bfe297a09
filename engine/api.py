"""The engine's public face: a model on its ranks, run one pass at a time (torch-free; the ranks are processes)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.errors import RequestError
from lockstep.engine.ranks.client import Client
from lockstep.engine.ranks.messages import AddSequence, RemoveSequence, ReplaceRules, RunStep, WatchTaps
from lockstep.engine.ranks.reports import LoadReport, StepReport
from lockstep.engine.run.memory import check_loadable
from lockstep.engine.run.results import SequenceResult
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.names import TapSpec, matches, model_taps


class Pass:
    """One forward pass as its ranks reported it. Arrays are numpy's, bfloat16 widened to float32."""

    def __init__(self, reports: Sequence[StepReport], specs: Sequence[TapSpec]) -> None:
        self.reports, self.specs = reports, specs

    @property
    def sequences(self) -> dict[int, SequenceResult]:
        """What it did to each sequence, as rank 0 reports."""
        return {one.seq: one for one in self.reports[0].sequences}

    def token(self, seq: int = 0) -> int:
        """The token chosen for a sequence. RequestError inside a chunked prefill."""
        emitted = self.sequences[seq].emitted
        if emitted is None:
            raise RequestError(f"sequence {seq} is not through its prompt yet")
        return emitted

    def parts(self, tap: str, seq: int = 0) -> list[NDArray[Any]]:
        """What each rank held at a captured tap, in rank order. RequestError where it was not captured."""
        place = self._place(tap)
        found = [
            one.value.numbers
            for report in self.reports
            for one in report.tensors
            if (one.tap, one.seq) == (place, seq)
        ]
        if len(found) != len(self.reports):
            raise RequestError(f"{tap} of sequence {seq} was not captured: ask for it with capture()")
        return found

    def tensor(self, tap: str, seq: int = 0) -> NDArray[Any]:
        """The tensor that one rank alone would have had, put together from the ranks' parts by the tap's layout."""
        layout, parts = self.specs[self._place(tap)].layout, self.parts(tap, seq)
        if layout.kind == "partial":
            return np.asarray(np.sum(parts, axis=0))
        if layout.kind == "replicate":
            return parts[0]
        shards = parts[:: layout.replicas]
        size = len(shards) // layout.groups
        groups = [shards[i : i + size] for i in range(0, len(shards), size)]
        return np.asarray(sum(np.concatenate(group, axis=layout.dim) for group in groups))

    @cached_property
    def statistics(self) -> NDArray[np.float32]:
        """[ranks, taps, statistics] in the order of `engine.taps.names.STATISTICS`."""
        return np.stack([one.stats.array for one in self.reports if one.stats is not None])

    @cached_property
    def checksums(self) -> NDArray[np.uint64]:
        """[ranks, taps]: equal where every bit is."""
        return np.stack([one.checksums.array for one in self.reports if one.checksums is not None])

    def _place(self, tap: str) -> int:
        for place, spec in enumerate(self.specs):
            if spec.name == tap:
                return place
        raise RequestError(f"there is no tap {tap!r}")


class Engine:
    """Rank processes that a model is loaded into. Use as a context manager: leaving it ends them.

    `program` is the module that each rank runs. `engine.ranks` knows the correct rules alone; one of your own calls
    `engine.ranks.worker.serve(resolve)` with a function that makes `Rules` of what `load` is given as `rules`.
    """

    model: ModelConfig
    specs: tuple[TapSpec, ...]  # the model's taps, in execution order

    def __init__(self, config: EngineConfig | None = None, *, program: str = "lockstep.engine.ranks") -> None:
        self.client = Client(config or EngineConfig(), program=program)
        self._next = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks."""
        self.client.close()

    def load(self, path: str | Path, rules: Mapping[str, str] | None = None) -> list[LoadReport]:
        """Load a checkpoint: each rank reads its shards only, and reports."""
        path = Path(path)
        self.model = check_loadable(path, self.client.config)
        self.specs = self.client.specs = model_taps(self.model, self.client.config.tp, self.client.config.ep)
        self._next = 0
        return self.client.load(path, rules, self.model)

    def rules(self, rules: Mapping[str, str], *, reload: bool = False) -> None:
        """Put other rules in force, from an empty cache and without sequences; `reload` reads the weights anew."""
        self.client.call(ReplaceRules(dict(rules), reload))
        self._next = 0

    def add(self, ids: Sequence[int], seq: int | None = None, sampling: Sampling | None = None) -> int:
        """A new sequence; returns its number, the next one unless it is given."""
        seq = self._next if seq is None else seq
        self.client.call(AddSequence(seq, list(ids), sampling or Sampling()))
        self._next = max(self._next, seq + 1)
        return seq

    def remove(self, seq: int) -> None:
        """A sequence is done: its cache is free again."""
        self.client.call(RemoveSequence(seq))

    def capture(self, *taps: str, last: Sequence[str] = (), statistics: bool = False) -> None:
        """Set what every further pass brings back: whole tensors of `taps` and the last token's row of `last` (names or
        globs), and statistics and checksums of all taps."""
        self.client.call(WatchTaps(statistics, self._places(taps), self._places(last)))

    def step(self, forced: Mapping[int, int] | None = None) -> Pass:
        """One forward pass of every sequence: the first runs a prompt, each further one a token. `forced[seq]` is the
        token to go on with, instead of the chosen one."""
        outcomes = self.client.call(RunStep(dict(forced or {})))
        return Pass([one for one in outcomes if isinstance(one, StepReport)], self.specs)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling | None = None
    ) -> list[list[int]]:
        """Run new sequences to their ends, and others that are there along with them: each prompt's new tokens, up to
        and with an end-of-sequence token."""
        found: dict[int, list[int]] = {self.add(ids, sampling=sampling): [] for ids in prompts}
        running = set(found) if max_tokens > 0 else set()
        while running:
            done = self.step()
            for seq in sorted(running):
                emitted = done.sequences[seq].emitted
                if emitted is not None:
                    found[seq].append(emitted)
                    if emitted in self.model.eos_ids or len(found[seq]) == max_tokens:
                        running.remove(seq)
                        self.remove(seq)
        return list(found.values())

    def _places(self, globs: Sequence[str]) -> list[int]:
        for glob in globs:
            if not any(matches(spec.name, [glob]) for spec in self.specs):
                raise RequestError(f"no tap matches {glob!r}")
        return [place for place, spec in enumerate(self.specs) if matches(spec.name, globs)]
