"""Sessions as a stranger might send them: whole by the format, senseless by their values.

`usual` describes a plain session, `oddities.ODDITIES` spoil it, `write` makes the file through the `SessionWriter`, so
that whatever it lets through is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from lockstep.sessions.meta import CaptureMeta, ConfigMeta, ModelMeta, SamplingMeta, SequenceMeta, SessionMeta
from tests.sessions.hostile_files import changed
from tests.sessions.samples import put_meta

#: Every kind of string that may do harm where it is shown, parsed or made a file's name.
WORDS = (
    "[bold]markup[/bold]", "[/]", "[link=file:///etc/passwd]x", "[@click=app.quit]x[/]", "\\[", "[", "[red", "[[b]]",
    "\x1b[31mred\x1b]8;;http://evil.example\x07link", "\x9b2J\x9d0;owned\x9c", "a\rb\nc\td\x00e\x7f",
    "\u202eevil\u2066\u200f\u061c", "a\u200bb\ufeff\u2060", "\ud800\udfff", "שלום مرحبا", "\u0301\u0301", "雨" * 40,
    "../../x", "/etc/x", "CON", "a/b", "...", "x" * 5000, "", " ", "%s{0}{x}$(id)`id`", "=cmd|' /C calc'!A0",
    "<script>alert(1)</script>", "]]><!--", "a;b,c\"d'e", "layers.", "layers.0.", "layers.99999999.x",
)  # fmt: skip
INTEGERS = (-1, -(2**63), 2**63 - 1, 10**18, 2**31, 2**53 + 1)
FLOATS = (math.nan, math.inf, -math.inf, 5e-324, -5e-324, 1.7e308, -1.7e308, 1e-40, -0.0)

LAYERS, RANKS, HEADS, PROMPT = 2, 2, 4, 3
_LAYOUTS = {
    "attn.q_proj": "shard(1)", "attn.k_cache": "shard(1)", "attn.scores": "shard(0)", "attn.probs": "shard(0)",
    "attn.o_proj.partial": "partial", "attn.o_proj": "replicate", "mlp_residual": "replicate",
}  # fmt: skip
NAMES = ("embed", *(f"layers.{i}.{name}" for i in range(LAYERS) for name in _LAYOUTS), "logits")


@dataclass
class Fork:
    """A branch besides the main one."""

    name: str
    parent: int
    at: int
    rules: dict[str, str]
    steps: list[StepRecord] = field(default_factory=list)


@dataclass
class Stranger:
    """All that goes into one session. `rows` are rows of the meta table and `sql` statements for what no writer
    would write."""

    taps: list[Tap]
    meta: SessionMeta
    steps: list[StepRecord]
    forks: list[Fork] = field(default_factory=list)
    events: list[tuple[int, int, str, str, Any]] = field(default_factory=list)
    verdicts: list[VerdictRecord] = field(default_factory=list)
    ranks: int = RANKS
    rows: dict[str, Any] = field(default_factory=dict)
    sql: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def rename(self, new: Callable[[int, str], str]) -> None:
        """Give each tap another name, wherever it is named."""
        names = {tap.name: new(tap.index, tap.name) for tap in self.taps}
        self.taps = [replace(tap, name=names[tap.name]) for tap in self.taps]
        self.verdicts = [replace(one, tap=names.get(one.tap, one.tap)) for one in self.verdicts]
        self.each_step(
            lambda step: replace(step, tensors=[replace(t, tap=names[t.tap]) for t in step.tensors])
        )

    def each_step(self, change: Callable[[StepRecord], StepRecord]) -> None:
        """Change every step of every branch."""
        self.steps = [change(step) for step in self.steps]
        for fork in self.forks:
            fork.steps = [change(step) for step in fork.steps]

    def each_sequence(self, **fields: Any) -> None:
        """Change fields of every sequence of every step."""
        self.each_step(
            lambda step: replace(step, sequences=[replace(one, **fields) for one in step.sequences])
        )

    def each_tensor(self, change: Callable[[TensorRecord], TensorRecord]) -> None:
        """Change every captured tensor."""
        self.each_step(lambda step: replace(step, tensors=[change(one) for one in step.tensors]))


def write(path: Path, made: Stranger) -> Path:
    """The session's file. ValueError where the writer refuses it."""
    with SessionWriter.create(path, taps=made.taps, ranks=made.ranks, meta=made.meta) as writer:
        for step in made.steps:
            writer.step(0, step)
        for fork in made.forks:
            branch = writer.branch(fork.name, parent=fork.parent, fork_step=fork.at, rules=fork.rules)
            for step in fork.steps:
                writer.step(branch, step)
        for branch, at, kind, text, data in made.events:
            writer.event(branch, at, kind, text, data)
        writer.verdicts(made.verdicts)
    put_meta(path, **made.rows)
    if made.sql:
        with changed(path) as connection:
            for statement, values in made.sql:
                connection.execute(statement, values)
    return path


