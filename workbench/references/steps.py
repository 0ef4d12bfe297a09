"""The steps of a golden recording, whatever computes them: teacher forcing, the likeliest tokens, statistics.

Every sequence runs on its own, with a cache of its own, so that no padding and no other sequence can touch its
numbers; the steps of all sequences are merged into the records of one session.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.taps.parts import merge, statistics
from lockstep.sessions.meta import SequenceMeta, SessionMeta
from lockstep.sessions.records import STATISTICS, SequenceStep, StepInFlight, StepRecord, Tap, TensorRecord
from lockstep.sessions.writer import SessionWriter
from lockstep.workbench.references.arrays import NewestRows, Seen, array, dtype_name, measured_parts
from lockstep.workbench.references.request import (
    ONE_PASS,
    GoldenRequest,
    GoldenSequence,
    OnePass,
    ReferenceFailure,
    prefill_passes,
)

#: How many of the largest logits a step keeps by themselves.
TOP_K = 20
#: Bytes of a step's tensors that wait to be written.
WAITING = 64 << 20

#: Called with a tap and its tensor, which it copies: the model may overwrite its own later in the pass.
See = Callable[[str, Seen], None]


class GoldenModel(Protocol):
    """What computes a reference. `taps` are in execution order."""

    @property
    def taps(self) -> Sequence[Tap]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context(self) -> int:
        """The longest sequence it was made for, in tokens."""
        ...

    def meta(self) -> SessionMeta:
        """What it is, how it computes, which taps it has not."""
        ...

    def forward(self, seq: int, ids: Sequence[int], see: See) -> Tensor:
        """Read the next tokens of sequence `seq`, giving `see` every tap; the logits after the last, [vocab]."""
        ...

    def cached(self, seq: int) -> list[int]:
        """How many positions the cache of each layer holds."""
        ...

    def whole(self, ids: Sequence[int], last: int) -> Tensor | None:
        """The logits after each of the `last` tokens, [last, vocab], by one pass over all. None: that is not held
        against the steps."""
        ...


@dataclass(slots=True)
class _SequenceRun:
    """One sequence on its way: the tokens that it is to read, `chunk` a pass, and how many it has read and emitted."""

    seq: int
    plan: GoldenSequence
    waiting: tuple[int, ...]
    chunk: int | None
    read: int = 0
    emitted: int = 0
    decoded: dict[int, tuple[int, Tensor]] = field(default_factory=dict)  # step -> what it read, its logits

    def next_ids(self) -> tuple[int, ...]:
        """What the next pass reads; it waits no longer."""
        ids, self.waiting = self.waiting[: self.chunk], self.waiting[self.chunk or len(self.waiting) :]
        self.read += len(ids)
        return ids


def record_steps(
    model: GoldenModel, request: GoldenRequest, path: Path, progress: Callable[[], None] | None = None
) -> None:
    """Record the session that `request` asks for at `path`. `progress` is called after every step.

    ReferenceFailure where the ids do not fit the model.
    """
    _check_ids(request, model)
    sequences = {
        seq: SequenceMeta(prompt_ids=plan.prompt, forced=plan.forced)
        for seq, plan in enumerate(request.sequences)
    }
    meta = replace(model.meta(), sequences=sequences)
    with SessionWriter.create(path, taps=list(model.taps), ranks=1, meta=meta) as writer:
        runs = [
            _SequenceRun(seq, plan, plan.prompt, request.chunk) for seq, plan in enumerate(request.sequences)
        ]
        for step in _steps(model, request, runs, writer):
            writer.step(0, step, added=True)
            if progress:
                progress()
        for run in runs:
            _compare_with_one_pass(model, run, writer)


def _compare_with_one_pass(model: GoldenModel, run: _SequenceRun, writer: SessionWriter) -> None:
    """Record how far the logits of the decode steps are from those of one pass over the same tokens."""
    ids = [*run.plan.prompt, *(token for token, _ in run.decoded.values())]
    logits = model.whole(ids, len(run.decoded)) if run.decoded else None
    if logits is None:
        return
    apart = {
        step: float((one - logits[i].double()).abs().max())
        for i, (step, (_, one)) in enumerate(run.decoded.items())
    }
    reported = msgspec.to_builtins(OnePass(run.seq, apart), str_keys=True)
    writer.event(0, max(apart), ONE_PASS, f"sequence {run.seq}: decode steps against one pass", reported)


def _steps(
    model: GoldenModel, request: GoldenRequest, runs: Sequence[_SequenceRun], writer: SessionWriter
) -> Iterator[StepRecord]:
    """The prefill, whole or in chunks, then the decode steps of one token a sequence."""
    for step in range(request.steps + 1):
        active = [run for run in runs if run.plan.runs(run.emitted)]
        if not active:
            return
        yield _step(model, active, _Passing(step, model.taps, writer))


@dataclass(slots=True)
class _Passing:
    """What passes the taps in a step: measured, and its tensors written whenever many wait."""

    step: int
    taps: Sequence[Tap]
    writer: SessionWriter
    parts: dict[str, list[NDArray[np.float64]]] = field(default_factory=lambda: defaultdict(list))
    tensors: list[TensorRecord] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def see(self, tap: str, seen: Seen, seq: int) -> None:
        """One sequence's tensor."""
        if isinstance(seen, NewestRows):
            kept = seen.rows.shape[1]
            self.parts[tap].append(seen.parts.cpu().numpy())
            self.tensors.append(
                TensorRecord(tap, 0, seq, array(seen.rows), dtype_name(seen.rows), f":,-{kept}:")
            )
            line = f"attention of sequence {seq}: the rows of the last {kept} of {seen.of} tokens"
            self.dropped += [] if line in self.dropped else [line]
        else:
            self.parts[tap].append(measured_parts(seen, masked=tap.endswith(".scores")))
            self.tensors.append(TensorRecord(tap, 0, seq, array(seen), dtype_name(seen)))
        if sum(one.array.nbytes for one in self.tensors) > WAITING:
            self.writer.in_flight(0, StepInFlight(self.step, 0, (), tensors=self.tensors))
            self.tensors = []

    def statistics(self) -> NDArray[np.float32]:
        """[taps, 1, statistics]; NaN of a tap that nothing passed."""
        stats = np.full((len(self.taps), 1, len(STATISTICS)), np.nan, dtype=np.float32)
        for tap in self.taps:
            if found := self.parts.get(tap.name):
                stats[tap.index] = statistics(merge(np.concatenate(found))[None])
        return stats


