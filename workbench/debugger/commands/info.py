"""`info`: ranks, kv, blocks, weights, toggles, breakpoints, checkpoints, taps."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from lockstep.engine.faults.catalogue import DEFAULTS, FAULTS
from lockstep.engine.ranks.messages import ReadWeights
from lockstep.sessions.meta import WeightShare, is_companion
from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import Result, TableResult
from lockstep.workbench.debugger.core import registry
from lockstep.workbench.debugger.core.batch import batch_of, titled
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.motion import require_step
from lockstep.workbench.debugger.core.registry import Argument, Key, command
from lockstep.workbench.debugger.errors import CommandError, NotCaptured
from lockstep.workbench.views.cached_lengths import expected_rows, runs, span
from lockstep.workbench.views.rank_weights import WEIGHT_COLUMNS, shape_text


def ranks(debugger: Debugger) -> TableResult:
    """Where each rank stands; once one was lost, what each did last."""
    if debugger.lost_at and debugger.lost:
        done = [[rank, one] for rank, last in enumerate(debugger.lost_at) for one in last]
        return TableResult(debugger.lost, ["rank", "last operations"], done)
    at = debugger.position
    tap = "between steps" if at.place is None else debugger.timeline.places.names[at.place]
    pids: list[Any] = [None] * debugger.timeline.ranks
    standing: list[Any] = ["recorded"] * debugger.timeline.ranks
    if debugger.live:
        client = debugger.engine.inferior.client
        pids, standing = list(client.pids), client.standing()
    elif debugger.lost:
        standing = [debugger.lost] * debugger.timeline.ranks
    rows = [[rank, at.step, tap, pids[rank], standing[rank]] for rank in range(debugger.timeline.ranks)]
    return TableResult("", ["rank", "step", "at", "pid", "engine"], rows)


def kv(debugger: Debugger) -> TableResult:
    """Rows of the chosen sequence that each rank has cached, against its positions: neighbouring layers that hold as
    many are one line. Of the others those that are out of line."""
    at = require_step(debugger)
    step = min(at.step, debugger.timeline.last(at.branch))
    rows = []
    for reported in debugger.timeline.record(at.branch, step).sequences:
        expected = expected_rows(reported)
        for rank, lengths in enumerate(reported.kv_lens):
            for first, last, length in runs(lengths):
                if reported.seq != debugger.sequence and expected in (None, length):
                    continue
                layers = "all" if len(lengths) == last - first + 1 else span(first, last)
                fits = "" if expected in (None, length) else "MISALIGNED"
                rows.append([reported.seq, rank, layers, length, expected, fits])
    columns = ["sequence", "rank", "layers", "cached", "positions", ""]
    empty = batch_of(debugger).why_absent(debugger.sequence, step)
    return TableResult(titled(debugger, f"step {step}", debugger.sequence), columns, rows, empty=empty)


def blocks(debugger: Debugger) -> TableResult:
    """Block tables and what the pool has left."""
    at = require_step(debugger)
    step = min(at.step, debugger.timeline.last(at.branch))
    record = debugger.timeline.record(at.branch, step)
    rows = [
        [reported.seq, len(reported.block_table), " ".join(map(str, reported.block_table))]
        for reported in record.sequences
    ]
    known = record.used_blocks is not None and record.free_blocks is not None
    pool = (
        f"{record.used_blocks} blocks used, {record.free_blocks} free"
        if known
        else "the pool was not recorded"
    )
    title = f"step {step}: {pool}"
    return TableResult(title, ["sequence", "blocks", "table"], rows)


def weights(debugger: Debugger, glob: str) -> TableResult:
    """Every parameter's share on every rank, held against the checkpoint read anew: "equal", "different", or
    "absent" where the checkpoint has no such tensor. A live debugger keeps it in the session, by branch."""
    rows = [
        [s.name, s.rank, shape_text(s.shape), s.dtype, *s.statistics, s.checksum, s.checkpoint]
        for s in _weights(debugger)
        if fnmatchcase(s.name, glob)
    ]
    return TableResult("", WEIGHT_COLUMNS, rows, empty=f"no parameter is called {clean(glob, limit=60)}")


def _weights(debugger: Debugger) -> tuple[WeightShare, ...]:
    branch = debugger.position.branch
    if debugger.live:
        shares = _on_ranks(debugger, branch)
        _keep(debugger, branch, shares)
        return shares
    if branch not in debugger.session.meta.weights:
        raise NotCaptured(
            f"the weights were not looked at while branch {branch} ran: `info weights` in the live run keeps them"
        )
    return debugger.session.meta.weights[branch]


def _on_ranks(debugger: Debugger, branch: int) -> tuple[WeightShare, ...]:
    engine, rules = debugger.engine, debugger.timeline.line(branch).rules
    if engine.inferior.rules != rules:  # the ranks still stand under those of another branch
        engine.stand_under(branch, max(debugger.position.step, 0))
    reports = engine.inferior.client.call(ReadWeights(compare=True), timeout=None)
    shares = [
        WeightShare(
            name, rank, tuple(held.shape), held.dtype, tuple(held.stats), f"{held.checksum:016x}", held.comparison
        )
        for rank, report in enumerate(reports)
        for name, held in report.weights.items()
    ]  # fmt: skip
    return tuple(sorted(shares, key=lambda share: (share.name, share.rank)))


def _keep(debugger: Debugger, branch: int, shares: tuple[WeightShare, ...]) -> None:
    inferior = debugger.engine.inferior
    debugger.session.refresh()
    kept = {**debugger.session.meta.weights, branch: shares}
    inferior.recorder.write(lambda writer: writer.set_meta(weights=kept))


def taps(debugger: Debugger, glob: str) -> TableResult:
    """Every tap and its layout."""
    rows = [
        [t.index, t.name, t.layout]
        for t in debugger.session.taps
        if fnmatchcase(t.name, glob) and not is_companion(t.name)
    ]
    return TableResult(
        "", ["place", "tap", "layout"], rows, empty=f"no tap is called {clean(glob, limit=60)}"
    )


def toggles(debugger: Debugger) -> TableResult:
    """Every fault, what is now, what it could be, what that costs."""
    rules = debugger.timeline.line(debugger.position.branch).rules
    inferior = debugger.executor.inferior if debugger.executor is not None else None
    rows = []
    for fault in FAULTS:
        reason = fault.needs(inferior.model, inferior.config.tp) if inferior else registry.REPLAY_REASON
        now = rules.get(fault.seam, DEFAULTS[fault.seam])
        rows.append([fault.seam, fault.value, now, now == fault.value, fault.level, fault.title, reason])
    return TableResult("", ["fault", "value", "now", "on", "level", "what it does", "greyed"], rows)


def breakpoints(debugger: Debugger) -> TableResult:
    """What stops the run, and how often it has."""
    rows = [
        [one.id, one.kind, one.what, one.condition or None, one.rank, one.enabled, one.ignore, one.hits,
         "; ".join(one.commands) or None]
        for one in debugger.breakpoints
    ]  # fmt: skip
    columns = ["number", "kind", "what", "condition", "rank", "enabled", "ignore", "hits", "commands"]
    if batch_of(debugger).several:  # whose position, token and kv_len a condition means
        columns.insert(4, "sequence")
        for row, one in zip(rows, debugger.breakpoints, strict=True):
            row.insert(4, one.seq if one.condition else None)
    return TableResult("", columns, rows, empty="no breakpoints: `break`, `watch` and `catch` make them")


def checkpoints(debugger: Debugger) -> TableResult:
    """Positions to come back to."""
    rows = [
        [one.id, debugger.timeline.places.describe(one.position), clean(one.note)]
        for one in debugger.checkpoints
    ]
    return TableResult(
        "", ["checkpoint", "where", "note"], rows, empty="no checkpoints: `checkpoint` makes one"
    )


_SUBJECTS: dict[str, Callable[[Debugger], TableResult]] = {
    "ranks": ranks,
    "kv": kv,
    "blocks": blocks,
    "toggles": toggles,
    "breakpoints": breakpoints,
    "checkpoints": checkpoints,
}
#: Long tables, which a glob makes shorter.
_LISTS: dict[str, Callable[[Debugger, str], TableResult]] = {"weights": weights, "taps": taps}


@command(
    "info", "i", arguments=(
        Argument("subject", "word", required=True, choices=(*_SUBJECTS, *_LISTS)),
        Argument("glob", "word", help="of weights and taps: which of them"),
    ),
    group="inspection", key=Key("B", "list the breakpoints", line="info breakpoints"),
    help="ranks, kv, blocks, toggles, breakpoints, checkpoints, weights, taps",
    details="`info weights *.layers.0.self_attn.*.bias`",
)  # fmt: skip
def info(debugger: Debugger, subject: str, glob: str | None) -> Result:
    """A table of a subject."""
    if subject in _LISTS:
        return _LISTS[subject](debugger, glob or "*")
    if glob is not None:
        raise CommandError(f"info {subject} takes no glob: only {' and '.join(_LISTS)} do")
    return _SUBJECTS[subject](debugger)
