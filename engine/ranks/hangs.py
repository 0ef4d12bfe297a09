"""Which rank the others wait for, from what each has noted on the progress board: pure functions of it (torch-free).

As PyTorch's flight recorder reports it of NCCL: every rank counts the collectives that it has entered; the one that has
entered the fewest is waited for, and two that differ in what a number was have taken different ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.engine.parallel.operations import COLLECTIVES, UNSTARTED, Note, OpKind
from lockstep.engine.ranks.vitals import Vitals

#: How many of its last operations are reported for each rank.
_REPORTED = 8


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One rank as its host sees it: its last operations, its process, whether it has answered the command."""

    rank: int
    history: Sequence[Note]
    vitals: Vitals
    answered: bool
    latest: Note = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "latest", self.history[-1] if self.history else UNSTARTED)


def operation_text(one: Note, taps: Sequence[str]) -> str:
    """What a rank does: "the all-reduce of layers.2.attn.o_proj"."""
    tap = taps[one.place] if one.place < len(taps) else f"operation {one.place}"
    match one.kind:
        case OpKind.TAP:
            return tap
        case OpKind.ALL_REDUCE:
            return f"the all-reduce of {tap}"
        case OpKind.GATHER:
            return "the gather of the logits"
        case OpKind.BROADCAST:
            return "the broadcast of the chosen tokens"
        case OpKind.AGREEMENT:
            return f"the agreement on a pause at {tap}"
        case OpKind.RENDEZVOUS:
            return "the rendezvous of the ranks"
        case OpKind.SEND:
            return f"the sending of a shard to rank {one.place}"
        case OpKind.RECEIVE:
            return f"the receiving of a shard from rank {one.place}"
        case OpKind.LOADING:
            return f"loading, tensor {one.place}"
        case OpKind.PAUSED:
            return f"{tap} (paused)"
        case OpKind.COMMAND:
            return "the beginning of a command"
        case OpKind.ANSWER:
            return "the sending of its answer"
        case OpKind.IDLE:
            return "rest, between commands"
        case OpKind.START:
            return "its start, before its first operation"


def standing_text(rank: int, at: Note, taps: Sequence[str]) -> str:
    """Where one rank stands."""
    return (
        f"rank {rank} {'in' if at.inside else 'at'} {operation_text(at, taps)}, "
        f"step {at.step} (operation {at.number})"
    )


def history_texts(history: Sequence[Note], taps: Sequence[str]) -> list[str]:
    """The last operations of a rank, oldest first; the one that it is inside of is marked."""
    return [operation_text(one, taps) + (" (entered)" if one.inside else "") for one in history[-_REPORTED:]]


def waited_for(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The ranks on which it depends whether the others go on: those whose process is stopped; else those that have
    entered fewer collectives than others; else those that have not answered and are in no transfer; else all."""
    silent = [trace for trace in traces if not trace.answered]
    if stopped := [trace for trace in silent if trace.vitals.stopped or trace.vitals.silent]:
        return stopped
    most = max(trace.latest.collectives for trace in traces)
    fewest = min(trace.latest.collectives for trace in traces)
    if fewest < most:
        return [trace for trace in traces if trace.latest.collectives == fewest]
    return [trace for trace in silent if not trace.latest.inside] or silent


def hang_text(traces: Sequence[RankTrace], taps: Sequence[str]) -> str:
    """Why a command has no end, the ranks to blame named first."""
    if reported := divergence_text(traces, taps):
        return reported
    return "; ".join(_blame(trace, traces, taps) for trace in waited_for(traces))


def stopped_text(traces: Sequence[RankTrace], taps: Sequence[str]) -> str:
    """That a command waits for stopped processes, and what continues each."""
    reported = [_blame(trace, traces, taps) for trace in waited_for(traces)]
    pids = [str(trace.vitals.pid) for trace in waited_for(traces) if trace.vitals.state == "stopped"]
    advice = f"; `kill -CONT {' '.join(pids)}` continues it" if pids else ""
    return "; ".join(reported) + advice


def divergence_text(traces: Sequence[RankTrace], taps: Sequence[str]) -> str:
    """Where two ranks have entered different collectives at the same count; "" where none have."""
    by_rank = [{one.collectives: one for one in trace.history if one.kind in COLLECTIVES} for trace in traces]
    first = traces[0]
    for trace, theirs in zip(traces[1:], by_rank[1:], strict=True):
        for number in sorted(by_rank[0].keys() & theirs.keys()):
            one, other = by_rank[0][number], theirs[number]
            if _identity(one) != _identity(other):
                return (
                    f"rank {trace.rank} and rank {first.rank} are out of step: collective {number} is "
                    f"{operation_text(other, taps)} (step {other.step}) on rank {trace.rank} and "
                    f"{operation_text(one, taps)} (step {one.step}) on rank {first.rank}"
                )
    return ""


def _identity(one: Note) -> tuple[OpKind, int, int]:
    """What must be equal on all ranks; a gather and a broadcast stand at no tap of their own."""
    placed = one.kind in (OpKind.ALL_REDUCE, OpKind.AGREEMENT)
    return one.kind, one.step, one.place if placed else 0


def _blame(trace: RankTrace, traces: Sequence[RankTrace], taps: Sequence[str]) -> str:
    """What one rank has not done that others wait for, and how its process is."""
    at = trace.latest
    ahead = [other for other in traces if other.latest.collectives > at.collectives]
    beside = [other for other in traces if other is not trace and other.latest.inside and other not in ahead]
    if ahead:
        what = f"has not entered {_missed(at.collectives + 1, ahead, taps)}"
        if trace.answered:
            what += ", and has answered: the ranks are out of step"
    elif at.inside:
        what = f"does not come out of {operation_text(at, taps)}"
        if beside:
            what += f", where {_ranks(beside, 'wait')} as well"
    elif at.kind is OpKind.IDLE:
        what = "has not begun the command"
    else:
        what = f"does not go on from {operation_text(at, taps)}, step {at.step}"
        if beside:
            what += f", while rank {beside[0].rank} waits in {operation_text(beside[0].latest, taps)}"
    return f"rank {trace.rank} {what}" + ("" if trace.answered else f": {trace.vitals.describe()}")


def _missed(number: int, ahead: Sequence[RankTrace], taps: Sequence[str]) -> str:
    """The collective of that number, and who is in it or was."""
    waiting = [other for other in ahead if other.latest.inside and other.latest.collectives == number]
    if waiting:
        return f"{operation_text(waiting[0].latest, taps)} that {_ranks(waiting, 'wait')} in"
    for other in ahead:
        for one in other.history:
            if one.kind in COLLECTIVES and one.collectives == number:
                return f"{operation_text(one, taps)} that rank {other.rank} has entered"
    return f"collective {number}, which rank {ahead[0].rank} has left long ago"


def _ranks(traces: Sequence[RankTrace], verb: str) -> str:
    """ "rank 0 waits", "rank 0, 1 wait"."""
    return f"rank {', '.join(str(one.rank) for one in traces)} {verb}{'s' if len(traces) == 1 else ''}"
