"""A model that our engine runs on prompts, held against a reference: what `check` and `diagnose` have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.engine.config import EngineConfig
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
from lockstep.workbench.references.llamacpp.library import need_installed
from lockstep.workbench.references.request import REFERENCES, ReferenceName, prefill_passes

#: What a model with a tokenizer is checked on when nobody says: words, digits, a rare character.
DEFAULT_TEXT = "The 3 quick brown foxes jump over 12 lazy dogs; déjà vu."
#: How many ids, spread over the vocabulary, make the prompt of a model without one.
DEFAULT_IDS = 16


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
        prompts = _prompts(opened, texts, ids, chat)
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
        listener.say(f"starting {tp} rank{'s' * (tp > 1)}")
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
            spare=spare,
        )

    def suite(self, listener: Listener) -> Suite:
        """Runs of the first prompt that must agree with each other."""
        opened, told = self.opened, listener.say
        return Suite(opened.path, opened.config, self.config, self.faults, self.prompts[0], self.steps, told)

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
    model: OpenedModel, texts: Sequence[str] | None, ids: Sequence[str] | None, chat: bool
) -> list[list[int]]:
    """What was asked for, or something that any model can be checked on."""
    if texts or ids or model.offers_prompt:
        return requests.prompt_ids(model, texts, ids, chat)
    if model.tokenizer is not None:
        return [model.tokenizer.encode(DEFAULT_TEXT)]
    last = model.config.vocab_size - 1
    spread = [round(i * last / (DEFAULT_IDS - 1)) for i in range(DEFAULT_IDS)]
    return [[*([] if model.config.bos_id is None else [model.config.bos_id]), *spread]]
