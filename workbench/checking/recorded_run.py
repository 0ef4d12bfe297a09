"""A recording judged and explained without an engine: a stranger's run, or one of ours whose model is no longer there.

The checkpoint shows what each operation should have given on the inputs that the recording holds. A golden session
beside it, given or recorded now, shows where the run as a whole leaves the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from lockstep.engine.errors import CheckpointError, ConfigError
from lockstep.sessions import Session
from lockstep.sessions.errors import IdsMismatch
from lockstep.sessions.keeping import keeping
from lockstep.sessions.limits import UNLIMITED, LimitExceeded
from lockstep.sessions.text import clean
from lockstep.workbench.checking.contradiction import contradiction, excused
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.checking.reach import not_reached
from lockstep.workbench.checking.verdicts import summary
from lockstep.workbench.demo.checkpoints import demo_path
from lockstep.workbench.diagnosis.by_statistics import MovedTap, first_moved
from lockstep.workbench.diagnosis.cache_causes import unknown_rows, with_cache_causes
from lockstep.workbench.diagnosis.diagnose import Explanation, diagnose
from lockstep.workbench.diagnosis.findings import first_explained
from lockstep.workbench.diagnosis.judgement import DiagnosisError, Judgement, TapVerdict
from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.naming import named
from lockstep.workbench.diagnosis.one_thread import one_thread_for
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.reconcile import agreed, reason_of, reconciled
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.diagnosis.search_time import SEARCH_SECONDS
from lockstep.workbench.diagnosis.verdict import judge
from lockstep.workbench.foreign.importing import dropped_lines
from lockstep.workbench.inferior.identity import checkpoint_digest
from lockstep.workbench.judgements.coverage import Coverage, coverage
from lockstep.workbench.judgements.golden_event import Divergence, last_golden_event
from lockstep.workbench.references.golden import record_golden, record_pair
from lockstep.workbench.references.request import DTYPES, GoldenSequence, ReferenceFailure
from lockstep.workbench.words.plain_text import plural

#: Where to find out which checkpoint a recording is of.
NEEDS_MODEL = "give its checkpoint: lockstep diagnose {name} --model MODEL"

#: Of what was not recorded so much is listed.
_SHOWN = 4

#: What is reported while a reference is recorded: how many passes of how many.
Counted = Callable[[int, int], None]


def diagnose_recording(
    session: Session,
    checkpoint: Path,
    *,
    branch: int = 0,
    golden: Path | None = None,
    floor: Path | None = None,
    record: bool = True,
    device: str = "cpu",
    seconds: float = SEARCH_SECONDS,
    reproducing: bool | None = False,
    progress: Counted = lambda done, of: None,
    warn: Callable[[str], None] = lambda text: None,
    report: Callable[[str], None] = lambda text: None,
    found_first: Callable[[str], None] = lambda text: None,
) -> CheckResult:
    """Judge and explain a branch of a recording of `checkpoint`; `golden` and `floor` as in `Reference`.

    Without a golden session a reference by transformers is recorded on its tokens, unless `record` is False: then
    operations are judged on their own inputs alone. `seconds` and `reproducing` as in `diagnose`; `report` hears what
    is done now, `found_first` what is wrong first, once that is known. DiagnosisError where the recording holds too
    little to judge; CheckpointError and ConfigError from the checkpoint.
    """
    facts = Facts.of(checkpoint, session.meta.config.dtype or "float32")
    if golden is None and record:
        report("looking for a reference on the recorded tokens")
        golden, floor = _reference(session, branch, checkpoint, facts.dtype, device, progress, warn)
    with ExitStack() as stack:
        truth = None if golden is None else stack.enter_context(Session.open(golden, UNLIMITED))
        noise = None if floor is None else stack.enter_context(Session.open(floor, UNLIMITED))
        stack.enter_context(keeping(session, truth, noise))
        stack.enter_context(one_thread_for(session, branch))
        rests = coverage(session, truth, branch=branch)
        report("judging each operation on its own inputs, and naming causes")
        found = diagnose(
            session, facts, golden=truth, floor=noise, branch=branch, seconds=seconds, reproducing=reproducing,
            report=first_explained(found_first),
        )  # fmt: skip
        found = replace(found, unjudged=(*found.unjudged, *unknown_rows(session)))
        if not found.judged and not found.ended and session.meta.foreign is None:
            raise DiagnosisError(
                f"{session.path.name} holds too little to judge any operation{_why(found)}; record it with "
                f"`--capture full`{_known_before(session, branch)}"
            )
        causes, moved = list(found.causes), None
        judgement = _alone(session, branch, found)
        if truth is not None and found.judged:
            report("comparing with the reference")
            try:
                judgement, found = agreed(judge(Recordings.of(session, truth, noise, branch), facts), found)
                judgement = excused(judgement, found, contradiction(truth, noise))
                causes = named(found, session, truth, judgement.first_divergence, facts, branch)
            except LimitExceeded as error:
                judgement = unsure(judgement, f"not held against the reference to the end: {error}")
        if session.meta.foreign is not None:
            lacking = "" if found.judged else f"no operation could be judged{_why(found)}"
            if truth is None and "embed" in rests.absent:
                lacking = lacking or "without `embed` nothing proves whose rows these are"
            judgement = supported(judgement, rests, lacking)
            causes = causes if judgement.verdict == "diverged" else []
            if (rests.by_statistics or rests.statistics_only) and truth is not None:
                moved = first_moved(
                    Recording(session, branch), Recording(truth), None if noise is None else Recording(noise)
                )
                if moved is not None and not _before(session, judgement.first_divergence, moved):
                    judgement = supported(judgement, rests, moved.in_words())
        causes, reported = with_cache_causes(causes, found.wrong, judgement.first_divergence, session, branch)
        judgement = replace(
            judgement, notes=(*judgement.notes, *reported, *not_reached(session, facts.model, branch))
        )
        if lost := _not_recorded(session, branch):
            judgement = replace(judgement, notes=(*judgement.notes, lost))
    name = "" if golden is None else golden.name
    rules = next((one.rules for one in session.branches() if one.id == branch), session.meta.rules)
    event = summary(judgement, None, causes, len(session.steps(branch)), rules, name)
    event = msgspec.structs.replace(event, coverage=rests, untried=found.untried)
    return CheckResult(judgement, event, session.path, golden, moved=moved)


def checkpoint_of(session: Session) -> Path:
    """The checkpoint that a recording names, if it is on this machine and holds the recorded tensors.

    Nothing is fetched, and a file that is not that checkpoint is not used: a stranger may have written the session.
    DiagnosisError states what is needed instead."""
    reported, digest = session.meta.model.path or session.meta.model.name, session.meta.model.checkpoint
    needs = NEEDS_MODEL.format(name=session.path.name)
    path = demo_path(reported) or Path(reported)
    if not reported or not path.is_absolute() or not path.exists():
        named = f" ({clean(reported, limit=200)} is not there)" if reported else ""
        raise DiagnosisError(f"which checkpoint {session.path.name} is of is not known{named}; {needs}")
    try:
        found = checkpoint_digest(path)
    except (CheckpointError, ConfigError, OSError) as error:
        raise DiagnosisError(f"{clean(reported, limit=200)} is no checkpoint: {error}; {needs}") from error
    if digest and found != digest:
        raise DiagnosisError(f"{clean(reported, limit=200)} holds other tensors than were recorded; {needs}")
    return path


def _reference(
    session: Session,
    branch: int,
    checkpoint: Path,
    dtype: str,
    device: str,
    progress: Counted,
    warn: Callable[[str], None],
) -> tuple[Path | None, Path | None]:
    """Golden and floor on the recording's tokens; neither where they cannot be recorded, which is warned of."""
    known = next((one for one in DTYPES if one == dtype), None)
    try:
        sequences, last = read_tokens(session, branch)
        chunk = session.meta.config.chunk_tokens
        if known is None:
            raise IdsMismatch(f"no reference computes in {dtype}")
        if known == "float64":  # of which the truth itself is no noise
            truth = record_golden(
                checkpoint, sequences, last, known, device=device, chunk=chunk, progress=progress, warn=warn
            )
            return truth, None
        return record_pair(
            checkpoint, sequences, last, known, device=device, chunk=chunk, progress=progress, warn=warn
        )
    except (IdsMismatch, ReferenceFailure) as error:
        warn(f"no reference, so that operations are judged on their own inputs alone: {error}")
        return None, None


