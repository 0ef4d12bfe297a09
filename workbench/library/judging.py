"""`lockstep.check` and `lockstep.diagnose`: a model on our engine, or a recording of anybody's, held against a
reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from lockstep.engine.scratch import ScratchFolder
from lockstep.engine.text import printable
from lockstep.sessions.copy import copy
from lockstep.workbench.checking import routing_replay
from lockstep.workbench.checking.confirmation import confirm
from lockstep.workbench.checking.differing_runs import with_runs
from lockstep.workbench.checking.pipeline import CheckResult, Reference
from lockstep.workbench.checking.routing_replay import Forced
from lockstep.workbench.checking.verdicts import store_judgement, verdict_rows
from lockstep.workbench.diagnosis.search_time import SEARCH_SECONDS
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.inferior.destination import may_write
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.library.checked_model import ModelToCheck, reference_of
from lockstep.workbench.library.listening import Listener, Warned
from lockstep.workbench.library.recordings import judged_recording
from lockstep.workbench.library.verdict import Verdict
from lockstep.workbench.models.opening import refuse_dump
from lockstep.workbench.paths import new_session_path, session_of, sessions_directory
from lockstep.workbench.references.cache import prune

#: Bytes that sessions of checks may take which nobody named a file for.
UNNAMED_BYTES = 2 << 30

#: Texts, and token ids: of one prompt, or of several.
Texts = str | Sequence[str]
Ids = Sequence[int] | Sequence[Sequence[int]] | Sequence[str]
#: Known bugs that are switched on: {"load_bias": "false"}, or ["load_bias=false"].
FaultWords = Mapping[str, str] | Sequence[str]


def check(
    target: str | Path,
    *,
    prompt: Texts | None = None,
    ids: Ids | None = None,
    chat: bool = False,
    prompt_tokens: int | None = None,
    tp: int = 1,
    ep: int = 1,
    steps: int = 8,
    faults: FaultWords | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    floor: str = "auto",
    reference: str = "transformers",
    load: str = "direct",
    weights: str = "dequantised",
    batch_invariant: bool = False,
    chunk: int | None = None,
    replay_routing: str | None = None,
    model: str | Path | None = None,
    golden: str | Path | None = None,
    branch: int = 0,
    save: str | Path | None = None,
    spare: Path | None = None,
    timeout: float = 60.0,
    start_timeout: float = 300.0,
    listen: str = "",
    progress: Listener | None = None,
) -> Verdict:
    """Hold a model on Lockstep's engine, or a recording (RUN.session), against a reference, tap by tap.

    A model is run on `prompt` or `ids` (of one or several; None: something that any model can be checked on, of
    `prompt_tokens` tokens, or, None, of as many as go beyond the windows of a small model) for `steps` decode steps,
    `chunk` tokens of a prompt a pass (None: all), on `tp` ranks, `ep` groups of which divide the experts, and recorded
    to `save` (None: among the user's sessions); where that cannot be written, to `spare`, and the verdict's `lost` has
    why. `replay_routing`: "ids" or "weights" of the reference's experts, forced onto one more run; the verdict's event
    shows what that changes. `reference` is "transformers" or "llama.cpp"; `floor` "fixed" judges by constants in place
    of the reference's own noise. Of a recording `model` is the checkpoint (None: the one it names), `golden` a
    reference of the same tokens, `branch` what is judged; `save` is a copy that has the verdicts.

    EngineError, SessionError, DiagnosisError and UsageError state what could not be done.
    """
    heard = Warned(progress)
    words = {"prompt": prompt, "ids": ids, "prompt_tokens": prompt_tokens, "faults": faults}
    if (recording := session_of(str(target))) is not None:
        _refuse(
            words
            | {
                "tp": tp != 1,
                "ep": ep != 1,
                "chunk": chunk,
                "replay_routing": replay_routing,
                "floor": floor != "auto",
                "reference": reference != "transformers",
            }
        )
        saved = may_write(Path(save)) if save is not None else None
        result = judged_recording(recording, _word(model), _path(golden), True, branch, device, heard)
        if saved is not None:
            store_judged(recording, branch, result, saved)
        return Verdict(result, warnings=tuple(heard.warnings))
    _refuse_recording(target, model, golden)
    heard.report("opening the model")
    if floor not in ("auto", "fixed"):
        raise UsageError(f"floor is auto or fixed, not {floor!r}")
    library = reference_of(reference, "reference")
    forced = None if replay_routing is None else _forced(replay_routing)
    asked = ModelToCheck.of(
        str(target), texts=texts_of(prompt), ids=ids_of(ids), chat=chat, prompt_tokens=prompt_tokens, steps=steps,
        faults=words_of(faults), tp=tp, ep=ep,
        device=device, dtype=dtype, load=load, weights=weights, batch_invariant=batch_invariant, chunk=chunk,
        timeout=timeout, start_timeout=start_timeout, listen=listen,
    )  # fmt: skip
    place = _place(asked, save)

    def routed(inferior: Inferior, recorded: Reference, found: CheckResult) -> CheckResult:
        return (
            found
            if forced is None
            else routing_replay.replay_routing(inferior, recorded, found, forced, heard.count)
        )

    result = _judged_model(
        asked, place, spare, heard, lambda: asked.reference(heard, library, floor == "auto"), routed
    )
    if save is None and not result.lost:
        _prune(place)
    return Verdict(result, asked.opened.name, asked.in_words(), place, tuple(heard.warnings))


def diagnose(
    target: str | Path,
    *,
    model: str | Path | None = None,
    golden: str | Path | None = None,
    reference: bool = True,
    branch: int = 0,
    prompt: Texts | None = None,
    ids: Ids | None = None,
    chat: bool = False,
    prompt_tokens: int | None = None,
    tp: int = 1,
    ep: int = 1,
    steps: int = 8,
    faults: FaultWords | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    chunk: int | None = None,
    save: str | Path | None = None,
    timeout: float = 60.0,
    start_timeout: float = 300.0,
    search_seconds: float = SEARCH_SECONDS,
    reproduce: bool | None = None,
    progress: Listener | None = None,
) -> Verdict:
    """Name what is wrong with a recording (RUN.session), or with a model on Lockstep's engine.

    Of a recording: `model`, `golden` and `branch` as in `check`; without `reference` none is recorded, and operations
    are judged on their own inputs alone; the search for causes takes `search_seconds` at most; `reproduce` puts
    them into the reference, None: unless that takes longer than finding them. A model is run as by
    `check`, and what the evidence names is confirmed by running again: with faults switched off, on one rank,
    in chunks, in a batch.

    EngineError, SessionError, DiagnosisError and UsageError state what could not be done.
    """
    heard = Warned(progress)
    if (recording := session_of(str(target))) is not None:
        _refuse(
            {"prompt": prompt, "ids": ids, "prompt_tokens": prompt_tokens, "faults": faults, "chunk": chunk}
        )
        result = judged_recording(
            recording,
            _word(model),
            _path(golden),
            reference,
            branch,
            device,
            heard,
            search_seconds,
            reproduce,
        )
        return Verdict(result, warnings=tuple(heard.warnings))
    _refuse_recording(target, model, golden)
    heard.report("opening the model")
    asked = ModelToCheck.of(
        str(target), texts=texts_of(prompt), ids=ids_of(ids), chat=chat, prompt_tokens=prompt_tokens, steps=steps,
        faults=words_of(faults), tp=tp, ep=ep,
        device=device, dtype=dtype, chunk=chunk, timeout=timeout, start_timeout=start_timeout,
    )  # fmt: skip

    def confirmed(inferior: Inferior, recorded: Reference, found: CheckResult) -> CheckResult:
        return confirm(inferior, recorded, found, heard.count)

    place = _place(asked, save)
    result = _judged_model(asked, place, None, heard, lambda: asked.reference(heard), confirmed)
    if result.event.verdict == "diverged":
        result = replace(result, event=with_runs(result.event, asked.suite(heard).compare_runs()))
        heard.clear()
    if save is None and not result.lost:
        _prune(place)
    return Verdict(result, asked.opened.name, asked.in_words(), place, tuple(heard.warnings))


def store_judged(recording: Path, branch: int, result: CheckResult, path: Path) -> None:
    """A copy of a recording at `path` with its verdicts; the recording itself stays as it is."""
    copy(recording, path, overwrite=True)
    store_judgement(path, branch, verdict_rows(result.judgement.taps, branch), result.event)


def _judged_model(
    asked: ModelToCheck,
    place: Path,
    spare: Path | None,
    listener: Listener,
    reference: Callable[[], Reference],
    closer: Callable[[Inferior, Reference, CheckResult], CheckResult] = lambda inferior, recorded, found: (
        found
    ),
) -> CheckResult:
    """Run a model, recorded to `place`, and judge it; `closer` looks further while the engine still runs."""
    with ScratchFolder.make("check") as scratch:
        recorded = reference()
        with asked.engine(listener) as inferior:
            result = asked.check(inferior, recorded, place, spare or scratch.path / "check.session", listener)
            result = closer(inferior, recorded, result)
    listener.clear()
    return result


def _forced(word: str) -> Forced:
    """UsageError for what cannot be forced."""
    found: Forced | None = next((one for one in get_args(Forced) if one == word), None)
    if found is None:
        raise UsageError(f"replay_routing is ids or weights, not {word!r}")
    return found


def _place(asked: ModelToCheck, save: str | Path | None) -> Path:
    """Where the run of a model is recorded."""
    if save is not None:
        return may_write(Path(save))
    return new_session_path(f"check-{asked.opened.name}-tp{asked.config.tp}")


def _prune(place: Path) -> None:
    prune(sessions_directory(), keep=place, limit=UNNAMED_BYTES, names="check-*.session")


def _refuse(given: Mapping[str, object]) -> None:
    """UsageError where anything is given that a recording has settled."""
    if any(given.values()):
        raise UsageError(f"{', '.join(given)} are for a model: a recording is read as it is")


def _refuse_recording(target: str | Path, model: object, golden: object) -> None:
    """UsageError where a model is asked for what only a recording has."""
    refuse_dump(str(target))
    if model is not None or golden is not None:
        given = printable(str(target), 200)
        raise UsageError(
            f"model and golden are for a recording: give RUN.session in place of {given}, or a model alone"
        )


def texts_of(prompt: Texts | None) -> list[str] | None:
    """Prompts as the command line has them."""
    return None if prompt is None else [prompt] if isinstance(prompt, str) else list(prompt)


def ids_of(ids: Ids | None) -> list[str] | None:
    """Token ids as the command line has them: "1,2,3", a prompt each."""
    if not ids:
        return None
    rows = [ids] if isinstance(ids[0], int) else ids
    return [row if isinstance(row, str) else ",".join(map(str, row)) for row in rows]  # type: ignore[arg-type]


def words_of(faults: FaultWords | None) -> list[str] | None:
    """Faults as the command line has them: "NAME=VALUE"."""
    if faults is None:
        return None
    return (
        [f"{name}={value}" for name, value in faults.items()] if isinstance(faults, Mapping) else list(faults)
    )


def _word(model: str | Path | None) -> str | None:
    return None if model is None else str(model)


def _path(golden: str | Path | None) -> Path | None:
    return None if golden is None else Path(golden)
