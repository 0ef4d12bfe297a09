"""Sessions made by hand for the tests of the screen: two ranks, a haiku, a break where one is wanted."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.engine.taps.names import tap_specs
from lockstep.sessions import SessionWriter
from lockstep.sessions.meta import ConfigMeta, ModelMeta, SessionMeta
from lockstep.sessions.records import SequenceStep, StepRecord, Tap, TensorRecord, VerdictRecord

#: Token texts, hostile ones among them: an escape sequence, markup, right-to-left, combining, wide.
TEXTS = {
    0: "<|im_end|>",
    1: "write",
    2: " a",
    3: " haiku",
    4: " about",
    5: " rain",
    6: " with",
    7: " 41",
    8: ":",
    9: "\n",
    10: "soft",
    11: " on",
    12: " the",
    13: " roof",
    14: ",",
    15: " leaves",
    16: " gotta",
    17: "\x1b[31mred",
    18: "[bold]markup[/bold]",
    19: " שלום",
    20: "\u0301",
    21: "雨の音",
    22: "   ",
    23: "\u202eevil",
    24: " drip",
}
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
HAIKU = [9, 10, 5, 11, 12, 13, 7, 14, 9, 24, 24, 24]
HOSTILE = [17, 18, 19, 20, 21, 22, 23, 0, 9, 10, 5, 13]
BROKEN = [9, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16]
RANKS, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 8, 2, 32


def build(
    path: Path,
    *,
    emitted: list[int] | None = None,
    layers: int = LAYERS,
    nan_from: int | None = 6,
    fork: bool = True,
    seed: int = 7,
) -> Path:
    """A session of `emitted` tokens; from step `nan_from` on layer 0's scores hold NaN, and all after them."""
    emitted = HAIKU if emitted is None else emitted
    specs = tap_specs(layers)
    taps = [Tap(i, spec.name, str(spec.layout)) for i, spec in enumerate(specs)]
    with SessionWriter.create(path, taps=taps, ranks=RANKS, meta=_meta(layers)) as writer:
        random = np.random.default_rng(seed)
        for step, token in enumerate(emitted):
            broken = nan_from is not None and step >= nan_from
            writer.step(0, _step(random, taps, step, emitted[:step], token, broken, layers))
        writer.event(0, 0, "command", "run demo --tp 2")
        writer.event(0, min(6, len(emitted) - 1), "lens", "logit lens over 4 layers", _lens(layers, emitted))
        writer.event(0, 3, "note", "reads well so far [bold]really[/bold]")
        if nan_from is not None and nan_from < len(emitted):
            stopped = {"reason": "exception", "tap": "layers.0.attn.scores"}
            writer.event(0, nan_from, "stop", "catch nan: layers.0.attn.scores", stopped)
            writer.verdicts(_verdicts(taps, nan_from))
        if fork:
            other = writer.branch("load_bias=false", parent=0, fork_step=1, rules={"load_bias": "false"})
            for step in range(1, len(emitted)):
                token = BROKEN[step % len(BROKEN)]
                ids = [emitted[0], *BROKEN[1:step]]
                writer.step(other, _step(random, taps, step, ids, token, False, layers))
            writer.event(other, 1, "command", "toggle load_bias false")
    return path


def _meta(layers: int) -> SessionMeta:
    return SessionMeta(
        model=ModelMeta(
            name="Demo-3.5M",
            num_layers=layers,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            hidden_size=HEADS * HEAD_DIM,
        ),
        config=ConfigMeta(device="cpu", dtype="float32", block_size=4, tp=RANKS),
        token_texts=TEXTS,
    )


