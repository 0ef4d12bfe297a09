"""The story that `lockstep demo` shows: a run that is right, the same run with a bug, the bug named, the fix.

    1  the engine writes a haiku and matches transformers, tap by tap
    2  the q/k/v biases are not loaded: the text breaks, and the first wrong operation is named with its cause
    3  the biases are loaded again: text and match are back

Everything shown is computed while it is reported; nothing is canned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.engine.config import EngineConfig
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.scratch import ScratchFolder
from lockstep.workbench.checking.forced_run import check, record_reference
from lockstep.workbench.checking.pipeline import CheckResult, Reference
from lockstep.workbench.demo import DEFAULT_PROMPT, haiku_has_nonce, nonce_in_question
from lockstep.workbench.inferior.generation import add_prompts, run_to_end
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.models.capture import FULL, NOTHING
from lockstep.workbench.models.opening import DEMO, OpenedModel, open_to_run
from lockstep.workbench.models.requests import plan
from lockstep.workbench.models.tokenizer import need_tokenizer

BUG: Mapping[str, str] = {"load_bias": "false"}
MAX_TOKENS = 48


class Narrator:
    """Hears the story as it happens. This one keeps it to itself."""

    def opening(self, model: OpenedModel, question: str, tp: int) -> None:
        """Who and what."""

    def working(self, what: str, done: int, of: int) -> None:
        """Something takes a moment."""

    def warning(self, text: str) -> None:
        """Something that is no part of the story."""

    def chapter(self, number: int, rules: Mapping[str, str]) -> None:
        """A run is about to start under these rules."""

    def text(self, text: str, right: bool) -> None:
        """What the run wrote, and whether it is what was asked for."""

    def judged(self, number: int, result: CheckResult) -> None:
        """What the comparison with transformers found."""

    def closing(self, runs: list[Chapter]) -> None:
        """What is left to look at."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """One chapter: the text of a run under some rules and what a check made of it."""

    rules: Mapping[str, str]
    text: str
    right: bool
    result: CheckResult

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "faults": dict(self.rules),
            "text": self.text,
            "right": self.right,
            "check": self.result.to_json(),
        }


def run_story(narrator: Narrator, directory: Path, *, tp: int = 2, fast: bool = False) -> list[Chapter]:
    """Play the story on `tp` ranks of the CPU; both sessions are left in `directory`. `fast` compares fewer
    steps, by fixed tolerances. Returns the three runs."""
    model = open_to_run(DEMO)
    tokenizer = need_tokenizer(model.tokenizer, model.directory)
    narrator.opening(model, DEFAULT_PROMPT, tp)
    prompt = tokenizer.encode_chat([{"role": "user", "content": DEFAULT_PROMPT}])
    steps = 3 if fast else 8
    config = plan(model, EngineConfig(tp=tp), [prompt], MAX_TOKENS, FULL)
    reference = record_reference(
        model.directory, [prompt], steps, config.dtype, floor=not fast, progress=narrator.working,
        warn=narrator.warning,
    )  # fmt: skip
    narrator.working("starting the ranks", 0, tp)
    with (
        Inferior(model.path, model.config, config, on_warning=narrator.warning) as engine,
        ScratchFolder.make("demo") as folder,
    ):
        stage = _Stage(narrator, model, engine, reference, prompt)
        runs = [
            stage.play(1, {}, directory / "demo-faultless.session"),
            stage.play(2, BUG, directory / "demo-no-bias.session"),
            stage.play(3, {}, folder.path / "restored.session"),
        ]
    narrator.closing(runs)
    return runs


@dataclass(frozen=True, slots=True)
class _Stage:
    narrator: Narrator
    model: OpenedModel
    engine: Inferior
    reference: Reference
    prompt: list[int]

    def play(self, number: int, rules: Mapping[str, str], session: Path) -> Chapter:
        """One chapter: write freely under `rules`, then run again on the reference's tokens and compare."""
        self.narrator.chapter(number, rules)
        text = self._write(rules)
        nonce = nonce_in_question(DEFAULT_PROMPT)
        right = nonce is not None and haiku_has_nonce(text, nonce)
        self.narrator.text(text, right)
        result = check(
            self.engine,
            self.reference,
            session,
            rules=rules,
            model=self.model,
            progress=self.narrator.working,
        )
        self.narrator.judged(number, result)
        return Chapter(rules, text, right, result)

    def _write(self, rules: Mapping[str, str]) -> str:
        for seq in list(self.engine.sequences):
            self.engine.remove(seq)
        self.engine.set_rules(rules)
        self.engine.watch(NOTHING)
        sequences = add_prompts(self.engine, [self.prompt], Sampling())
        run_to_end(self.engine, sequences, MAX_TOKENS)
        (written,) = sequences.values()
        return need_tokenizer(self.model.tokenizer, self.model.directory).decode(written.ids)