def _step(model: GoldenModel, runs: Sequence[_SequenceRun], passing: _Passing) -> StepRecord:
    started = time.perf_counter()
    phase = "decode" if all(run.emitted for run in runs) else "prefill"
    done = [_forward(model, run, passing.step, partial(passing.see, seq=run.seq)) for run in runs]
    elapsed = time.perf_counter() - started
    return StepRecord(
        passing.step, phase, done, elapsed, stats=passing.statistics(), tensors=passing.tensors, dropped=passing.dropped
    )  # fmt: skip


def _forward(model: GoldenModel, run: _SequenceRun, step: int, see: See) -> SequenceStep:
    """One forward pass of one sequence: reads its next ids, and where no more of them wait decides what follows."""
    decodes, ids = run.emitted > 0, run.next_ids()
    logits = model.forward(run.seq, ids, see).double()
    if decodes:
        run.decoded[step] = ids[0], logits
    top = logits.argsort(descending=True, stable=True)[:TOP_K]  # of equals the lowest id, on every device
    emitted, forced = None, False
    if not run.waiting:
        reported = (run.plan.forced or ())[run.emitted : run.emitted + 1]
        emitted, forced = (*reported, int(top[0]))[0], bool(reported)
        run.waiting, run.emitted = (emitted,), run.emitted + 1
    log_probs = logits.log_softmax(-1)
    positions = range(run.read - len(ids), run.read)
    return SequenceStep(
        run.seq,
        ids,
        positions,
        kv_lens=[model.cached(run.seq)],
        emitted=emitted,
        forced=forced,
        topk_ids=top.tolist(),
        topk_logits=logits[top].tolist(),
        logsumexp=logits.logsumexp(-1).item(),
        entropy=-(log_probs.exp() * log_probs).nansum().item(),
    )


def _check_ids(request: GoldenRequest, model: GoldenModel) -> None:
    for seq, plan in enumerate(request.sequences):
        highest = max((*plan.prompt, *(plan.forced or ())))
        if highest >= model.vocab_size:
            raise ReferenceFailure(
                f"sequence {seq}: token id {highest} is outside the vocabulary of {model.vocab_size}", 2
            )
        decoded = max(0, request.steps + 1 - prefill_passes([plan.prompt], request.chunk))
        decoded = decoded if plan.forced is None else min(decoded, len(plan.forced))
        if len(plan.prompt) + decoded > model.context:
            raise ReferenceFailure(
                f"sequence {seq}: {len(plan.prompt)} prompt tokens and {decoded} steps exceed the context of "
                f"{model.context}",
                2,
            )
