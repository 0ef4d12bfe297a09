"""The engine held against the golden reference: what `check`, the demo and the debugger's `golden` share.

    reference = record_reference(model.directory, prompts, steps=8, dtype="float32")
    with Inferior(model.path, model.config, config) as inferior:
        result = check(inferior, reference, Path("a.session"), rules={"mask": "additive"})

Torch-free: transformers runs in a recorder of its own, the engine in its ranks. One inferior serves any number of
checks, each under its own rules and in its own session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.config import DType
from engine.errors import RequestError
from sessions import Session, SessionWriteError, SessionWriter
from workbench.checking.corrections import corrections
from workbench.checking.verdicts import summary, verdict_rows
from workbench.diagnosis.evidence import Signature
from workbench.diagnosis.judgement import Judgement
from workbench.diagnosis.ledger import ledger
from workbench.diagnosis.signatures import explain
from workbench.diagnosis.verdict import judge
from workbench.diagnosis.weights import checkpoint_weights
from workbench.inferior.inferior import Inferior
from workbench.inferior.patches import Patch
from workbench.models.capture import FULL
from workbench.models.opening import OpenedModel
from workbench.references.golden import forced_onto, record_golden, record_pair
from workbench.references.request import GoldenSequence

#: `progress(what, done, of)`: which recording, and how many of its forward passes are over.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Reference:
    """Golden recordings of some prompts, and the tokens onto which a run is forced to be comparable.

    `sequences` hold each prompt and what the truth emits after it, greedily, at each of `steps` + 1 passes. `floor` is
    the reference at the engine's own dtype, whose error against the truth is the noise that the dtype allows; None:
    fixed tolerances.
    """

    sequences: tuple[GoldenSequence, ...]
    steps: int
    golden: Path
    floor: Path | None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One run judged. `causes` are the signatures that fit its first divergence, best first."""

    judgement: Judgement
    causes: tuple[Signature, ...]
    engine_session: Path
    golden_session: Path
    rules: Mapping[str, str]

    @property
    def matches(self) -> bool:
        """Whether the engine does what the reference does."""
        return self.judgement.verdict == "match"

    def to_json(self) -> dict[str, Any]:
        """The report of `check --json`."""
        return self.judgement.to_json() | {
            "causes": [
                {"name": one.name, "text": one.text, "fitted": one.fitted, "residual": one.residual}
                for one in self.causes
            ],
            "rules": dict(self.rules),
            "engine_session": str(self.engine_session),
            "golden_session": str(self.golden_session),
        }


def record_reference(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    steps: int,
    dtype: DType,
    *,
    floor: bool = True,
    device: str = "cpu",
    progress: Progress = lambda what, done, of: None,
) -> Reference:
    """Record (or find in the cache) the float64 truth and, for `floor`, the reference at `dtype` on the same ids.

    ReferenceFailure and CheckpointError say why there is none.
    """
    sequences = [GoldenSequence(tuple(prompt)) for prompt in prompts]

    def count(done: int, of: int) -> None:
        progress("golden reference", done, of)

    noise = None
    if floor:
        golden, noise = record_pair(directory, sequences, steps, dtype, device=device, progress=count)
    else:
        golden = record_golden(directory, sequences, steps, "float64", device=device, progress=count)
    forced = forced_onto(golden)
    return Reference(forced, steps, golden, noise)


