"""Recordings of runs, one file each. Functions on whole sessions are in the modules of their names: `sessions.diff`,
`verify`, `compact`, `metrics`. Needs numpy, zstandard and msgspec; knows neither engine nor workbench."""

from sessions.diff import Absent, Diff, TapDiff
from sessions.errors import IdsMismatch, LayoutError, SessionError, SessionWriteError
from sessions.layouts import Layout, Rebuilt, rebuild
from sessions.meta import ModelMeta, SequenceMeta, SessionMeta
from sessions.metrics import Metrics
from sessions.records import (
    JSON,
    STATISTICS,
    Branch,
    Event,
    SequenceStep,
    StepRecord,
    Tap,
    TensorKey,
    TensorRecord,
    Verdict,
)
from sessions.session import Session
from sessions.text import clean
from sessions.writer import SessionWriter

__all__ = [
    "JSON",
    "STATISTICS",
    "Absent",
    "Branch",
    "Diff",
    "Event",
    "IdsMismatch",
    "Layout",
    "LayoutError",
    "Metrics",
    "ModelMeta",
    "Rebuilt",
    "SequenceMeta",
    "SequenceStep",
    "Session",
    "SessionError",
    "SessionMeta",
    "SessionWriteError",
    "SessionWriter",
    "StepRecord",
    "Tap",
    "TapDiff",
    "TensorKey",
    "TensorRecord",
    "Verdict",
    "clean",
    "rebuild",
]
