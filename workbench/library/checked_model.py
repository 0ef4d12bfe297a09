"""A model that our engine runs on prompts, held against a reference: what `check` and `diagnose` have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.config.thresholds import thresholds
from lockstep.engine.parallel import shards
from lockstep.workbench.checking.axes.model_axes import ModelAxes
from lockstep.workbench.checking.forced_run import check as run_check
from lockstep.workbench.checking.forced_run import check_fits, record_reference
from lockstep.workbench.checking.invariants.suite import Suite
from lockstep.workbench.checking.pipeline import CheckResult, Reference
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.library.listening import Listener
from lockstep.workbench.models import requests
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import OpenedModel, open_to_run
from lockstep.workbench.models.tokenizer import Tokenizer
from lockstep.workbench.references.llamacpp.library import need_installed
from lockstep.workbench.references.request import REFERENCES, ReferenceName, prefill_passes

#: What a model with a tokenizer is checked on when no text is given: words, digits, a rare character.
DEFAULT_TEXT = "The 3 quick brown foxes jump over 12 lazy dogs; déjà vu."
#: How many ids, spread over the vocabulary, make the prompt of a model without one.
DEFAULT_IDS = 16
#: By so many tokens the prompt of a model that nobody gave one for goes beyond each threshold.
BEYOND = 8
#: As far as that takes no more multiplications in a pass: seconds in float64 on a CPU.
CHEAP = 2e10


@dataclass(frozen=True, slots=True)
class ModelToCheck:
    """What is run, on which prompts, for how many decode steps, with which faults."""

    opened: OpenedModel
    prompts: Sequence[Sequence[int]]
    steps: int
    config: EngineConfig
    faults: dict[str, str]

    @classmethod
    def of(
        cls,
        model: str,
        *,
        texts: Sequence[str] | None,
        ids: Sequence[str] | None,
        chat: bool,
        prompt_tokens: int | None = None,
        steps: int,
        faults: Sequence[str] | None,
        tp: int,
        device: str,
        dtype: str,
        ep: int = 1,
        load: str = "direct",
        weights: str = "dequantised",
        batch_invariant: bool = False,
        chunk: int | None = None,
        timeout: float = 60.0,
        start_timeout: float = 300.0,
        listen: str = "",
    ) -> ModelToCheck:
        """From the words of a command line; ConfigError, RequestError and CheckpointError for what cannot run."""
        opened = open_to_run(model)
        prompts = _prompts(opened, texts, ids, chat, prompt_tokens, steps, chunk)
        config = requests.engine_config(
            opened, tp=tp, ep=ep, device=device, dtype=dtype, load=load, weights=weights,
            batch_invariant=batch_invariant, chunk=chunk, timeout=timeout, start_timeout=start_timeout,
            listen=listen,
        )  # fmt: skip
        config = requests.plan(opened, config, prompts, steps + 1, FULL)
        check_fits(prompts, steps, opened.config.context)
        return cls(opened, prompts, steps, config, requests.faults_of(faults, opened, tp))

    def reference(
        self, listener: Listener, library: ReferenceName = "transformers", floor: bool = True
    ) -> Reference:
        """The reference for the prompts, from the cache or recorded now."""
        chunk = self.config.chunk_tokens
        passes = prefill_passes(self.prompts, chunk) + self.steps
        return record_reference(
            self.opened.path, self.prompts, passes - 1, self.config.dtype, chunk=chunk, reference=library,
            floor=floor, device=self.config.device, progress=listener.count, warn=listener.warn,
        )  # fmt: skip

    @contextmanager
    def engine(self, listener: Listener) -> Iterator[Inferior]:
        """The engine, with its faults."""
        tp = self.config.tp
        listener.report(f"starting {tp} rank{'s' * (tp > 1)}")
        with Inferior(
            self.opened.path, self.opened.config, self.config, self.faults, on_warning=listener.warn
        ) as inferior:
            yield inferior

    def check(
        self, inferior: Inferior, reference: Reference, target: Path, spare: Path, listener: Listener
    ) -> CheckResult:
        """Run, judge and explain it; the run is recorded to `target`."""
        return run_check(
            inferior,
            reference,
            target,
            rules=self.faults,
            model=self.opened,
            progress=listener.count,
            found=listener.found,
            spare=spare,
        )

    def suite(self, listener: Listener) -> Suite:
        """Runs of the first prompt that must agree with each other."""
        opened, reported = self.opened, listener.report
        return Suite(
            opened.path, opened.config, self.config, self.faults, self.prompts[0], self.steps, reported
        )

    def axes(self, folder: Path, listener: Listener) -> ModelAxes:
        """Variants of its run, whose sessions go to `folder`."""
        opened, config, reported = self.opened, self.config, listener.report
        return ModelAxes(opened, config, self.faults, self.prompts, self.steps, folder, reported)

    def in_words(self) -> str:
        """ "demo, tp=2, float32: 12 prompt tokens, 8 decode steps"."""
        lengths = " + ".join(str(len(prompt)) for prompt in self.prompts)
        config = self.config
        chunks = f" in chunks of {config.chunk_tokens}" if config.chunk_tokens is not None else ""
        ranks = f"tp={config.tp}" + (f", ep={config.ep}" if config.ep > 1 else "")
        return (
            f"{self.opened.name}, {ranks}, {config.dtype}: {lengths} prompt tokens{chunks}, "
            f"{self.steps} decode steps"
        )


def reference_of(word: str, option: str = "--reference") -> ReferenceName:
    """UsageError for a word that is no reference, and where its library is missing."""
    if word not in REFERENCES:
        raise UsageError(f"{option} is {' or '.join(REFERENCES)}, not {word!r}")
    if word == "llama.cpp":
        need_installed()
    return word


def _prompts(
    model: OpenedModel,
    texts: Sequence[str] | None,
    ids: Sequence[str] | None,
    chat: bool,
    tokens: int | None,
    steps: int,
    chunk: int | None,
) -> list[list[int]]:
    """What was asked for, or something that any model can be checked on: of so many `tokens`, or (None) of as many as
    go beyond the model's thresholds."""
    if tokens is not None and (texts or ids or chat):
        raise UsageError("--prompt-tokens makes a prompt up: leave out --prompt, --ids and --chat")
    if texts or ids or (tokens is None and model.offers_prompt):
        return requests.prompt_ids(model, texts, ids, chat)
    least = 0 if tokens is not None else _length_beyond(model.config, steps, chunk)
    if model.tokenizer is not None:
        return [_words(model.tokenizer, tokens, least)]
    count = tokens or max(DEFAULT_IDS, least)
    first = [] if model.config.bos_id is None else [model.config.bos_id]
    last = model.config.vocab_size - 1
    return [[*first, *(round(i * last / max(1, count - 1)) for i in range(count))][: tokens or None]]


def _words(tokenizer: Tokenizer, tokens: int | None, least: int) -> list[int]:
    """The default text, repeated as often as makes so many tokens, or at least `least`."""
    text, ids = DEFAULT_TEXT, tokenizer.encode(DEFAULT_TEXT)
    while len(ids) < max(tokens or 0, least):
        text = f"{text} {text}"
        ids = tokenizer.encode(text)
    return ids[: tokens or max(least, len(tokenizer.encode(DEFAULT_TEXT)))]


def _length_beyond(model: ModelConfig, steps: int, chunk: int | None) -> int:
    """The tokens of a prompt beyond as many thresholds as are cheap to pass; 0 for none."""
    lengths = (one.tokens + BEYOND for one in thresholds(model, chunk))
    return max(
        (one for one in lengths if one + steps <= model.context and _cost(model, one) <= CHEAP), default=0
    )


def _cost(model: ModelConfig, tokens: int) -> float:
    """Multiplications of a pass over a prompt."""
    weights = sum(math.prod(shape) for shape in shards.parameters(model).values())
    return float(tokens * weights + 2 * model.num_layers * model.num_heads * model.head_dim * tokens**2)