def check(
    inferior: Inferior,
    reference: Reference,
    path: Path,
    *,
    rules: Mapping[str, str] | None = None,
    model: OpenedModel | None = None,
    progress: Progress = lambda what, done, of: None,
) -> CheckResult:
    """Run `inferior` under `rules` (None: those in force) on the reference's ids, record to `path`, and judge.

    A session at `path` is replaced; with `model` it knows the model's name. Where a tap has failed, the run is made
    once more under corrections, for the ledger. The inferior is left at the end of a run, unrecorded.
    """
    meta: dict[str, Any] = {} if model is None else {"model_name": model.name}
    record_forced(inferior, reference, path, rules=rules, progress=progress, **meta)
    with ExitStack() as stack:
        engine, golden = (stack.enter_context(Session.open(one)) for one in (path, reference.golden))
        floor = None if reference.floor is None else stack.enter_context(Session.open(reference.floor))
        judgement = judge(engine, golden, floor=floor)
        causes = explain(
            engine, golden, judgement.first_divergence, weights=checkpoint_weights(inferior.path)
        )
        if judgement.failed:
            scratch = Path(stack.enter_context(TemporaryDirectory(prefix="lockstep-ledger-")))
            corrected = scratch / "corrected.session"
            record_forced(
                inferior, reference, corrected, rules=inferior.rules, progress=progress,
                corrected=lambda step: corrections(engine, golden, step),
            )  # fmt: skip
            again = stack.enter_context(Session.open(corrected))
            judgement = ledger(judgement, again, golden, floor=floor)
    result = CheckResult(judgement, tuple(causes), path, reference.golden, dict(inferior.rules))
    _keep(result, reference)
    return result


def record_forced(
    inferior: Inferior,
    reference: Reference,
    path: Path,
    *,
    rules: Mapping[str, str] | None = None,
    progress: Progress = lambda what, done, of: None,
    corrected: Callable[[int], Sequence[Patch]] | None = None,
    **meta: Any,
) -> None:
    """Run the prefill and the reference's decode steps, teacher-forced, with every tensor of every tap captured;
    `corrected(step)` are patches of that step."""
    _start_over(inferior, reference, inferior.rules if rules is None else rules)
    inferior.watch(FULL)
    inputs = "" if corrected is None else " on golden inputs"
    what = f"engine{inputs}, {inferior.config.dtype}, tp={inferior.config.tp}"
    with inferior.create_session(
        path, overwrite=True, source="lockstep check", golden=str(reference.golden), **meta
    ):
        for step in range(reference.steps + 1):
            patches = corrected(step) if corrected else ()
            if patches or inferior.patches:
                inferior.set_patches(patches)
            inferior.step(
                {seq: one.forced[step] for seq, one in enumerate(reference.sequences) if one.forced}
            )
            if inferior.writer is None:
                raise SessionWriteError(
                    f"{path}: the run could not be recorded: free some room, or --save elsewhere"
                )
            progress(what, step + 1, reference.steps + 1)
    if inferior.patches:
        inferior.set_patches([])
    inferior.writer = None


def _start_over(inferior: Inferior, reference: Reference, rules: Mapping[str, str]) -> None:
    """The reference's prompts, at their beginning, under `rules`."""
    prompts = [one.prompt for one in reference.sequences]
    if [tuple(state.ids[: state.prompt_length]) for state in inferior.sequences.values()] != prompts:
        for seq in list(inferior.sequences):
            inferior.remove(seq)
        for prompt in prompts:
            inferior.add(list(prompt))
    inferior.set_rules(rules)


def _keep(result: CheckResult, reference: Reference) -> None:
    """The verdicts, and a "golden" event that sums them up, into the engine's session."""
    with SessionWriter.reopen(result.engine_session) as writer:
        writer.verdicts(verdict_rows(result.judgement.taps))
        data = summary(result.judgement, result.causes, reference.steps + 1) | {
            "rules": dict(result.rules), "engine_session": str(result.engine_session),
            "golden_session": str(result.golden_session),
        }  # fmt: skip
        writer.event(0, reference.steps, "golden", data["words"] or result.judgement.verdict, data)


def check_fits(prompts: Sequence[Sequence[int]], steps: int, context: int) -> None:
    """RequestError where a prompt and the steps after it do not fit the model's context."""
    longest = max(map(len, prompts))
    if longest + steps > context:
        raise RequestError(
            f"{longest} prompt tokens and {steps} steps exceed the context of {context}: use fewer --steps"
        )
