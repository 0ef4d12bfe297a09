"""The recording: one file a session. Needs numpy, zstandard and msgspec; knows neither engine nor workbench."""

from sessions.compact import pack
from sessions.diff import Absent, Diff, TapDiff, diff
from sessions.errors import IdsMismatch, LayoutError, SessionError, SessionWriteError
from sessions.layouts import Layout, Rebuilt, rebuild
from sessions.meta import ModelMeta, SequenceMeta, SessionMeta
from sessions.metrics import Metrics, metrics
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
from sessions.verify import verify
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
    "diff",
    "metrics",
    "pack",
    "rebuild",
    "verify",
]
