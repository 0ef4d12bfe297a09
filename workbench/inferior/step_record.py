"""From the ranks' reports to what a session holds: pure translation, no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.ranks.reports import CapturedTensor, PauseReport, StepReport
from lockstep.engine.taps.names import TapSpec
from lockstep.sessions.records import SequenceStep, StepInFlight, StepRecord, Tap, TensorRecord
from lockstep.workbench.views.cached_lengths import in_words, odd_lengths

_ATTENTION = (".attn.scores", ".attn.probs")


def taps_of(specs: Sequence[TapSpec]) -> list[Tap]:
    """The engine's taps as a session declares them."""
    return [Tap(i, spec.name, str(spec.layout)) for i, spec in enumerate(specs)]


def step_record(step: int, reports: Sequence[StepReport], specs: Sequence[TapSpec]) -> StepRecord:
    """One forward pass, as all ranks reported it."""
    first = reports[0]
    stats, checksums = _arrays(reports)
    tensors = tensors_of(reports, specs)
    return StepRecord(
        step=step,
        phase=first.phase,
        sequences=[_sequence(i, reports) for i in range(len(first.sequences))],
        wall_seconds=max(report.seconds for report in reports),
        stats=stats,
        checksums=checksums,
        tensors=tensors,
        free_blocks=first.free_blocks,
        used_blocks=first.used_blocks,
        dropped=_dropped(reports, tensors),
    )


def step_in_flight(step: int, reports: Sequence[PauseReport], specs: Sequence[TapSpec]) -> StepInFlight:
    """What a pass that stands still has left behind so far; its tensors are those captured since the last pause."""
    stats, checksums = _arrays(reports)
    return StepInFlight(
        step=step,
        place=reports[0].pause.place,
        sequences=[SequenceStep(one.seq, one.ids, one.positions, ()) for one in reports[0].sequences],
        stats=stats,
        checksums=checksums,
        tensors=tensors_of(reports, specs),
    )


def tensors_of(reports: Sequence[StepReport | PauseReport], specs: Sequence[TapSpec]) -> list[TensorRecord]:
    """The tensors that came with the reports, as a session holds them."""
    new = _tokens(reports)
    return [_tensor(one, rank, new, specs) for rank, report in enumerate(reports) for one in report.tensors]


def _tokens(reports: Sequence[StepReport | PauseReport]) -> dict[int, int]:
    """How many tokens of each sequence the pass reads."""
    return {reported.seq: len(reported.ids) for reported in reports[0].sequences}


def _dropped(reports: Sequence[StepReport], tensors: Sequence[TensorRecord]) -> list[str]:
    """A line for each sequence of which not all rows of the attention were handed over."""
    new, found = _tokens(reports), dict[str, None]()
    for one in tensors:
        if one.tap.endswith(_ATTENTION) and one.slice:
            kept = f"the rows of the last {one.array.shape[1]} of {new[one.seq]} tokens"
            found[f"attention of sequence {one.seq}: {kept}"] = None
    return list(found)


def misaligned(reports: Sequence[StepReport], record: StepRecord) -> str:
    """Where a layer of a rank has not cached just what was run, in words; empty: nowhere."""
    for one, sequence in zip(reports[0].sequences, record.sequences, strict=True):
        run = one.expected_kv_len
        if odd := odd_lengths(sequence, run):
            return f"sequence {one.seq}, step {record.step}: {run} tokens were run, the cache holds {in_words(odd)}"
    return ""


def _arrays(
    reports: Sequence[StepReport | PauseReport],
) -> tuple[NDArray[np.float32] | None, NDArray[np.uint64] | None]:
    """Statistics [taps, ranks, statistics] and checksums [taps, ranks]; None where they were not asked for."""
    stats = [report.stats.array for report in reports if report.stats is not None]
    sums = [report.checksums.array for report in reports if report.checksums is not None]
    return np.stack(stats, axis=1) if stats else None, np.stack(sums, axis=1) if sums else None


def _sequence(index: int, reports: Sequence[StepReport]) -> SequenceStep:
    reported = reports[0].sequences[index]
    choice = reported.choice
    assert choice is not None, "rank 0 reports what it chose from"
    return SequenceStep(
        seq=reported.seq,
        ids=reported.ids,
        positions=reported.positions,
        kv_lens=[report.sequences[index].held for report in reports],
        block_table=reported.block_table,
        emitted=reported.emitted,
        forced=reported.forced,
        topk_ids=choice.top_ids,
        topk_logits=choice.top_logits,
        logsumexp=choice.logsumexp,
        entropy=choice.entropy,
    )


def _tensor(one: CapturedTensor, rank: int, new: Mapping[int, int], specs: Sequence[TapSpec]) -> TensorRecord:
    """A rank's tensor; `new` tokens of each sequence are read; a part of their rows is named by its slice."""
    name, shape = specs[one.tap].name, one.value.shape
    if one.cut == "full" or (name.endswith(_ATTENTION) and shape[1] == new[one.seq]):
        part = ""
    else:
        part = f":,-{shape[1]}:" if name.endswith(_ATTENTION) else "-1:"
    return TensorRecord(name, rank, one.seq, one.value.array, one.value.dtype, part)
