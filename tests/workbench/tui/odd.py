"""Sessions whose figures break: a last step full of NaN or of Inf, a text of one token, a branch without steps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from lockstep.engine.taps.names import layer_of, local_name, tap_specs
from lockstep.sessions import SessionWriter
from lockstep.sessions.meta import ConfigMeta, ModelMeta, SessionMeta
from lockstep.sessions.records import SequenceStep, StepRecord, Tap, TensorRecord, VerdictRecord
from tests.workbench.tui.synthetic import TEXTS

ODD = ("nan", "inf", "one token", "empty branch")
_LAYERS, _RANKS, _HEAD_DIM = 2, 2, 4
_PROMPT = [1, 2, 3]


def build_odd(path: Path, kind: str) -> Path:
    """A session of two layers on two ranks of which the last step (or the second branch) is `kind` of `ODD`."""
    specs = tap_specs(_LAYERS)
    taps = [Tap(i, spec.name, str(spec.layout)) for i, spec in enumerate(specs)]
    model = ModelMeta(
        name="Odd", num_layers=_LAYERS, num_heads=4, num_kv_heads=2, head_dim=_HEAD_DIM, hidden_size=16
    )
    meta = SessionMeta(
        model=model,
        config=ConfigMeta(device="cpu", dtype="float32", block_size=4, tp=_RANKS),
        token_texts=TEXTS,
    )
    with SessionWriter.create(path, taps=taps, ranks=_RANKS, meta=meta) as writer:
        if kind == "one token":
            writer.step(0, _step(taps, 0, [1], 1, 0.5))
            return path
        writer.step(0, _step(taps, 0, _PROMPT, len(_PROMPT), 0.5))
        if kind == "empty branch":
            writer.branch("unfinished", parent=0, fork_step=0)
            return path
        value = math.nan if kind == "nan" else math.inf
        writer.step(0, _step(taps, 1, [9], len(_PROMPT) + 1, value))
        row = {"ids": [9, 5, 11], "logits": [None] * 3, "logsumexp": None, "entropy": None}
        rows = [
            {"tap": tap.name, **row}
            for tap in taps
            if tap.name == "embed" or tap.name.endswith("mlp_residual")
        ]
        writer.event(0, 1, "lens", "logit lens", {"seq": 0, "layers": rows, "golden": None})
        figures = {"rel_l2": None, "max_abs": None, "reason": "the engine's value holds NaN"}
        writer.verdicts(
            [VerdictRecord(0, 1, tap.name, "fail", dict(figures, inherited=tap.index > 0)) for tap in taps]
        )
    return path


def _step(taps: list[Tap], step: int, ids: list[int], known: int, value: float) -> StepRecord:
    """A step whose every value is `value`."""
    finite = math.isfinite(value)
    logits = [3.0, 2.0, -9.0] if finite else [value] * 3
    sequence = SequenceStep(
        0, ids, list(range(known - len(ids), known)), [[known] * _LAYERS] * _RANKS,
        block_table=[0], emitted=9, topk_ids=[9, 10, 11], topk_logits=logits,
        logsumexp=3.5 if finite else value, entropy=0.7 if finite else math.nan,
    )  # fmt: skip
    stats = np.zeros((len(taps), _RANKS, 8), np.float32)
    stats[..., :5] = value
    stats[..., 5], stats[..., 6] = 16 * math.isnan(value), 16 * math.isinf(value)
    checksums = np.full((len(taps), _RANKS), 7, np.uint64)
    tensors = [
        one for tap in taps for rank in range(_RANKS) for one in _tensors(tap, rank, len(ids), known, value)
    ]
    return StepRecord(
        step, "decode" if step else "prefill", [sequence], 0.1, stats, checksums, tensors, free_blocks=7,
        used_blocks=1,
    )  # fmt: skip


def _tensors(tap: Tap, rank: int, queries: int, known: int, value: float) -> list[TensorRecord]:
    """Attention and cache of a layer on one rank."""
    name = local_name(tap.name)
    if layer_of(tap.name) is None or name not in ("attn.probs", "attn.k_cache", "attn.v_cache"):
        return []
    finite = math.isfinite(value)
    if name == "attn.probs":
        values = np.tril(np.ones((2, queries, known), np.float32), known - queries)
        array = values / values.sum(-1, keepdims=True) if finite else np.full_like(values, value)
    else:
        array = np.full((known, 1, _HEAD_DIM), value, np.float32)
        array += np.arange(known, dtype=np.float32)[:, None, None]
    return [TensorRecord(tap.name, rank, 0, array.astype(np.float32), "float32")]