def read_tokens(session: Session, branch: int) -> tuple[list[GoldenSequence], int]:
    """What each sequence reads: its prompt in one pass, or in chunks where the run states so, then a token a step; and
    the last step. IdsMismatch for a run of another form, which no reference can be forced onto."""
    read: dict[int, list[int]] = {}
    prompts: dict[int, int] = {}  # tokens of each that was read whole
    steps, chunk = session.steps(branch), session.meta.config.chunk_tokens
    for step in steps:
        for one in session.step(step, branch).sequences:
            longest = 1 if one.seq in prompts else chunk or len(one.ids)
            if (step == 0) != (one.seq not in read) or len(one.ids) > longest:
                raise IdsMismatch(
                    f"sequence {one.seq} reads {len(one.ids)} tokens at step {step}: a reference has a prefill of all "
                    "prompts from step 0 on and then one token a step"
                )
            read.setdefault(one.seq, []).extend(one.ids)
            if chunk is None or one.emitted is not None:
                prompts.setdefault(one.seq, len(read[one.seq]))
    if sorted(read) != list(range(len(read))) or not read:
        raise IdsMismatch(f"its sequences are numbered {sorted(read)}: a reference counts them from 0")
    sequences = [
        GoldenSequence(tuple(ids[: prompts.get(seq)]), tuple(ids[prompts.get(seq, len(ids)) :]))
        for seq, ids in sorted(read.items())
    ]
    return sequences, len(steps) - 1


