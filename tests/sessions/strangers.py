"""Sessions as a stranger might send them: whole by the format, senseless by their values.

`usual` describes a plain session, `ODDITIES` each spoil one thing in it, `write` makes the file through the
`SessionWriter`, so that whatever it lets through is tried.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sessions import STATISTICS, SequenceStep, SessionWriter, StepRecord, Tap, TensorRecord, Verdict
from sessions.meta import CaptureMeta, ConfigMeta, ModelMeta, SamplingMeta, SequenceMeta, SessionMeta
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
    verdicts: list[Verdict] = field(default_factory=list)
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
        with closing(sqlite3.connect(path)) as connection, connection:
            for statement, values in made.sql:
                connection.execute(statement, values)
    return path


def usual() -> Stranger:
    """Three steps on two ranks with everything that a pane can show, and a branch from step 1."""
    taps = [Tap(i, name, _LAYOUTS.get(name.split(".", 2)[-1], "replicate")) for i, name in enumerate(NAMES)]
    fork = Fork("load_bias=false", 0, 1, {"load_bias": "false"}, [_step(1, taps), _step(2, taps)])
    return Stranger(
        taps=taps,
        meta=_meta(),
        steps=[_step(step, taps) for step in range(3)],
        forks=[fork],
        events=[
            (0, 0, "command", "run demo --tp 2", None),
            (0, 1, "lens", "logit lens", _lens()),
            (0, 1, "stop", "catch nan: layers.0.attn.scores", {"reason": "exception"}),
            (0, 2, "note", "reads well", None),
            (0, 2, "golden", "diverged", _golden()),
            (1, 1, "fork", "toggle load_bias false", {"at": 2, "patches": [], "sampling": {}}),
        ],
        verdicts=[_verdict(step, tap) for step in range(3) for tap in NAMES],
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
        weights={0: (_share("model.embed_tokens.weight", 0), _share("model.embed_tokens.weight", 1))},  # type: ignore[dict-item]
    )


def _share(name: str, rank: int, *, shape: tuple[int, ...] = (64, 16), statistics: Any = None) -> Any:
    """A row of the weights on the ranks, as JSON has it."""
    return [name, rank, list(shape), "float32", statistics or [0.1] * len(STATISTICS), "0f", "different"]


def _step(step: int, taps: list[Tap], ranks: int = RANKS) -> StepRecord:
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


def _verdict(step: int, tap: str, word: str = "", detail: Any = None) -> Verdict:
    bad = step == 2 and tap >= "layers.0.attn.probs"
    usual_detail = {
        "rel_l2": 0.3 if bad else 2e-7,
        "max_abs": 1e-6,
        "ratio": 9.0,
        "inherited": False,
        "rank": 1,
    }
    return Verdict(
        0, step, tap, word or ("fail" if bad else "pass"), usual_detail if detail is None else detail
    )


# --- one thing spoiled -----------------------------------------------------------------------------

Oddity = Callable[[Stranger], None]
ODDITIES: dict[str, Oddity] = {}


def _oddity(change: Oddity) -> Oddity:
    ODDITIES[change.__name__] = change
    return change


def _each(name: str, values: Iterable[Any], change: Callable[[Stranger, Any], None]) -> None:
    """An oddity for each of several values."""
    for number, value in enumerate(values):
        ODDITIES[f"{name}_{number}"] = lambda made, value=value: change(made, value)


@_oddity
def foreign_names(made: Stranger) -> None:
    """Every string is one of WORDS: taps, branches, rules, events, verdicts, meta, token texts."""
    stored = [
        one.encode("utf-8", "replace").decode() for one in WORDS
    ]  # no column holds lone surrogates, JSON does
    word = lambda index: stored[index % len(stored)]  # noqa: E731
    made.rename(lambda index, name: f"{word(index)}·{index}")
    made.forks = [Fork(word(i), 0, 1, {word(i): word(i + 1)}) for i in range(len(WORDS))]
    made.events += [(0, i % 3, word(i), word(i), {word(i): [word(i)]}) for i in range(len(WORDS))]
    kinds = ("command", "stop", "note", "error", "lens", "golden", "fork", "toggle")
    made.events += [(0, 1, kind, word(i), None) for kind in kinds[:4] for i in range(len(WORDS))]
    made.verdicts += [_verdict(1, word(i), word(i), {word(i): word(i)}) for i in range(len(WORDS))]
    made.each_step(lambda step: replace(step, dropped=WORDS))
    made.meta = SessionMeta(
        source=word(8), model=replace_all(ModelMeta(), word(9)), config=replace_all(ConfigMeta(), word(10)),
        rules={one: one for one in WORDS}, prompts=WORDS, versions={one: one for one in WORDS}, notes=WORDS,
        absent={one: one for one in WORDS}, biases=dict.fromkeys(WORDS, b"12345678"),
        capture=CaptureMeta(full=WORDS, last=WORDS),
        token_texts={token: word(token) for token in range(64)},
    )  # fmt: skip


def replace_all(struct: Any, word: str) -> Any:
    """A struct of the meta whose every text is `word`."""
    texts = {name: word for name in struct.__struct_fields__ if getattr(struct, name) == ""}
    return type(struct)(**texts)


def _one_name(made: Stranger, word: str) -> None:
    """The taps in layers keep their layer, so that every pane still finds them."""
    word = word.encode("utf-8", "replace").decode()
    made.rename(lambda i, name: f"{name.rsplit('.', 1)[0]}.{word}{i}" if "." in name else f"{word}{i}")
    made.forks[0].name = word
    made.meta = SessionMeta(model=ModelMeta(name=word, path=word), token_texts=dict.fromkeys(range(64), word))
    made.events += [
        (0, 1, kind, word, word) for kind in ("command", "stop", "note", "error", "golden", "lens")
    ]


_each("name", WORDS, _one_name)


@_oddity
def no_taps(made: Stranger) -> None:
    made.taps = []
    made.each_step(lambda step: replace(step, tensors=(), stats=None, checksums=None))


@_oddity
def no_sequences(made: Stranger) -> None:
    made.each_step(lambda step: replace(step, sequences=()))


@_oddity
def other_sequences(made: Stranger) -> None:
    made.each_sequence(seq=-5)
    made.steps[1] = replace(made.steps[1], sequences=[replace(sequence(1), seq=s) for s in (7, 10**18, -1)])


@_oddity
def no_steps(made: Stranger) -> None:
    made.steps, made.forks, made.verdicts = [], [Fork("x", 0, 0, {})], []


@_oddity
def empty_branch(made: Stranger) -> None:
    made.forks += [
        Fork("at the end", 0, 3, {}),
        Fork("of the beginning", 0, 0, {}),
        Fork("of that", 3, 0, {}),
    ]


@_oddity
def no_arrays(made: Stranger) -> None:
    made.each_step(lambda step: replace(step, stats=None, checksums=None, tensors=()))


@_oddity
def nothing_in_sequences(made: Stranger) -> None:
    made.each_sequence(ids=(), positions=(), kv_lens=(), block_table=(), emitted=None, topk_ids=(), topk_logits=(),
                       logsumexp=None, entropy=None)  # fmt: skip


for _field in ("ids", "positions", "block_table", "topk_ids"):
    _each(f"sequence_{_field}", ((), *((n,) * 4 for n in INTEGERS), tuple(INTEGERS)),
          lambda made, value, name=_field: made.each_sequence(**{name: value}))  # fmt: skip
_each("sequence_emitted", (*INTEGERS, None), lambda made, value: made.each_sequence(emitted=value))
_each("kv_lens", INTEGERS, lambda made, n: made.each_sequence(kv_lens=((n,) * LAYERS,) * RANKS))
_each("kv_lens_layers", (1, 7, 1024), lambda made, n: made.each_sequence(kv_lens=((3,) * n,) * RANKS))
_each("topk_logits", ((), (1.0,), (1.0,) * 9, *((x,) * 3 for x in FLOATS), tuple(FLOATS)),
      lambda made, value: made.each_sequence(topk_logits=value))  # fmt: skip
_each("normaliser", FLOATS, lambda made, x: made.each_sequence(logsumexp=x, entropy=x))
_each(
    "one_candidate", FLOATS, lambda made, x: made.each_sequence(topk_ids=(1,), topk_logits=(x,), logsumexp=x)
)


def _filled(made: Stranger, x: float) -> None:
    with np.errstate(over="ignore"):
        value = np.float32(x)
    made.each_step(lambda step: replace(step, stats=np.full_like(step.stats, value), wall_seconds=x))
    made.each_tensor(lambda one: replace(one, array=np.full_like(one.array, value)))


_each("numbers", FLOATS, _filled)


@_oddity
def one_infinity(made: Stranger) -> None:
    def spoil(step: StepRecord) -> StepRecord:
        stats = np.array(step.stats)
        stats[::2, 0, :], stats[1::2, 0, :], stats[:, 1, 5:] = np.inf, -np.inf, np.nan
        return replace(step, stats=stats)

    made.each_step(spoil)


@_oddity
def counts_are_fractions(made: Stranger) -> None:
    made.each_step(lambda step: replace(step, stats=np.full_like(step.stats, -1e30)))


_each("blocks", INTEGERS, lambda made, n: made.each_step(lambda s: replace(s, free_blocks=n, used_blocks=n)))
_each("phase", WORDS[:3], lambda made, word: made.each_step(lambda s: replace(s, phase=word)))


def _shaped(made: Stranger, shape: tuple[int, ...]) -> None:
    made.each_tensor(lambda one: replace(one, array=np.ones(shape, np.float32)))


_each("shape", ((), (0,), (1,), (0, 0), (0, 3), (3, 0, 3), (4, 0, 0), (2, 3), (2, 2, 2, 2), (1,) * 8, (0,) * 8,
                (1, 1, 5000), (5000, 1, 1), (2, 1, 1), (1, 3, 3)), _shaped)  # fmt: skip


def _typed(made: Stranger, dtype: str) -> None:
    from sessions.dtypes import STORED_AS

    made.each_tensor(
        lambda one: replace(one, array=np.abs(one.array * 99).astype(STORED_AS[dtype]), dtype=dtype)
    )


_each("dtype", ("bool", "int8", "int64", "uint64", "float16", "float64", "bfloat16", "uint8"), _typed)


@_oddity
def ranks_disagree(made: Stranger) -> None:
    """A shape and a dtype of its own on each rank."""
    made.each_tensor(
        lambda one: one if one.rank == 0 else replace(one, array=np.ones((5, 3), np.int8), dtype="int8")
    )


@_oddity
def one_rank_is_missing(made: Stranger) -> None:
    made.each_step(lambda step: replace(step, tensors=[one for one in step.tensors if one.rank]))


_each("slice", (*WORDS[:3], "-1:", ":,{0;2}", "99:", "{999999999}", ":,:,:,:,:", "-1:-1"),
      lambda made, part: made.each_tensor(lambda one: replace(one, slice=part)))  # fmt: skip


@_oddity
def one_rank(made: Stranger) -> None:
    made.ranks = 1
    made.steps = [_step(step, made.taps, 1) for step in range(3)]
    made.forks = []


@_oddity
def layouts_do_not_fit(made: Stranger) -> None:
    odd = (
        "shard(99)",
        "shard(0,replicas=9999)",
        "shard(1,replicas=3)",
        "partial",
        "replicate",
        "shard(0,replicas=2)",
    )
    made.taps = [replace(tap, layout=odd[tap.index % len(odd)]) for tap in made.taps]


@_oddity
def layers_beyond_reason(made: Stranger) -> None:
    numbers = ("99999", str(10**18), "-1", "00", "١", "1e3")
    made.rename(lambda i, name: f"layers.{numbers[i % len(numbers)]}.{name}" if i else name)


@_oddity
def layers_with_holes(made: Stranger) -> None:
    made.rename(lambda i, name: f"layers.{i * 997}.attn.probs" if i else name)


JUNK: tuple[Any, ...] = (
    None, True, 5, -1e300, math.nan, math.inf, 10**30, "x", WORDS[8], [], {}, [[1], {}], {"0": 5}, {"seq": 0},
    {"seq": 0, "layers": []}, {"seq": 0, "layers": [], "golden": []}, {"patches": 5}, {"patches": [5, {}, None]},
    {"at": -5, "patches": [{"tap": "x", "step": -1}]}, {"at": 10**18}, {"sampling": {"0": {"temperature": -1e300}}},
    {"sampling": {"0": {"top_k": -(10**18), "top_p": 1e300, "seed": 10**30}}}, {"reason": [1]}, {"reason": "x", "tap": 5},
    {"verdict": "match"}, {"verdict": "diverged", "first_divergence": None, "causes": []},
    {"verdict": "diverged", "first_divergence": {"tap": "[/]", "step": -(10**18), "rank": -1, "ranks": [10**18]}},
    {"verdict": "diverged", "steps": 10**30, "max_abs_logits": math.inf, "faulty": [{"tap": "[b]", "ratio": math.nan}]},
    {"verdict": "diverged", "causes": [{"text": "[/]", "residual": math.nan, "fitted": {"a": [math.inf, 10**40]}}]},
    {"seq": 0, "layers": [{"tap": "layers.99999.x", "ids": [-5], "logits": [None]}]},
    {"seq": 0, "layers": [{"tap": "[/]", "ids": [10**18], "logits": [math.inf], "logsumexp": math.inf, "entropy": math.nan}]},
    {"rel_l2": "x", "max_abs": [1], "ratio": math.inf, "rank": -5, "inherited": 7, "cosine": {}, "floor": None},
    {"rel_l2": math.nan, "ratio": 10**400, "rank": 10**18, "reason": WORDS[0]},
)  # fmt: skip
KINDS = ("command", "stop", "note", "error", "lens", "golden", "fork", "toggle", "expect", "source", "x")


def _journal(made: Stranger, value: Any) -> None:
    for kind in KINDS:
        made.events += [(branch, step, kind, "x", value) for branch, step in ((0, 1), (0, -5), (1, 10**18))]


_each("events", JUNK, _journal)
for _kind in KINDS:
    _each(f"event_{_kind}", (WORDS[0], WORDS[8], "", "x y z", "break [", "continue 5", "goto -1", "x" * 5000),
          lambda made, text, kind=_kind: made.events.extend([(0, 1, kind, text, None), (7, 1, kind, text, {})]))  # fmt: skip
_each("verdicts", JUNK, lambda made, value: made.verdicts.extend(
    Verdict(branch, step, tap, word, value) for branch, step in ((0, 1), (0, 10**18), (0, -1), (9, 0))
    for tap in ("embed", "nowhere", "[/]") for word in ("fail", "[/]", "absent", "")))  # fmt: skip

_META: dict[str, tuple[Any, ...]] = {
    "model": (
        *({name: n} for n in (1, 2**53 - 1) for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size")),
        {"path": "x" * 5000}, {"path": "a\x00b"}, {"path": "\ud800"}, {"path": "~/x"}, {"path": "/proc/self/mem"}, {"path": "/dev"},
        {"rope_theta": math.inf, "rms_eps": math.nan}, {"num_heads": 3, "num_kv_heads": 7, "num_layers": 2},
        {"windows": [None, 1, 2**52], "eos_ids": [0, 1]}, {"rope_scaling": {"[/]": math.nan}}, {"dtype": "[/]", "family": "\x1b[0m"},
    ),
    "config": ({"tp": 2**52}, {"block_size": 1}, {"block_size": 2**52}, {"num_blocks": 0}, {"num_blocks": 2**52},
               {"timeout_seconds": math.nan}, {"device": "[/]", "dtype": "\u202e"}),
    "sequences": ({"-5": {}}, {"0": {"prompt_ids": []}}, {"0": {"prompt_ids": [2**31 - 1], "forced": [0] * 9}},
                  {str(10**18): {"sampling": {"temperature": math.inf, "top_k": -1, "top_p": math.nan, "seed": -(10**18)}}}),
    "weights": (
        {"0": [_share("w", 0, shape=shape)] } for shape in ((), (0,), (2**52,), (2**52,) * 9)
    ),
    "weights_figures": (
        {"0": [_share("[/]", rank, statistics=[x] * 8)]} for x in (*FLOATS, 1e300) for rank in (0, 65535)
    ),
    "weights_rows": ({"99": [_share("w", 0)]}, {"0": [_share("w", 0)] * 3}, {"0": []}, {"0": [["w"]]}, {"-1": [_share("w", 0)]},
                     {"0": [_share(word, 0) for word in WORDS]}, {"0": [_share(f"model.layers.{10**18}.self_attn.q_proj.weight", 0)]},
                     {"0": [_share("model.layers.99999.mlp.up_proj.weight", 1)]}),
    "biases": ({"layers.0.attn.q_proj": ""}, {"layers.0.attn.q_proj": "AAAA"}, {"[/]": "AAAAAAAAAAA="},
               {"layers.0.attn.q_proj": "AAAAAAAA+H8="}, {"layers.0.attn.q_proj": "AAAAAAAA8H8="}),
    "token_texts": ({"4": ""}, {"4": "x" * 100_000}, {"4": "\ud800"}, {str(2**62): "x", "-4": "y"}),
    "capture": ({"full": ["["] * 9, "budget_bytes": 0}, {"last": ["*"] * 1000}),
    "rules": ({"load_bias": "false"}, {"mask": "[/]"}, {"no such rule": "x" * 5000}, {"qkv_shard_dim": str(10**18)}),
    "prompts": (["\x1b[2J"] * 3,), "chat": (True,), "notes": (["[/]", "\u202e"],), "versions": ({"[/]": "\x9b"},),
}  # fmt: skip
for _key, _values in _META.items():
    _each(f"meta_{_key}", _values, lambda made, value, key=_key.split("_f")[0].split("_r")[0]: made.rows.update(
        {key: {**_KEPT.get(key, {}), **value} if key == "model" else value}))  # fmt: skip
_KEPT: dict[str, dict[str, Any]] = {
    "model": {
        "name": "Tiny",
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "hidden_size": 16,
    }
}
_each(
    "meta_junk",
    JUNK,
    lambda made, value: made.rows.update(dict.fromkeys(SessionMeta.__struct_fields__, value)),
)


def _sql(name: str, *statements: str) -> None:
    """What SQLite holds and no writer writes."""
    ODDITIES[f"sql_{name}"] = lambda made: made.sql.extend((one, ()) for one in statements)


_sql("steps_negative", "UPDATE steps SET wall_seconds = -1e300, free_blocks = -1")
_sql("fork_beyond", "UPDATE branches SET fork_step = 99 WHERE id = 1")
_sql("fork_negative", "UPDATE branches SET fork_step = -3 WHERE id = 1")
_sql("own_parent", "UPDATE branches SET parent = 1 WHERE id = 1")
_sql("no_branch_0", "UPDATE branches SET id = 9 WHERE id = 0")
_sql("main_has_parent", "UPDATE branches SET parent = 0 WHERE id = 0")
_sql("main_forks_late", "UPDATE branches SET fork_step = 1 WHERE id = 0")
_sql("main_without_parentage", "UPDATE branches SET parent = NULL WHERE id = 1")
_sql(
    "branch_negative",
    "UPDATE branches SET id = -7 WHERE id = 1",
    "UPDATE steps SET branch = -7 WHERE branch = 1",
)
_sql("steps_far", "UPDATE steps SET step = step + 4611686018427387904")
_sql("text_in_integers", "UPDATE sequences SET emitted = '[/]'")
_sql("no_sequence_rows", "DELETE FROM sequences WHERE step = 1")
_sql("tensor_rank", "UPDATE tensors SET rank = 9 WHERE rank = 1")
_sql("tensor_seq", "UPDATE tensors SET seq = -9")
_sql("tensor_tap", "UPDATE tensors SET tap = 999 WHERE tap = 3")
