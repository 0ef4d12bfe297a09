"""Rows of the file as records. SQLite stores any type in any column, so every value's type is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lockstep.sessions.errors import broken, damaged
from lockstep.sessions.format import blobs, codec
from lockstep.sessions.format.json_text import json_bytes, parse_json
from lockstep.sessions.format.rows import Row
from lockstep.sessions.layouts import parse as parse_layout
from lockstep.sessions.limits import RECORD_BYTES, Charged, ReadMeter
from lockstep.sessions.records import (
    MAX_LAYERS,
    STATISTICS,
    Branch,
    Event,
    SequenceStep,
    StepRecord,
    Tap,
    TensorKey,
    VerdictRecord,
)

T = TypeVar("T")

MAX_RANKS = 1024

#: About what an integer takes in a list: itself, its place, and both as numpy has them meanwhile.
_INTEGER_BYTES = 64


def records(read: Callable[[Row], T], rows: Sequence[Row], what: str, meter: ReadMeter) -> Charged[T]:
    """Rows as records; the last column of each is JSON."""
    nbytes = sum(RECORD_BYTES + json_bytes(row[-1]) for row in rows)
    meter.room(nbytes, f"the list of {len(rows)} {what}")
    return meter.charged(map(read, rows), nbytes)


def text(value: object, where: str) -> str:
    """A string, or the session is broken."""
    if not isinstance(value, str):
        raise broken(where, f"expected text, found {type(value).__name__}")
    return value


def integer(value: object, where: str) -> int:
    """An integer, or the session is broken."""
    if not isinstance(value, int):
        raise broken(where, f"expected an integer, found {type(value).__name__}")
    return value


def maybe_integer(value: object, where: str) -> int | None:
    """An integer or nothing."""
    return None if value is None else integer(value, where)


def real(value: object, where: str) -> float:
    """A number; NaN is stored as the text "nan" because SQLite has none."""
    if value == "nan":
        return float("nan")
    if not isinstance(value, (int, float)):
        raise broken(where, f"expected a number, found {type(value).__name__}")
    return float(value)


def maybe_real(value: object, where: str) -> float | None:
    """A number or nothing."""
    return None if value is None else real(value, where)


def ranks(value: object, taps: int) -> int:
    """meta["ranks"], and with it the size of a step's arrays, within reason."""
    if type(value) is not int or not 1 <= value <= MAX_RANKS:
        raise broken('meta "ranks"', f"{str(value)[:40]} is not between 1 and {MAX_RANKS}")
    if taps * value * len(STATISTICS) * 4 > codec.MAX_STEP_BYTES:
        raise broken('meta "ranks"', f"{taps} taps on {value} ranks are more than a step may have")
    return value


def taps(found: Sequence[Row]) -> tuple[Tap, ...]:
    """The taps, whose ids must count up from 0 and whose layouts must parse."""
    if [row[0] for row in found] != list(range(len(found))):
        raise broken("taps", "their ids do not count up from 0")
    result = tuple(Tap(index, text(name, "taps"), text(layout, "taps")) for index, name, layout in found)
    for tap in result:
        parse_layout(tap.layout)
    if len({tap.name for tap in result}) != len(result):
        raise broken("taps", "a name occurs twice")
    return result


def branch(row: Row) -> Branch:
    """A row of `branches`."""
    identity, name, parent, fork_step, rules = row
    where = f"branch {identity}"
    parsed = parse_json(rules, where)
    if not isinstance(parsed, dict):
        raise broken(where, "its rules are no JSON object")
    return Branch(
        integer(identity, where),
        text(name, where),
        maybe_integer(parent, where),
        integer(fork_step, where),
        {key: str(value) for key, value in parsed.items()},
    )