def usual() -> Stranger:
    """Three steps on two ranks with everything that a pane can show, and a branch from step 1."""
    taps = [Tap(i, name, _LAYOUTS.get(name.split(".", 2)[-1], "replicate")) for i, name in enumerate(NAMES)]
    fork = Fork("load_bias=false", 0, 1, {"load_bias": "false"}, [one_step(1, taps), one_step(2, taps)])
    return Stranger(
        taps=taps,
        meta=_meta(),
        steps=[one_step(step, taps) for step in range(3)],
        forks=[fork],
        events=[
            (0, 0, "command", "run demo --tp 2", None),
            (0, 1, "lens", "logit lens", _lens()),
            (0, 1, "stop", "catch nan: layers.0.attn.scores", {"reason": "exception"}),
            (0, 2, "note", "reads well", None),
            (0, 2, "golden", "diverged", _golden()),
            (1, 1, "fork", "toggle load_bias false", {"at": 2, "patches": [], "sampling": {}}),
        ],
        verdicts=[verdict(step, tap) for step in range(3) for tap in NAMES],
    )


def _meta() -> SessionMeta:
    model = ModelMeta(
        name="Tiny", num_layers=LAYERS, num_heads=HEADS, num_kv_heads=2, head_dim=4, hidden_size=16,
        intermediate_size=8, vocab_size=64, max_position=64, rms_eps=1e-6, rope_theta=1e4, dtype="float32",
    )  # fmt: skip
    return SessionMeta(
        source="lockstep run",
        model=model,
        config=ConfigMeta(tp=RANKS, device="cpu", dtype="float32", block_size=4),
        capture=CaptureMeta(full=("*",)),
        sequences={0: SequenceMeta(prompt_ids=tuple(range(PROMPT)), sampling=SamplingMeta())},
        prompts=("a prompt",),
        token_texts={token: f" t{token}" for token in range(64)},
        notes=("recorded",),
        absent={"layers.0.mlp.up": "not computed"},
        weights={0: (share("model.embed_tokens.weight", 0), share("model.embed_tokens.weight", 1))},  # type: ignore[dict-item]
    )


def share(name: str, rank: int, *, shape: tuple[int, ...] = (64, 16), statistics: Any = None) -> Any:
    """A row of the weights on the ranks, as JSON has it."""
    return [name, rank, list(shape), "float32", statistics or [0.1] * len(STATISTICS), "0f", "different"]


def one_step(step: int, taps: list[Tap], ranks: int = RANKS) -> StepRecord:
    known, new = PROMPT + step, PROMPT if step == 0 else 1
    random = np.random.default_rng(step)
    stats = random.normal(size=(len(taps), ranks, len(STATISTICS))).astype(np.float32)
    stats[..., 3:] = np.abs(stats[..., 3:])
    probs = np.full((HEADS // ranks, new, known), 1 / known, np.float32)
    arrays = {
        "probs": probs,
        "scores": np.log(probs),
        "q_proj": random.normal(size=(new, 16 // ranks)).astype(np.float32),
        "k_cache": random.normal(size=(known, 1, 4)).astype(np.float32),
    }
    tensors = [
        TensorRecord(tap.name, rank, 0, arrays[kind], "float32")
        for tap in taps
        if (kind := tap.name.rsplit(".", 1)[-1]) in arrays
        for rank in range(ranks)
    ]
    return StepRecord(
        step=step,
        phase="decode" if step else "prefill",
        sequences=[sequence(step, ranks)],
        wall_seconds=0.1,
        stats=stats,
        checksums=np.full((len(taps), ranks), 7 + step, np.uint64),
        tensors=tensors,
        free_blocks=60,
        used_blocks=4,
    )


def sequence(step: int, ranks: int = RANKS) -> SequenceStep:
    """What the step did to sequence 0."""
    known, new = PROMPT + step, PROMPT if step == 0 else 1
    return SequenceStep(
        seq=0,
        ids=tuple(range(known - new, known)),
        positions=tuple(range(known - new, known)),
        kv_lens=((known,) * LAYERS,) * ranks,
        block_table=tuple(range(-(-known // 4))),
        emitted=known,
        topk_ids=(known, 50, 51),
        topk_logits=(4.0, 2.0, 1.0),
        logsumexp=4.2,
        entropy=0.4,
    )


def _lens() -> dict[str, Any]:
    row = {"tap": "embed", "ids": [4, 5], "logits": [2.0, 1.0], "logsumexp": 2.3, "entropy": 0.5}
    rows = [row, {**row, "tap": "layers.0.mlp_residual"}]
    return {"seq": 0, "layers": rows, "golden": rows}


def _golden(**fields: Any) -> dict[str, Any]:
    first = {
        "tap": "layers.0.attn.probs",
        "layer": 0,
        "step": 2,
        "rank": 1,
        "ranks": [1],
        "reason": "12 × floor",
    }
    return {
        "verdict": "diverged", "first_divergence": first, "steps": 3, "words": "diverged", "ledger": "1 is wrong",
        "causes": [{"name": "bias", "text": "the bias is missing", "fitted": {"scale": 1.0}, "residual": 0.002}],
        "token_mismatches": [{"step": 1, "seq": 0, "engine": 4, "reference": 5}], "golden_session": "g.session",
        **fields,
    }  # fmt: skip


def verdict(step: int, tap: str, word: str = "", detail: Any = None) -> VerdictRecord:
    bad = step == 2 and tap >= "layers.0.attn.probs"
    usual_detail = {
        "rel_l2": 0.3 if bad else 2e-7,
        "max_abs": 1e-6,
        "ratio": 9.0,
        "inherited": False,
        "rank": 1,
    }
    return VerdictRecord(
        0, step, tap, word or ("fail" if bad else "pass"), usual_detail if detail is None else detail
    )