def _step(
    random: np.random.Generator,
    taps: list[Tap],
    step: int,
    before: list[int],
    token: int,
    broken: bool,
    layers: int,
) -> StepRecord:
    known = len(PROMPT) + step
    new = PROMPT if step == 0 else [before[-1]]
    logits = np.sort(random.normal(10, 2, 8))[::-1]
    logits[0] += 2 + 2 * random.random()
    others = [t for t in range(24) if t != token]
    top = [token, *(int(t) for t in random.permutation(others)[:7])]
    sequence = SequenceStep(
        seq=0,
        ids=new,
        positions=list(range(known - len(new), known)),
        kv_lens=[[known] * layers] * RANKS,
        block_table=list(range(-(-known // 4))),
        emitted=token,
        topk_ids=top,
        topk_logits=[float(x) for x in logits],
        logsumexp=float(np.log(np.exp(logits).sum()) + 0.05),
        entropy=float(random.uniform(0.1, 1.6)),
    )
    stats, checksums = _arrays(random, taps, broken)
    return StepRecord(
        step=step,
        phase="prefill" if step == 0 else "decode",
        sequences=[sequence],
        wall_seconds=0.08 + 0.01 * (step % 3),
        stats=stats,
        checksums=checksums,
        tensors=_probs(random, taps, len(new), known, whole=step == 0),
        free_blocks=64 - len(sequence.block_table),
        used_blocks=len(sequence.block_table),
    )


def _lens(layers: int, emitted: list[int]) -> dict[str, object]:
    """The emitted token rises from layer to layer; golden's residual has it first from the beginning."""
    final = emitted[min(6, len(emitted) - 1)]
    rows = []
    for layer in range(-1, layers):
        ids = [final, 5, 11] if layer >= layers // 2 else [5, final, 11] if layer >= 0 else [12, 5, 11]
        tap = "embed" if layer < 0 else f"layers.{layer}.mlp_residual"
        logits = [4.0 + layer, 3.0, 1.0]
        total = float(np.log(np.exp(logits).sum()))
        rows.append(
            {"tap": tap, "ids": ids, "logits": logits, "logsumexp": total, "entropy": 1.5 - layer / 4}
        )
    golden = [{**row, "ids": [final, 5, 11]} for row in rows]
    return {"seq": 0, "layers": rows, "golden": golden}


def _arrays(random: np.random.Generator, taps: list[Tap], broken: bool) -> tuple[np.ndarray, np.ndarray]:
    scale = 1 + np.arange(len(taps)) % 23 / 5
    stats = np.zeros((len(taps), RANKS, 8), np.float32)
    jitter = random.normal(1, 0.05, (len(taps), RANKS))
    checksums = random.integers(1, 2**63, (len(taps), RANKS)).astype(np.uint64)
    for tap in taps:
        if tap.layout == "replicate":
            jitter[tap.index, 1] = jitter[tap.index, 0]
            checksums[tap.index, 1] = checksums[tap.index, 0]
    rms = scale[:, None] * jitter
    stats[..., 0], stats[..., 1], stats[..., 2] = -3.1 * rms, 2.9 * rms, 0.01 * rms
    stats[..., 3], stats[..., 4] = rms, 3.1 * rms
    if broken:
        first = next(t.index for t in taps if t.name == "layers.0.attn.scores")
        stats[first:, :, 5] = 820
    return stats, checksums


def _probs(
    random: np.random.Generator, taps: list[Tap], new: int, known: int, whole: bool
) -> list[TensorRecord]:
    found = []
    for tap in taps:
        if tap.name.endswith("attn.probs"):
            raw = random.exponential(1, (HEADS, new, known)) ** 2
            raw[:, :, 0] += 1
            mask = np.tril(np.ones((new, known)), known - new)
            probs = (raw * mask / (raw * mask).sum(-1, keepdims=True)).astype(np.float32)
            half = HEADS // RANKS
            for rank in range(RANKS):
                shard = probs[rank * half : (rank + 1) * half]
                record = TensorRecord(
                    tap.name, rank, 0, shard, "float32", "" if whole or new == 1 else "last token"
                )
                found.append(record)
    return found


def _verdicts(taps: list[Tap], step: int) -> list[VerdictRecord]:
    first = next(t.index for t in taps if t.name == "layers.0.attn.scores")
    return [
        VerdictRecord(
            0,
            step,
            tap.name,
            "pass" if tap.index < first else "fail",
            {"rel_l2": 3e-7 if tap.index < first else 0.8, "max_abs": 1e-6, "inherited": tap.index > first},
        )
        for tap in taps
    ]
