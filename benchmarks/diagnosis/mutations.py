"""Every seam of the engine's rules with something done to an operand or to the result, by one list for all: what nobody
has thought of as a bug of that operation is tried as well.

A cause counts as named where it is reported without reservation, at the tap that differs first from the same engine's
without the mutation. Whether the sentence is right is for a reader. What changes no bit is no case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import torch
from torch import Tensor

from benchmarks.diagnosis.figures import Row, confidence_of
from lockstep.engine.rules import CORRECT
from lockstep.sessions import Session
from lockstep.workbench.judgements.cause import UNNAMED
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.engine_proofs import differences
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt
from tests.workbench.diagnosis.bugs.recording import Recordings
from tests.workbench.diagnosis.bugs.scoring import diagnose_recorded, sure

PART = "mutations"
MODELS = (
    "qwen2-tied", "qwen3", "llama-llama3", "mistral-window", "gemma2", "gemma3", "gemma4", "phi3", "olmo2", "cohere2",
    "granite", "glm4", "starcoder2", "stablelm", "nemotron", "apertus", "exaone4", "qwen3-moe", "mixtral", "qwen2-moe",
    "glm4-moe", "gpt-oss", "minimax-m2", "llama4", "phimoe", "ernie4-5-moe", "gemma4-moe", "flex-olmo", "deepseek-v2",
    "deepseek-v3", "deepseek-v32", "mistral4", "qwen3-next", "qwen3.5", "bamba", "falcon-h1", "lfm2",
)  # fmt: skip
#: Seams that load, lay out, or give no tensors of tokens.
_LEFT_OUT = {
    "tensor_of", "shard", "load_bias", "dequantise", "row_order", "stored", "lm_head", "qkv_shard_dim", "positions",
    "layer_rope", "cache_layer", "shared_cache", "cache_reuse", "rope_theta", "rope_frequencies", "rope_angles",
    "own_experts",
}  # fmt: skip
#: Where a mutation acts.
_SCOPES = ("all", "decode", "layer", "last rank")
_Args = tuple[Any, ...]


@dataclass(slots=True)
class _Calls:
    """What a seam was called with in this step and in the one before, and which of its operands is chosen."""

    pick: int
    step: int = -1
    now: list[_Args] = field(default_factory=list)
    before: list[_Args] = field(default_factory=list)

    def add(self, step: int, args: _Args) -> None:
        if step != self.step:
            self.step, self.before, self.now = step, self.now, []
        self.now.append(tuple(one.clone() if isinstance(one, Tensor) else one for one in args))


_Mutation = Callable[[Callable[..., Any], _Args, _Calls], Any]


def _floats(some: Sequence[Any]) -> list[int]:
    return [i for i, one in enumerate(some) if isinstance(one, Tensor) and one.is_floating_point()]


def _of_result(change: Callable[[Tensor], Tensor]) -> _Mutation:
    def mutate(right: Callable[..., Any], args: _Args, calls: _Calls) -> Any:
        out = right(*args)
        if not isinstance(out, tuple):
            return change(out) if _floats([out]) else out
        able = _floats(out)
        at = able[calls.pick % len(able)] if able else -1
        return tuple(change(one) if i == at else one for i, one in enumerate(out))

    return mutate


def _of_operand(change: Callable[[Tensor, int, _Calls], Any]) -> _Mutation:
    def mutate(right: Callable[..., Any], args: _Args, calls: _Calls) -> Any:
        if not (able := _floats(args)):
            return right(*args)
        at = able[calls.pick % len(able)]
        new = change(args[at], at, calls)
        fits = isinstance(new, Tensor) and new.shape == args[at].shape
        return right(*(new if i == at and fits else one for i, one in enumerate(args)))

    return mutate


def _halves(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1)


def _coarser(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16 if x.dtype != torch.bfloat16 else torch.float8_e4m3fn).to(x.dtype)


def _of_the_call_before(x: Tensor, at: int, calls: _Calls) -> Any:
    return calls.now[-2][at] if len(calls.now) > 1 else None


def _of_the_step_before(x: Tensor, at: int, calls: _Calls) -> Any:
    return calls.before[len(calls.now) - 1][at] if len(calls.now) <= len(calls.before) else None


def _exchanged(right: Callable[..., Any], args: _Args, calls: _Calls) -> Any:
    pairs = [(i, j) for i in _floats(args) for j in _floats(args) if i < j and args[i].shape == args[j].shape]
    if not pairs:
        return right(*args)
    i, j = pairs[calls.pick % len(pairs)]
    return right(*(args[j] if n == i else args[i] if n == j else one for n, one in enumerate(args)))


def _other_number(right: Callable[..., Any], args: _Args, calls: _Calls) -> Any:
    able = [i for i, one in enumerate(args) if isinstance(one, int | float) and not isinstance(one, bool)]
    at = able[calls.pick % len(able)] if able else -1
    return right(*(2 * one if i == at else one for i, one in enumerate(args)))


def _first_alone(right: Callable[..., Any], args: _Args, calls: _Calls) -> Any:
    out = right(*args)
    same = (args[i] for i in _floats(args) if isinstance(out, Tensor) and args[i].shape == out.shape)
    return next((one.clone() for one in same), out)


def _twice(right: Callable[..., Any], args: _Args, calls: _Calls) -> Any:
    out = right(*args)
    again = bool(_floats([out, *args[:1]]) == [0, 1]) and out.shape == args[0].shape
    return right(out, *args[1:]) if again else out


MUTATIONS: Mapping[str, _Mutation] = {
    "result scaled": _of_result(lambda x: 1.5 * x),
    "result negated": _of_result(torch.neg),
    "result of another row": _of_result(lambda x: x.roll(1, 0)),
    "result in other halves": _of_result(_halves),
    "result a column late": _of_result(lambda x: x.roll(1, -1)),
    "result coarser": _of_result(_coarser),
    "result without its last quarter": _of_result(
        lambda x: x * (torch.arange(x.shape[-1]) < 0.75 * x.shape[-1])
    ),
    "twice": _twice,
    "first operand alone": _first_alone,
    "operand of zeros": _of_operand(lambda x, at, calls: 0 * x),
    "operand of ones": _of_operand(lambda x, at, calls: torch.ones_like(x)),
    "operand doubled": _of_operand(lambda x, at, calls: 2 * x),
    "operand halved": _of_operand(lambda x, at, calls: x / 2),
    "operand coarser": _of_operand(lambda x, at, calls: _coarser(x)),
    "operand a column late": _of_operand(lambda x, at, calls: x.roll(1, -1)),
    "operand of another row": _of_operand(lambda x, at, calls: x.roll(1, 0)),
    "operand in other halves": _of_operand(lambda x, at, calls: _halves(x)),
    "operand of the layer before": _of_operand(_of_the_call_before),
    "operand of the step before": _of_operand(_of_the_step_before),
    "operands exchanged": _exchanged,
    "number doubled": _other_number,
}


def cases(root: Path) -> Iterator[tuple[str, Callable[[], Row]]]:
    """(key, what measures it), in an order in which any first part is a sample of all."""
    recordings = Recordings(root)
    models: dict[str, list[str]] = {}
    for model, seams in _called(recordings).items():
        for seam in seams:
            models.setdefault(seam, []).append(model)
    found = [_drawn(seam, name, models[seam]) for seam in sorted(models) for name in MUTATIONS]
    for bug in sorted(found, key=lambda one: crc32(one.name.encode())):
        with_bug, without = recordings.spoilt(bug), recordings.faultless(bug)
        with Session.open(with_bug) as ours, Session.open(without) as right:
            first = next(differences(ours, right, recordings.steps), None)
        if first is not None:
            yield bug.name, partial(_measure, bug, recordings, *first[:2])
        with_bug.unlink()


def _called(recordings: Recordings) -> dict[str, list[str]]:
    """By model the seams that it calls."""
    path = recordings.root / "seams.json"
    if not path.exists():
        called = {model: sorted(_probe(model, recordings)) for model in MODELS}
        path.write_bytes(msgspec.json.encode(called))
    return msgspec.json.decode(path.read_bytes(), type=dict[str, list[str]])


def _probe(model: str, recordings: Recordings) -> set[str]:
    met: set[str] = set()

    def patch(p: Spoilt) -> None:
        for name in (one.name for one in fields(CORRECT) if one.name not in _LEFT_OUT):
            p.rules(**{name: partial(_met, met, name)})

    recordings.spoilt(_bug(f"what {model} calls", patch, model, "float32", 1))
    return met


def _met(met: set[str], name: str, *args: Any, **named: Any) -> Any:
    met.add(name)
    return getattr(CORRECT, name)(*args, **named)


def _drawn(seam: str, name: str, models: Sequence[str]) -> Bug:
    """A case of its own for each seam and mutation: the model, dtype and scope follow from their names."""
    drawn = crc32(f"{seam}, {name}".encode())
    scope, model = _SCOPES[drawn // 3 % len(_SCOPES)], models[drawn // 7 % len(models)]
    dtype, tp = ("bfloat16" if drawn // 5 % 3 == 0 else "float32"), 1 + (scope == "last rank")
    patch = partial(_mutated, seam, MUTATIONS[name], scope, drawn // 11 % 5)
    return _bug(f"{seam}, {name}, {scope}, {model}, {dtype}", patch, model, dtype, tp)


def _bug(name: str, patch: Callable[[Spoilt], None], model: str, dtype: str, tp: int) -> Bug:
    return Bug(name, PART, (), "", Place(()), patch, model, dtype, tp, ep=1)


def _mutated(seam: str, mutation: _Mutation, scope: str, pick: int, p: Spoilt) -> None:
    right, calls = getattr(CORRECT, seam), _Calls(pick)

    def wrong(*args: Any, **named: Any) -> Any:
        calls.add(p.comm.step, args)
        here = scope not in ("decode", "last rank") or (p.decode if scope == "decode" else p.rank == p.tp - 1)
        usual = partial(right, **named)
        return mutation(usual, args, calls) if here else usual(*args)

    p.rules((1,) if scope == "layer" else None, **{seam: wrong})


def _measure(bug: Bug, recordings: Recordings, step: int, tap: str) -> Row:
    recorded = recordings.of(bug)
    started = time.perf_counter()
    answer = diagnose_recorded(recorded)
    named = [one for one in answer.causes if one.kind != UNNAMED]
    placed = answer.first is not None and (answer.first.tap, answer.first.step) == (tap, step)
    outcome = "missed" if answer.first is None else "named" if named and sure(named[0]) else "unnamed"
    return Row(
        bug.name, PART, bug.name.partition(",")[0], outcome, placed, False, False, 0, time.perf_counter() - started,
        "" if placed else f"{tap} at step {step} differs first",
        " | ".join(one.in_words() for one in answer.causes[:3]), confidence_of(answer.causes),
    )  # fmt: skip
