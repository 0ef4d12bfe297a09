"""Engines made of numbers: sessions cut from a reference and spoilt on purpose.

engine = synthetic(path, case.floor, tp=2, spoil={"layers.1.attn.q_proj": lambda x, at: x - bias})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from lockstep.engine.taps.names import tap_specs
from lockstep.sessions import SequenceStep, Session, SessionWriter, StepRecord, Tap, TensorRecord
from lockstep.sessions.layouts import cut
from lockstep.sessions.meta import ConfigMeta, ForeignMeta, SamplingMeta, SequenceMeta, SessionMeta
from lockstep.workbench.references.golden import forced_onto
from lockstep.workbench.references.request import GoldenRequest, GoldenSequence
from lockstep.workbench.references.transformers_recorder import record
from tests.checkpoints import tiny_checkpoint

STEPS = 2


@dataclass(frozen=True)
class Place:
    """Where a tensor stands that is to be spoilt."""

    step: int
    seq: int


#: Changes one whole tensor, or gives each rank's part by itself (a dict by rank).
Spoil = Callable[[np.ndarray, Place], Any]


@dataclass(frozen=True)
class Case:
    """A tiny model, its truth (float64) and its floor (float32), two sequences, a prefill and two decode steps."""

    model_dir: Path
    golden: Session
    floor: Session


def tiny_case(
    root: Path,
    family: str = "qwen2",
    edit: Callable[[dict[str, Any]], None] = lambda weights: None,
    **overrides: Any,
) -> Case:
    """Record both references of a tiny random checkpoint, its weights first changed by `edit`."""
    model_dir = tiny_checkpoint(root, family, **overrides)
    weights = load_file(model_dir / "model.safetensors")
    edit(weights)
    save_file(weights, model_dir / "model.safetensors", {"format": "pt"})
    sequences = (GoldenSequence(tuple(range(3, 15))), GoldenSequence((40, 41, 42, 50, 51)))
    record(GoldenRequest(str(model_dir), sequences, STEPS, "float32"), root / "floor.session")
    forced = forced_onto(root / "floor.session")
    record(GoldenRequest(str(model_dir), forced, STEPS, "float64"), root / "golden.session")
    return Case(model_dir, Session.open(root / "golden.session"), Session.open(root / "floor.session"))


def synthetic(
    path: Path,
    source: Session,
    *,
    tp: int = 1,
    kv_replicas: int = 1,
    spoil: Mapping[str, Spoil] | None = None,
    change: Callable[[SequenceStep], SequenceStep] = lambda sequence: sequence,
    skip: Callable[[str], bool] = lambda tap: False,
    foreign: ForeignMeta | None = None,
) -> Session:
    """A session of `tp` ranks that holds `source`'s tensors in float32, cut by each tap's layout.

    `spoil[tap]` replaces a tap's tensor at every step and sequence; `skip` leaves taps out.
    """
    layers = source.meta.model.num_layers
    assert layers is not None
    specs = tap_specs(layers, {"qk_norm"} if source.has_tap("layers.0.attn.q_norm") else (), kv_replicas)
    taps = [Tap(i, spec.name, str(spec.layout)) for i, spec in enumerate(specs)]
    meta = SessionMeta(
        config=ConfigMeta(dtype="float32"),
        sequences={seq: SequenceMeta(sampling=SamplingMeta()) for seq in range(2)},
        absent=source.meta.absent,
        source=source.meta.source,
        foreign=foreign,
    )
    with SessionWriter.create(path, taps=taps, ranks=tp, meta=meta, overwrite=True) as writer:
        for step in source.steps():
            known = source.step(step)
            tensors = [
                TensorRecord(tap.name, rank, sequence.seq, np.ascontiguousarray(part, np.float32), "float32")
                for tap in taps
                for sequence in known.sequences
                if not skip(tap.name) and not tap.name.endswith(".partial")
                for rank, part in _parts(source, tap, Place(step, sequence.seq), tp, spoil or {}).items()
            ]
            sequences = [
                change(replace(sequence, kv_lens=[*sequence.kv_lens] * tp)) for sequence in known.sequences
            ]
            writer.step(0, StepRecord(step, known.phase, sequences, 0.0, tensors=tensors))
    return Session.open(path)


@cache
def _whole(source: Session, tap: str, place: Place) -> np.ndarray:
    """Decoded once for all the engines that are cut from a source; not to be written to."""
    whole = source.rebuilt(tap, step=place.step, seq=place.seq).array
    assert whole is not None, tap
    whole.flags.writeable = False
    return whole


def _parts(source: Session, tap: Tap, place: Place, tp: int, spoil: Mapping[str, Spoil]) -> dict[int, Any]:
    whole = _whole(source, tap.name, place)
    if tap.name in spoil:
        whole = spoil[tap.name](whole.astype(np.float64), place)
        if isinstance(whole, dict):
            return whole
    sizes = None
    if tap.name == "logits":  # the vocabulary need not divide
        edges = [whole.shape[1] * rank // tp for rank in range(tp + 1)]
        sizes = [stop - start for start, stop in pairwise(edges)]
    return dict(cut(tap.layout, whole, tp, sizes))


def halves(whole: np.ndarray, dim: int, spoil: Callable[[np.ndarray], np.ndarray]) -> dict[int, np.ndarray]:
    """Two ranks' parts along `dim`, rank 1's spoilt."""
    first, second = np.split(whole, 2, axis=dim)
    return {0: first, 1: spoil(second)}
