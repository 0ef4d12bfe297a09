"""Sessions made for the export's tests: two ranks, two layers, whatever goes wrong on demand, hostile words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.sessions import (
    STATISTICS,
    SequenceStep,
    SessionWriter,
    StepRecord,
    Tap,
    TensorRecord,
    VerdictRecord,
)
from lockstep.sessions.meta import ConfigMeta, ModelMeta, SessionMeta
from tests.sessions.samples import put_meta

NAMES = (
    "embed",
    *(f"layers.{i}.{name}" for i in range(2) for name in ("attn.q_proj", "attn.probs", "mlp_residual")),
    "logits",
)
LAYOUTS = {"embed": "replicate", "mlp_residual": "replicate", "q_proj": "shard(1)", "probs": "shard(0)"}
TAPS = [Tap(i, name, LAYOUTS.get(name.rsplit(".", 1)[-1], "shard(1)")) for i, name in enumerate(NAMES)]
PROMPT = [1, 2, 3]
HEADS = 4

#: What a stranger may have written: markup, code, escapes, direction overrides, Rich markup, template syntax.
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=http://evil.example/x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "\x1b[31mred\x1b]8;;http://evil.example\x07link",
    "\u202eevil\u2066",
    "[bold]markup[/bold]",
    "{{ 7 * 7 }}{% raw %}",
    "a\0b\x85c\ud800",
    "=cmd|' /C calc'!A0",
    "' onmouseover='alert(1)",
    "]]><!--",
)

#: Changes a step's record before it is written.
Change = Callable[[int, np.ndarray, np.ndarray, dict[str, Any]], None]


def unchanged(step: int, stats: np.ndarray, sums: np.ndarray, sequence: dict[str, Any]) -> None:
    """A healthy step."""


def probabilities(step: int) -> np.ndarray:
    """[heads, queries, keys] of a step: key k gets a weight of its own, softmax over what the mask allows."""
    known = len(PROMPT) + step
    queries = known if step == 0 else 1
    weights = np.exp(np.cos(np.arange(HEADS)[:, None, None] + np.arange(known)[None, None, :] * 1.7))
    allowed = np.tril(np.ones((queries, known)), known - queries)
    weights = weights * allowed
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def record(step: int, token: int, change: Change, *, tensors: bool = True) -> StepRecord:
    """One step that emits `token`."""
    known = len(PROMPT) + step
    stats = np.zeros((len(TAPS), 2, len(STATISTICS)), np.float32)
    stats[..., STATISTICS.index("rms")] = 1 + 0.01 * step + np.arange(len(TAPS))[:, None] / 10
    sums = np.full((len(TAPS), 2), 7 + step, np.uint64)
    sequence = {
        "seq": 0,
        "ids": PROMPT if step == 0 else [token],
        "positions": list(range(known)) if step == 0 else [known - 1],
        "kv_lens": [[known] * 2, [known] * 2],
        "emitted": token,
        "topk_ids": [token, 50, 51],
        "topk_logits": [4.0, 2.0, 1.0],
        "logsumexp": 4.2,
        "entropy": 0.4,
    }
    change(step, stats, sums, sequence)
    probs = probabilities(step)
    halves = [
        TensorRecord(f"layers.{layer}.attn.probs", rank, 0, probs[rank * 2 : rank * 2 + 2], "float32")
        for layer in range(2)
        for rank in range(2)
    ]
    return StepRecord(
        step, "decode" if step else "prefill", [SequenceStep(**sequence)], 0.01, stats, sums,
        halves if tensors else (),
    )  # fmt: skip


def build(
    path: Path,
    tokens: Sequence[int] = (10, 11, 12, 13, 14),
    *,
    change: Change = unchanged,
    meta: Mapping[str, Any] | None = None,
    other: Sequence[int] = (),
    fork: int = 2,
    tensors: bool = True,
) -> Path:
    """A session that emits `tokens`; a branch "load_bias=false" emits `other` from step `fork` on. `meta` are
    rows of the meta table as a stranger might write them."""
    known = SessionMeta(
        model=ModelMeta(name="Tiny", num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=16, head_dim=4),
        config=ConfigMeta(device="cpu", dtype="float32"),
        token_texts={token: f" t{token}" for token in range(100)},
    )
    with SessionWriter.create(path, taps=TAPS, ranks=2, meta=known) as writer:
        for step, token in enumerate(tokens):
            writer.step(0, record(step, token, change, tensors=tensors))
        if other:
            branch = writer.branch("load_bias=false", parent=0, fork_step=fork, rules={"load_bias": "false"})
            for step, token in enumerate(other, start=fork):
                writer.step(branch, record(step, token, unchanged, tensors=tensors))
            writer.event(branch, fork, "command", "toggle load_bias false")
    put_meta(path, **(meta or {}))
    return path


def judge(path: Path, wrong: str = "layers.0.attn.probs", step: int = 3) -> None:
    """Verdicts in the form that `check` and `golden` leave: everything after `wrong` inherits."""
    first = NAMES.index(wrong)
    found = []
    for at in range(step + 1):
        for tap in TAPS:
            bad = at == step and tap.index >= first
            detail = {
                "rel_l2": (None if tap.index == first else 0.3) if bad else 2e-7,
                "max_abs": 1e-6, "cosine": 1.0, "floor": 1.5e-7, "ratio": 9e5 if bad else 1.2,
                "reason": "820 of 1681 elements are NaN" if bad and tap.index == first else "",
                "inherited": bad and tap.index > first, "injected": 3.25e-8,
            }  # fmt: skip
            found.append(VerdictRecord(0, at, tap.name, "fail" if bad else "pass", detail))
    with SessionWriter.reopen(path) as writer:
        writer.verdicts(found)
        writer.event(
            0, step, "golden", wrong,
            {"verdict": "diverged", "first_divergence": {"tap": wrong, "step": step, "ranks": [1]},
             "causes": [{"name": "additive mask", "text": "0 times minus infinity", "residual": 0.002}],
             "token_mismatches": [{"step": 1, "seq": 0, "engine": 20, "reference": 21, "tie": False}],
             "ledger": f"1 operation is wrong by itself: {wrong} from step {step}",
             "notes": ["judged by fixed tolerances"]},
        )  # fmt: skip
