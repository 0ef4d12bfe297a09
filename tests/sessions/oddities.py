"""What may be senseless in a stranger's session: each of ODDITIES spoils one thing in `strangers.usual()`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.sessions import VerdictRecord
from lockstep.sessions.dtypes import STORED_AS
from lockstep.sessions.meta import CaptureMeta, ConfigMeta, ModelMeta, SessionMeta
from lockstep.sessions.records import StepRecord
from tests.sessions.strangers import (
    FLOATS,
    INTEGERS,
    LAYERS,
    RANKS,
    WORDS,
    Fork,
    Stranger,
    one_step,
    sequence,
    share,
    verdict,
)

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
    made.verdicts += [verdict(1, word(i), word(i), {word(i): word(i)}) for i in range(len(WORDS))]
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
    made.steps = [one_step(step, made.taps, 1) for step in range(3)]
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
    {"sampling": {"0": {"top_k": -(10**18), "top_p": 1e300, "seed": 10**30}}},
    {"reason": [1]}, {"reason": "x", "tap": 5},
    {"verdict": "match"}, {"verdict": "diverged", "first_divergence": None, "causes": []},
    {"verdict": "diverged", "first_divergence": {"tap": "[/]", "step": -(10**18), "rank": -1, "ranks": [10**18]}},
    {"verdict": "diverged", "steps": 10**30, "max_abs_logits": math.inf, "faulty": [{"tap": "[b]", "ratio": math.nan}]},
    {"verdict": "diverged", "causes": [{"text": "[/]", "residual": math.nan, "fitted": {"a": [math.inf, 10**40]}}]},
    {"seq": 0, "layers": [{"tap": "layers.99999.x", "ids": [-5], "logits": [None]}]},
    {"seq": 0, "layers": [{"tap": "[/]", "ids": [10**18], "logits": [math.inf], "logsumexp": math.inf}]},
    {"rel_l2": "x", "max_abs": [1], "ratio": math.inf, "rank": -5, "inherited": 7, "cosine": {}, "floor": None},
    {"rel_l2": math.nan, "ratio": 10**400, "rank": 10**18, "reason": WORDS[0]},
)  # fmt: skip
KINDS = ("command", "stop", "note", "error", "lens", "golden", "fork", "toggle", "expect", "source", "x")


def _journal(made: Stranger, value: Any) -> None:
    for kind in KINDS:
        made.events += [(branch, step, kind, "x", value) for branch, step in ((0, 1), (0, -5), (1, 10**18))]


_each("events", JUNK, _journal)
_LINES = (WORDS[0], WORDS[8], "", "x y z", "break [", "continue 5", "goto -1", "x" * 5000)
for _kind in KINDS:
    _each(f"event_{_kind}", _LINES, lambda made, text, kind=_kind: made.events.extend(
        [(0, 1, kind, text, None), (7, 1, kind, text, {})]))  # fmt: skip
_each("verdicts", JUNK, lambda made, value: made.verdicts.extend(
    VerdictRecord(branch, step, tap, word, value) for branch, step in ((0, 1), (0, 10**18), (0, -1), (9, 0))
    for tap in ("embed", "nowhere", "[/]") for word in ("fail", "[/]", "absent", "")))  # fmt: skip

_KNOWN = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "hidden_size": 16}
_SIZES = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size")
_SAMPLING = {"temperature": math.inf, "top_k": -1, "top_p": math.nan, "seed": -(10**18)}
_FAR = f"model.layers.{10**18}.self_attn.q_proj.weight"
_META: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("model", tuple({**_KNOWN, name: n} for n in (1, 2**53 - 1) for name in _SIZES)),
    ("model", tuple({**_KNOWN, "path": path} for path in ("x" * 5000, "a\0b", "\ud800", "~/x", "/proc/self/mem", "/"))),
    ("model", (
        {**_KNOWN, "rope_theta": math.inf, "rms_eps": math.nan},
        {"num_heads": 3, "num_kv_heads": 7, "num_layers": 2},
        {**_KNOWN, "windows": [None, 1, 2**52], "eos_ids": [0, 1]},
        {**_KNOWN, "rope_scaling": {"[/]": math.nan}, "dtype": "[/]", "family": "\x1b[0m"},
    )),
    ("config", (
        {"tp": 2**52}, {"block_size": 1}, {"block_size": 2**52}, {"num_blocks": 0}, {"num_blocks": 2**52},
        {"timeout_seconds": math.nan}, {"device": "[/]", "dtype": "\u202e"},
    )),
    ("sequences", (
        {"-5": {}}, {"0": {"prompt_ids": []}}, {"0": {"prompt_ids": [2**31 - 1], "forced": [0] * 9}},
        {str(10**18): {"sampling": _SAMPLING}}, {"0": {"prompt_ids": [1], "sampling": _SAMPLING}},
    )),
    ("weights", tuple({"0": [share("w", 0, shape=shape)]} for shape in ((), (0,), (2**52,), (2**52,) * 9))),
    ("weights", tuple(
        {"0": [share("[/]", rank, statistics=[x] * 8)]} for x in (*FLOATS, 1e300) for rank in (0, 65535)
    )),
    ("weights", (
        {"99": [share("w", 0)]}, {"0": [share("w", 0)] * 3}, {"0": []}, {"0": [["w"]]}, {"-1": [share("w", 0)]},
        {"0": [share(word, 0) for word in WORDS]}, {"0": [share(_FAR, 0)]},
        {"0": [share("model.layers.99999.mlp.up_proj.weight", 1)]},
    )),
    ("biases", tuple({"layers.0.attn.q_proj": data} for data in ("", "AAAA", "AAAAAAAA+H8=", "AAAAAAAA8H8="))),
    ("biases", ({"[/]": "AAAAAAAAAAA="},)),
    ("token_texts", ({"4": ""}, {"4": "x" * 100_000}, {"4": "\ud800"}, {str(2**62): "x", "-4": "y"})),
    ("capture", ({"full": ["["] * 9, "budget_bytes": 0}, {"last": ["*"] * 1000})),
    ("rules", (
        {"load_bias": "false"}, {"mask": "[/]"}, {"no such rule": "x" * 5000}, {"qkv_shard_dim": str(10**18)},
    )),
    ("prompts", (["\x1b[2J"] * 3,)), ("notes", (["[/]", "\u202e"],)), ("versions", ({"[/]": "\x9b"},)),
)  # fmt: skip
for _number, (_key, _values) in enumerate(_META):
    _each(f"meta_{_key}_{_number}", _values, lambda made, value, key=_key: made.rows.update({key: value}))
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


def some_of_each(every: int) -> list[str]:
    """Names of oddities: of each field's odd values the first and every so many-th after it."""
    fields: dict[str, list[str]] = {}
    for name in ODDITIES:
        fields.setdefault(name.rstrip("0123456789"), []).append(name)
    return [name for names in fields.values() for name in names[::every]]
