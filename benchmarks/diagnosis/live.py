"""Faults of the catalogue, alone and in pairs, and random prompts, on our own engine: `check` as a user runs it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.diagnosis.figures import Row, confidence_of
from lockstep.engine.config import EngineConfig
from lockstep.engine.faults.catalogue import FAULTS
from lockstep.engine.faults.fault import Fault
from lockstep.workbench.checking.forced_run import ForcedRun, check, record_reference
from lockstep.workbench.checking.pipeline import CheckResult, Reference
from lockstep.workbench.demo.checkpoints import DEMOS
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.judgements.cause import UNNAMED, Cause
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import OpenedModel, open_model
from tests.gguf_twins import gguf_twin
from tests.workbench.diagnosis.bugs.recording import Recordings
from tests.workbench.diagnosis.bugs.scoring import class_of, sure

#: `-gguf`: its twin in blocks of Q4_1.
MODELS = ("demo", "qwen2-tied", "qwen3", "llama-bias", "mistral-window", "demo-q4_k_m", "llama-gguf")
SIZES = (1, 2, 4)
DTYPES = ("float32", "bfloat16")
STEPS = 4
PROMPTS, BATCH = 200, 8
#: A dozen classes, one fault each: rule=value.
CLASSES = (
    "mask=none", "load_bias=false", "rope=interleaved", "rope_theta=10000", "positions=ahead", "cache_reuse=false",
    "kv_expand=tiled", "scale=one", "reduce=missing", "norm=plus_one", "act=gelu", "lm_head=missing",
)  # fmt: skip
#: Group of a fault -> the classes of cause that are right.
_RIGHT: Mapping[str, tuple[str, ...]] = {
    "mask": ("mask",),
    "attention": ("scores", "scale", "mask", "softmax", "precision"),
    "rope": ("rope", "positions"),
    "cache": ("cache", "positions"),
    "gqa": ("heads", "cache"),
    "sharding": ("sharding", "reduce", "weight", "bias", "residual"),
    "bias": ("bias",),
    "loading": ("head", "weight", "embedding"),
    "quantisation": ("weight", "loading", "bias"),
    "norm": ("norm",),
    "mlp": ("activation", "weight"),
}


@dataclass(slots=True)
class Engines:
    """One inferior at a time, with the reference of what it runs."""

    root: Path
    stack: ExitStack = field(default_factory=ExitStack)
    running: tuple[str, int, str] | None = None
    inferior: Any = None
    model: OpenedModel | None = None
    references: dict[tuple[str, str, int, int], Reference] = field(default_factory=dict)

    def open(self, name: str) -> OpenedModel:
        if name in DEMOS:
            return open_model(name)
        path, _ = Recordings(self.root).reference(name.removesuffix("-gguf"), 0)
        twin = path.with_suffix(".gguf")
        if name.endswith("-gguf"):
            keys = {"tokenizer.ggml.model": "none"}
            path = twin if twin.exists() else gguf_twin(path, twin, "Q4_1", keys=keys)
        return open_model(str(path))

    def run(
        self, name: str, tp: int, dtype: str, rules: Mapping[str, str], seed: int, count: int = 2
    ) -> tuple[CheckResult, int, float]:
        """`count` prompts checked: the result, how often the engine ran, the seconds that it took with the reference
        in the cache."""
        if self.running != (name, tp, dtype):
            self.stack.close()
            self.model, self.running = self.open(name), (name, tp, dtype)
            config = EngineConfig(tp=tp, dtype=dtype, max_tokens=64, threads=1)  # type: ignore[arg-type]
            inferior = Inferior(self.model.path, self.model.config, config, capture=FULL)
            self.inferior = self.stack.enter_context(inferior)
        assert self.model is not None
        key = (name, dtype, seed, count)
        if key not in self.references:
            prompts = random_prompts(self.model.config.vocab_size, seed, count)
            self.references[key] = record_reference(self.model.path, prompts, STEPS, dtype)  # type: ignore[arg-type]
        path = self.root / "engine.session"
        started = time.perf_counter()
        with mock.patch.object(ForcedRun, "record", autospec=True, side_effect=ForcedRun.record) as recorded:
            result = check(self.inferior, self.references[key], path, rules=rules)
        return result, recorded.call_count, time.perf_counter() - started

    def close(self) -> None:
        self.stack.close()


def random_prompts(size: int, seed: int, count: int) -> list[list[int]]:
    """Of one to twenty tokens, two of them not short."""
    drawn = random.Random(seed)
    lengths = [13, 9, *(drawn.randint(1, 20) for _ in range(count - 2))]
    return [[drawn.randrange(size) for _ in range(length)] for length in lengths]


Case = tuple[str, Callable[[], Row]]


def catalogue(engines: Engines) -> Iterator[Case]:
    """Each fault wherever it can act."""
    for name, tp, dtype in itertools.product(MODELS, SIZES, DTYPES):
        config = engines.open(name).config
        for fault in FAULTS:
            if fault.needs(config, tp) is None:
                key = f"{fault.seam}={fault.value} {name} tp={tp} {dtype}"
                yield key, partial(_faulty, engines, "catalogue", key, name, tp, dtype, [fault])


def pairs(engines: Engines) -> Iterator[Case]:
    """All pairs of a dozen classes."""
    name, tp, dtype = "qwen2-untied", 2, "float32"
    config = engines.open(name).config
    known = {f"{fault.seam}={fault.value}": fault for fault in FAULTS}
    dozen = [known[one] for one in CLASSES if one in known and known[one].needs(config, tp) is None]
    for one, other in itertools.combinations(dozen, 2):
        if one.seam != other.seam:
            key = f"{one.seam}={one.value} {other.seam}={other.value}"
            yield key, partial(_faulty, engines, "pairs", key, name, tp, dtype, [one, other])


def prompts(engines: Engines) -> Iterator[Case]:
    """Random prompts on a correct engine."""
    for tp, dtype in itertools.product(SIZES, (*DTYPES, "float16")):
        for batch in range(PROMPTS // BATCH):
            name = MODELS[batch % len(MODELS)]
            key = f"{name} tp={tp} {dtype} {batch}"
            yield key, partial(_correct, engines, key, name, tp, dtype, batch)


def _correct(engines: Engines, key: str, name: str, tp: int, dtype: str, batch: int) -> Row:
    result, runs, seconds = engines.run(name, tp, dtype, {}, seed=batch, count=BATCH)
    accused = [cause for cause in result.causes if cause.kind != UNNAMED and sure(cause)]
    wrong = bool(accused) or result.event.verdict == "diverged"
    stated = " / ".join(cause.in_words() for cause in result.causes) or result.event.words
    return Row(
        key, "prompts", dtype, "misleading" if wrong else "named", not wrong, not wrong, not wrong, runs, seconds,
        result.event.verdict, stated,
    )  # fmt: skip


def _faulty(
    engines: Engines, part: str, key: str, name: str, tp: int, dtype: str, faults: Sequence[Fault]
) -> Row:
    rules = {fault.seam: fault.value for fault in faults}
    result, runs, seconds = engines.run(name, tp, dtype, rules, seed=0)
    first = result.event.first_divergence
    reported = [cause for cause in result.causes if cause.kind != UNNAMED]
    stated = " / ".join(cause.in_words() for cause in reported) or result.event.words
    placed = first is not None and any(
        fnmatchcase(first.tap, fault.first_tap) and first.step == fault.step for fault in faults
    )
    named = [fault for fault in faults if any(_right(cause, fault) for cause in reported)]
    wrong = [cause for cause in reported if sure(cause) and not any(_right(cause, fault) for fault in faults)]
    silent = first is None and not reported and any("has no effect" in note for note in result.event.notes)
    if silent:  # as KV heads held twice, which give the same numbers: a note is what is right
        outcome, placed, named, stated = "named", True, list(faults), " / ".join(result.event.notes)
    elif first is None and not reported:
        outcome = "missed"
    elif reported and any(_right(reported[0], fault) for fault in faults):
        outcome = "named"
    else:
        outcome = "misleading" if reported and reported[0] in wrong else "unnamed"
    why = "" if outcome == "named" else ", ".join(class_of(cause) for cause in reported) or "no cause"
    why = "reported as a note, without effect" if silent else why
    return Row(
        key, part, faults[0].group, outcome, placed, outcome == "named", len(named) == len(faults), runs, seconds,
        why, stated, confidence_of(reported),
    )  # fmt: skip


def _right(cause: Cause, fault: Fault) -> bool:
    """Whether a cause is this fault: by its name in the catalogue, else by its class."""
    return cause.fault == f"{fault.seam}={fault.value}" or class_of(cause) in _RIGHT[fault.group]