def supported(judgement: Judgement, rests: Coverage, lacking: str = "") -> Judgement:
    """The judgement of a foreign run as far as what it rests on carries it: "inconclusive" where rows are not proved to
    be the same ones, and where nothing wrong was found in what is not all of the run."""
    if lacking:
        judgement = replace(judgement, notes=(*judgement.notes, lacking))
    if rests.misplaced:
        return replace(
            judgement, verdict="inconclusive", first_divergence=None, overflow=None, taps=(),
            max_abs_logits=math.nan, tokens_identical=None, mismatches=(),
        )  # fmt: skip
    if (rests.lacking or lacking) and judgement.verdict != "diverged":
        return replace(judgement, verdict="inconclusive")
    return judgement


def unsure(judgement: Judgement, why: str) -> Judgement:
    """The judgement with what it lacks: "inconclusive" unless something is wrong."""
    found = replace(judgement, notes=(*judgement.notes, why))
    return found if found.verdict == "diverged" else replace(found, verdict="inconclusive")


def _not_recorded(session: Session, branch: int) -> str:
    """What of the run is not in the recording, so that no verdict is of it; "" for nothing."""
    foreign = session.meta.foreign
    lost = [] if foreign is None else [*dropped_lines(foreign)]
    for step in session.steps(branch):
        lost += [f"step {step}: {words}" for words in session.step(step, branch).dropped]
    shown = [clean(words, limit=200) for words in lost[:_SHOWN]]
    more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    return f"not compared, as it is not in the recording: {'; '.join(shown)}{more}" if lost else ""


def _before(session: Session, first: Divergence | None, moved: MovedTap) -> bool:
    """Whether what is known to be wrong comes before what its statistics show."""
    if first is None:
        return False
    known, shown = ((at.step, session.tap(at.tap).index) for at in (first, moved))
    return known <= shown


def _known_before(session: Session, branch: int) -> str:
    """Where a verdict is that was found when more was at hand."""
    event = last_golden_event(session, branch)
    if event is None:
        return ""
    shown = f"`lockstep replay {clean(str(session.path), limit=500)} --batch --ex golden` shows it"
    return f". It keeps the verdict of an earlier comparison, {event.verdict}: {shown}"


def _why(found: Explanation) -> str:
    return f": {found.unjudged[0].tap}: {found.unjudged[0].reason}" if found.unjudged else ""


def _alone(session: Session, branch: int, found: Explanation) -> Judgement:
    """A judgement without a reference: whether operations are right on their own inputs. "inconclusive" where none
    is wrong, but some could not be judged."""
    wrong = sorted(
        ((step, one.order, seq, one) for one in found.wrong for step in one.steps for seq in one.seqs),
        key=lambda place: place[:3],
    )
    taps = [
        TapVerdict(
            one.tap, step, seq, "fail", one.max_abs, one.rel_l2, ratio=one.ratio, reason=reason_of(one)
        )
        for step, _, seq, one in wrong
    ]
    notes = [f"no reference: {plural(found.judged, 'operation')} judged on their own inputs alone"]
    if found.unjudged:
        one = found.unjudged[0]
        notes.append(
            f"{plural(len(found.unjudged), 'operation')} could not be judged, as {one.tap}: {one.reason}"
        )
    blank = Judgement(
        "inconclusive" if found.unjudged else "match", math.nan, None, None, tuple(taps), session.ranks, "floor",
        notes=tuple(notes), reference="",
    )  # fmt: skip
    return reconciled(blank, found)
