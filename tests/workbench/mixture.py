"""A session made by hand of a mixture of experts on two ranks, with choices that are wrong in known ways."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.sessions import SessionWriter
from lockstep.sessions.meta import ConfigMeta, ModelMeta, SessionMeta
from lockstep.sessions.records import SequenceStep, StepRecord, Tap, TensorRecord

EXPERTS, RANKS = 8, 2
#: Layer 0's experts of each of six tokens; the fourth has one twice, the fifth an id of no expert.
IDS = np.array([[0, 3], [1, 3], [3, 6], [2, 2], [0, 8], [3, 7]])
WEIGHTS = np.array([[0.7, 0.3], [0.4, 0.6], [0.5, 0.5], [0.5, 0.5], [0.9, 0.1], [np.nan, 0.2]], np.float32)
LOGITS = np.random.default_rng(3).normal(0, 1, (len(IDS), EXPERTS)).astype(np.float32)
#: What the tokens of one more sequence chose in the same step.
OTHER_IDS = np.array([[4, 5], [3, 4]])


def build_mixture(path: Path, *, placed: str = "shard(2,groups=2)", batch: bool = False) -> Path:
    """One step; layer 0 has experts and layer 1 is dense. `placed`: how the experts lie on the ranks."""
    names = ("mlp.router", "mlp.topk_ids", "mlp.topk_weights")
    layouts = {f"layers.0.{name}": "replicate" for name in names}
    layouts |= {"layers.0.mlp.experts.up": placed, "layers.1.mlp.up": "shard(1)"}
    taps = [Tap(i, name, layout) for i, (name, layout) in enumerate(layouts.items())]
    meta = SessionMeta(
        model=ModelMeta(name="Mixture", num_layers=2),
        config=ConfigMeta(device="cpu", dtype="float32", tp=RANKS),
        token_texts={i: f" t{i}" for i in range(10)},
    )
    sequences = [_sequence(0, len(IDS)), *([_sequence(1, len(OTHER_IDS))] if batch else [])]
    reported = {0: (LOGITS, IDS, WEIGHTS)}
    if batch:
        reported[1] = LOGITS[: len(OTHER_IDS)], OTHER_IDS, np.full(OTHER_IDS.shape, 0.5, np.float32)
    tensors = [
        TensorRecord(f"layers.0.{name}", rank, seq, array, str(array.dtype))
        for seq, arrays in reported.items()
        for name, array in zip(names, arrays, strict=True)
        for rank in range(RANKS)
    ]
    with SessionWriter.create(path, taps=taps, ranks=RANKS, meta=meta) as writer:
        stats = np.zeros((len(taps), RANKS, 8), np.float32)
        writer.step(0, StepRecord(0, "prefill", sequences, 0.1, stats=stats, tensors=tensors))
    return path


def _sequence(seq: int, tokens: int) -> SequenceStep:
    return SequenceStep(seq, list(range(tokens)), list(range(tokens)), [[tokens] * 2] * RANKS, emitted=9)
