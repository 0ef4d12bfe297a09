"""Sessions of earlier versions, converted while they are read. The file is not changed.

Version 1 (Lockstep 0.1) had a meta that each recorder wrote in its own way: the engine `model_name`, `model_path`,
`checkpoint`, `dtype`, `device`, `tp` and `backend` beside `model` and `config`; transformers the model's name as
`model`, its Hugging Face configuration as `config`, and `sequences` as a list. `kv_lens` could have one length a
rank, for all of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lockstep.sessions.meta import HUGGING_FACE
from lockstep.sessions.records import JSON, SequenceStep, StepRecord

_MODEL = {"model_name": "name", "model_path": "path", "checkpoint": "checkpoint"}
_CONFIG = ("tp", "dtype", "device", "backend")
_SHAPE, _FIGURES = 2, slice(4, 12)  # of a row of `weights`


def meta(old: Mapping[str, JSON]) -> dict[str, JSON]:
    """The meta table of version 1 in the present form; what is malformed is left as it is, or left out."""
    now = dict(old)
    model, config = old.get("model"), old.get("config")
    if isinstance(config, dict) and "num_hidden_layers" in config:
        name = {"name": model} if isinstance(model, str) else {}
        model = name | {ours: config[theirs] for theirs, ours in HUGGING_FACE.items() if theirs in config}
        config = {}
    elif isinstance(model, str):
        model = {"name": model}
    now["model"] = _object(model) | {_MODEL[key]: old[key] for key in _MODEL if old.get(key)}
    now["config"] = _object(config) | {key: old[key] for key in _CONFIG if old.get(key)}
    if old.get("prompts") is None:
        now.pop("prompts", None)
    if isinstance(sequences := old.get("sequences"), list):
        now["sequences"] = {str(seq): _sequence(one) for seq, one in enumerate(sequences)}
    if isinstance(weights := old.get("weights"), dict):
        now["weights"] = {branch: _weights(rows) for branch, rows in weights.items()}
    now["notes"] = [old[key] for key in ("attention", "batching") if old.get(key)]
    return now


def step_record(record: StepRecord, layers: int | None) -> StepRecord:
    """The record with cached lengths for each of the model's `layers` (None: not known)."""
    return replace(record, sequences=tuple(_with_layers(one, layers or 1) for one in record.sequences))


def _with_layers(sequence: SequenceStep, layers: int) -> SequenceStep:
    if any(len(of_rank) != 1 for of_rank in sequence.kv_lens):
        return sequence
    return replace(sequence, kv_lens=tuple(tuple(of_rank) * layers for of_rank in sequence.kv_lens))


def _object(value: JSON) -> dict[str, JSON]:
    return value if isinstance(value, dict) else {}


def _sequence(one: JSON) -> JSON:
    if not isinstance(one, dict):
        return one
    return {"prompt_ids": one.get("prompt", []), "forced": one.get("forced")}


def _weights(rows: JSON) -> JSON:
    """A row was flat: name, rank, shape as "2003×256", dtype, eight statistics (NaN and Inf as words), checksum,
    comparison."""
    return [_share(row) for row in rows] if isinstance(rows, list) else rows


def _share(row: JSON) -> JSON:
    if not isinstance(row, list) or len(row) != 14 or not isinstance(row[_SHAPE], str):
        return row
    try:
        shape = [int(size) for size in row[_SHAPE].split("×") if size]
        figures = [float(value) for value in row[_FIGURES]]
    except (TypeError, ValueError, OverflowError):
        return row
    return [*row[:_SHAPE], shape, row[3], figures, *row[12:]]
