"""Small deterministic sessions to write. Light: processes that are killed in the tests import it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from sessions import STATISTICS, SequenceStep, SessionMeta, SessionWriter, StepRecord, Tap, TensorRecord

TAPS = (
    Tap(0, "embed", "replicate"),
    Tap(1, "layers.0.attn.q_proj", "shard(1)"),
    Tap(2, "layers.0.attn.o_proj.partial", "partial"),
)


def write(path: Path, steps: int, **options: Any) -> Path:
    """A finished session of `steps` steps on two ranks."""
    with create(path) as writer:
        for step in range(steps):
            writer.step(0, record(step, **options))
    return path


def create(path: Path, taps: tuple[Tap, ...] = TAPS, ranks: int = 2, **meta: Any) -> SessionWriter:
    return SessionWriter.create(path, taps=taps, ranks=ranks, meta=SessionMeta(**meta))


def put_meta(path: Path, **rows: object) -> None:
    """Write rows of the meta table as a stranger might: any key, any JSON."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)",
            [(key, json.dumps(value)) for key, value in rows.items()],
        )


def record(step: int, *, arrays: bool = True, tensors: bool = True, ranks: int = 2) -> StepRecord:
    """A step whose every number is a function of the step."""
    rng = np.random.default_rng(step)
    return StepRecord(
        step=step,
        phase="decode" if step else "prefill",
        sequences=[sequence(step, ranks=ranks)],
        wall_seconds=0.5,
        stats=rng.normal(size=(len(TAPS), ranks, len(STATISTICS))).astype(np.float32) if arrays else None,
        checksums=rng.integers(2**64, size=(len(TAPS), ranks), dtype=np.uint64) if arrays else None,
        tensors=[
            TensorRecord("embed", rank, 0, np.full((2, 3), step, np.float32), "float32")
            for rank in range(ranks)
        ]
        if tensors
        else [],
    )


def sequence(step: int, ids: tuple[int, ...] | None = None, ranks: int = 2) -> SequenceStep:
    lengths = ((step + 1,) * 3,) * ranks
    return SequenceStep(0, ids or (step,), (step,), lengths, tuple(range(step // 4 + 1)), emitted=step + 1)
