"""Recordings of runs, one file each. Functions on whole sessions are in the modules of their names: `sessions.diff`,
`verify`, `compact`, `metrics`. Needs numpy, zstd and msgspec; knows neither engine nor workbench."""

from lockstep.sessions.diff import Absent, Diff, TapDiff
from lockstep.sessions.errors import IdsMismatch, LayoutError, SessionError, SessionWriteError
from lockstep.sessions.layouts import Layout, Rebuilt, rebuild
from lockstep.sessions.meta import ModelMeta, SequenceMeta, SessionMeta
from lockstep.sessions.metrics import Metrics
from lockstep.sessions.records import (
    JSON,
    STATISTICS,
    Branch,
    Event,
    SequenceStep,
    StepRecord,
    Tap,
    TensorKey,
    TensorRecord,
    VerdictRecord,
)
from lockstep.sessions.session import Session
from lockstep.sessions.text import clean
from lockstep.sessions.writer import SessionWriter

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
    "VerdictRecord",
    "clean",
    "rebuild",
]
