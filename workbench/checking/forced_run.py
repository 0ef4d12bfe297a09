"""An engine held against the golden reference from its prompts on: what `check` and the demo do.

    reference = record_reference(model.directory, prompts, steps=8, dtype="float32")
    with Inferior(model.path, model.config, config) as inferior:
        result = check(inferior, reference, Path("a.session"), rules={"mask": "additive"})

One inferior serves any number of checks, each under its own rules and in its own session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.config import DType
from lockstep.engine.errors import RequestError
from lockstep.sessions import SessionWriteError, VerdictRecord
from lockstep.sessions.copy import copy
from lockstep.sessions.errors import RecordingLost
from lockstep.sessions.meta import ModelMeta, SessionMeta
from lockstep.workbench.checking.corrections import Corrections
from lockstep.workbench.checking.pipeline import CheckResult, Progress, Reference, check_run, recording_name
from lockstep.workbench.checking.verdicts import store_judgement
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.inferior.session import create_session
from lockstep.workbench.judgements.golden_event import GoldenEvent
from lockstep.workbench.models.capture import FULL, Capture
from lockstep.workbench.models.opening import OpenedModel
from lockstep.workbench.references.golden import (
    Options,
    Wanted,
    forced_onto,
    need_readable,
    record_all,
    record_golden,
    record_pair,
)
from lockstep.workbench.references.recorder_process import StandbyRecorder
from lockstep.workbench.references.request import GoldenSequence, ReferenceFailure, ReferenceName


def record_reference(
    model: Path,
    prompts: Sequence[Sequence[int] | GoldenSequence],
    steps: int,
    dtype: DType,
    *,
    reference: ReferenceName = "transformers",
    floor: bool = True,
    device: str = "cpu",
    chunk: int | None = None,
    progress: Progress = lambda what, done, of: None,
    warn: Callable[[str], None] = lambda text: None,
    waiting: Callable[[], None] = lambda: None,
    standby: StandbyRecorder | None = None,
) -> Reference:
    """Record (or find in the cache) the float64 truth and, for `floor`, the reference at `dtype` on the same ids.
    `steps` and `chunk` as in `GoldenRequest`. Runs are forced onto what the truth emits, greedily, or onto the tokens
    of a `GoldenSequence`. With llama.cpp:
    `_record_llamacpp`. `waiting` is called now and then meanwhile; what it raises ends the recording.

    ReferenceFailure and CheckpointError state why there is none.
    """
    sequences = [one if isinstance(one, GoldenSequence) else GoldenSequence(tuple(one)) for one in prompts]

    def count(done: int, of: int) -> None:
        if done:
            progress("golden reference", done, of)
        else:  # it takes seconds until the first pass
            progress(f"loading {reference}", 0, 0)

    how: Options = {"chunk": chunk, "progress": count, "warn": warn, "waiting": waiting, "standby": standby}
    if reference == "llama.cpp":
        return _record_llamacpp(model, sequences, steps, dtype, floor, how)
    how["device"], noise = device, None
    if floor:
        golden, noise = record_pair(model, sequences, steps, dtype, **how)
    else:
        golden = record_golden(model, sequences, steps, "float64", **how)
    return Reference(forced_onto(golden), steps, golden, noise)


def _record_llamacpp(
    model: Path, sequences: list[GoldenSequence], steps: int, dtype: DType, floor: bool, how: Options
) -> Reference:
    """llama.cpp on the weights dequantised is golden; on the blocks as stored, where there are any, it shows what
    quantisation costs; transformers at the engine's dtype shows the noise between two right implementations."""
    need_readable(model, "llama.cpp")
    wanted = [Wanted("float32", "llama.cpp")]
    if quantised := quantised_tensors(model):
        wanted.append(Wanted("float32", "llama.cpp", dequantised=False))
    noise = None
    try:
        noisy = [Wanted(dtype)] if floor else []
        golden, *others = record_all(model, sequences, steps, [*wanted, *noisy], **how)
        noise = others.pop() if floor else None
    except ReferenceFailure as error:
        if not floor:
            raise
        golden, *others = record_all(model, sequences, steps, wanted, **how)
        how["warn"](f"no noise floor, so that fixed tolerances judge: {error}")
    return Reference(forced_onto(golden), steps, golden, noise, others[0] if quantised else None)


def quantised_tensors(model: Path) -> set[str]:
    """The tensors of a GGUF file whose products llama.cpp computes from rounded activations: all but F32."""
    _, source = open_checkpoint(model)
    with source:
        return {name for name in source.names() if source.info(name).encoding != "F32"}