def step_record(
    step: int, owner: int, heads: Sequence[Row], found: Sequence[Row], ranks: int, meter: ReadMeter
) -> StepRecord:
    """The one row of `steps` and its rows of `sequences`, without arrays."""
    where = f"step {step} of branch {owner}"
    if len(heads) != 1:
        raise damaged(where, "its row is missing")
    _, _, phase, wall, free, used, dropped, _, sequences, _ = heads[0]
    if sequences not in (None, len(set(found))):
        raise damaged(where, f"{len(set(found))} of {sequences} sequences are there")
    meter.room(json_bytes(dropped), where)
    words = parse_json(dropped, where)
    if not isinstance(words, list):
        raise broken(where, "`dropped` is no JSON list")
    return StepRecord(
        step=step,
        phase=text(phase, where),
        sequences=tuple(sequence_step(row, where, ranks, meter) for row in found),
        wall_seconds=real(wall, where),
        free_blocks=maybe_integer(free, where),
        used_blocks=maybe_integer(used, where),
        dropped=tuple(text(word, where) for word in words),
    )


def record_bytes(record: StepRecord) -> int:
    """About what a step's record takes."""
    lists = [
        (one.ids, one.positions, one.block_table, one.topk_ids, one.topk_logits, *one.kv_lens)
        for one in record.sequences
    ]
    return RECORD_BYTES + sum(RECORD_BYTES + _INTEGER_BYTES * sum(map(len, several)) for several in lists)


def sequence_step(row: Row, where: str, ranks: int, meter: ReadMeter) -> SequenceStep:
    """A row of `sequences`."""
    _, _, seq, ids, positions, kv_lens, blocks, emitted, forced, topk_ids, topk_logits, logsumexp, entropy = (
        row
    )
    lists = (ids, positions, kv_lens, blocks, topk_ids, topk_logits)
    nbytes = RECORD_BYTES + _INTEGER_BYTES * sum(codec.list_length(data, where) for data in lists)
    meter.room(nbytes, f"the lists of {where}")
    record = SequenceStep(
        seq=integer(seq, where),
        ids=codec.decode_ints(ids, where),
        positions=codec.decode_ints(positions, where),
        kv_lens=_lengths(kv_lens, where, ranks),
        block_table=codec.decode_ints(blocks, where),
        emitted=maybe_integer(emitted, where),
        forced=bool(integer(forced, where)),
        topk_ids=codec.decode_ints(topk_ids, where),
        topk_logits=codec.decode_floats(topk_logits, where),
        logsumexp=maybe_real(logsumexp, where),
        entropy=maybe_real(entropy, where),
    )
    meter.keep(record, nbytes)
    return record


def _lengths(data: object, where: str, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Cached lengths [ranks][layers]: as many for each rank, and no more layers than a model may have."""
    flat = codec.decode_ints(data, where, ranks * MAX_LAYERS)
    layers, rest = divmod(len(flat), ranks)
    if rest:
        raise broken(where, f"{len(flat)} cached lengths are not equally many for each of {ranks} ranks")
    return tuple(flat[rank * layers : (rank + 1) * layers] for rank in range(ranks)) if layers else ()


def tensor_key(step: int, row: Row, known: Sequence[Tap], ranks: int) -> TensorKey:
    """A row of `tensors` with its blob's dtype and shape."""
    tap, rank, seq, part, dtype, shape = row
    where = f"tensors of step {step}"
    if not 0 <= integer(tap, where) < len(known):
        raise broken(where, f"no tap {tap}")
    if not 0 <= integer(rank, where) < ranks:
        raise broken(where, f"no rank {rank}")
    _, dims = blobs.parse_shape(shape, dtype, where)
    return TensorKey(known[tap].name, step, rank, integer(seq, where), text(part, where), dtype, dims)


def event(row: Row) -> Event:
    """A row of `events`."""
    identity, on, step, kind, words, data = row
    where = f"event {identity}"
    return Event(
        integer(identity, where),
        integer(on, where),
        integer(step, where),
        text(kind, where),
        text(words, where),
        parse_json(data, where),
    )


def verdict(row: Row) -> VerdictRecord:
    """A row of `verdicts`."""
    on, step, tap, word, detail = row
    where = f"verdict on step {step}"
    return VerdictRecord(
        integer(on, where),
        integer(step, where),
        text(tap, where),
        text(word, where),
        parse_json(detail, where),
    )