def check(
    inferior: Inferior,
    reference: Reference,
    path: Path,
    *,
    rules: Mapping[str, str] | None = None,
    model: OpenedModel | None = None,
    progress: Progress = lambda what, done, of: None,
    found: Callable[[str], None] = lambda text: None,
    spare: Path | None = None,
) -> CheckResult:
    """Run `inferior` under `rules` (None: those in force) on the reference's ids, record to `path`, and judge.

    A session at `path` is replaced; with `model` it knows the model's name. `found` takes what is wrong as soon
    as that is known. The inferior is left at the end of a run, unrecorded. Where `path` cannot be written the run is
    recorded to `spare` for the verdict's sake, and the result's `lost` states why; without one `SessionWriteError` is
    raised.
    """
    in_force = dict(inferior.rules if rules is None else rules)
    run = ForcedRun(inferior, reference, path, in_force, model, progress, found, spare=spare)
    return replace(check_run(run, reference), lost=run.lost)


@dataclass(slots=True)
class ForcedRun:
    """An inferior's run over the reference's prompts and tokens, from an empty cache."""

    inferior: Inferior
    reference: Reference
    path: Path
    rules: Mapping[str, str]
    model: OpenedModel | None = None
    progress: Progress = lambda what, done, of: None
    found: Callable[[str], None] = lambda text: None
    branch: int = 0
    spare: Path | None = None
    lost: str = ""

    @property
    def checkpoint(self) -> Path:
        """What the inferior runs."""
        return self.inferior.path

    def record(self, path: Path, corrected: Corrections | None = None, capture: Capture = FULL) -> None:
        """The prefill and the reference's decode steps, teacher-forced."""
        try:
            self._record(path, corrected, capture)
        except SessionWriteError as error:
            if path != self.path or self.spare is None:
                raise
            self.lost = str(error) if isinstance(error, RecordingLost) else f"the run: {error}"
            self.path = self.spare
            self._record(self.spare, None, capture)

    def _record(self, path: Path, corrected: Corrections | None, capture: Capture) -> None:
        inferior, reference = self.inferior, self.reference
        self._start_over()
        inferior.watch(capture)
        what = recording_name(inferior.config.dtype, inferior.config.tp, corrected, capture)
        named = ModelMeta(name="" if self.model is None or path != self.path else self.model.name)
        reported = SessionMeta(source="lockstep check", model=named)
        with create_session(inferior, path, reported, overwrite=True), ExitStack() as stack:
            stack.callback(inferior.recorder.stop)
            for step in range(reference.steps + 1):
                if corrected is not None:
                    inferior.set_patches(corrected(step))
                inferior.step(self._forced())
                inferior.check_aligned()
                if inferior.recorder.trouble:
                    raise RecordingLost(f"the run from step {step} on: {inferior.recorder.trouble}")
                self.progress(what, step + 1, reference.steps + 1)
        if inferior.patched:
            inferior.set_patches([])

    def _forced(self) -> dict[int, int]:
        """The token that each sequence emits next, be it in this pass or after further chunks of its prompt."""
        emitted = {seq: len(one.ids) - one.prompt_length for seq, one in self.inferior.sequences.items()}
        forced = {seq: one.forced for seq, one in enumerate(self.reference.sequences)}
        return {seq: reported[emitted[seq]] for seq, reported in forced.items() if reported}

    def store(self, verdicts: Sequence[VerdictRecord], event: GoldenEvent) -> None:
        """Into the session of the run."""
        try:
            store_judgement(self.path, self.branch, verdicts, event)
        except SessionWriteError as error:
            if self.spare is None or self.path == self.spare:
                raise
            copy(self.path, self.spare)
            self.lost, self.path = f"the verdicts: {error}", self.spare
            store_judgement(self.path, self.branch, verdicts, event)

    def _start_over(self) -> None:
        """The reference's prompts, at their beginning, under the rules and without patches."""
        prompts = [one.prompt for one in self.reference.sequences]
        states = self.inferior.sequences.values()
        if [tuple(state.ids[: state.prompt_length]) for state in states] != prompts:
            for seq in list(self.inferior.sequences):
                self.inferior.remove(seq)
            for prompt in prompts:
                self.inferior.add(list(prompt))
        self.inferior.set_rules(self.rules)
        self.inferior.set_patches([])


def check_fits(prompts: Sequence[Sequence[int]], steps: int, context: int) -> None:
    """RequestError where a prompt and the steps after it do not fit the model's context."""
    longest = max(map(len, prompts))
    if longest + steps > context:
        raise RequestError(
            f"{longest} prompt tokens and {steps} steps exceed the context of {context}: use fewer --steps"
        )
