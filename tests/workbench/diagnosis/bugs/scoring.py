"""What the diagnosis says of a recording, and whether that is right. Reads nothing but what judging and explaining
return: this is the one place that knows their form."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.taps.names import layer_of, local_name
from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.recorded_run import diagnose_recording
from lockstep.workbench.judgements.cause import UNNAMED, Cause
from lockstep.workbench.judgements.golden_event import Divergence
from tests.workbench.diagnosis.bugs.bug import CACHES, Bug, Place
from tests.workbench.diagnosis.bugs.recording import Recorded

#: What vLLM, SGLang and others have in their attention kernel.
_INSIDE = ("attn.scores", "attn.probs", *CACHES)
#: Confidence under which a cause is reported with reservation.
SURE = 0.5
#: named: the first cause has the right class and place; misleading: it has not, and says so without reservation;
#: unnamed: no cause, or with reservation; missed: no divergence.
Outcome = Literal["named", "unnamed", "misleading", "missed"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What was reported of a recording."""

    verdict: str
    first: Divergence | None
    causes: tuple[Cause, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """`worded`: named, and the sentence says what is wrong. `why`: what is not right."""

    outcome: Outcome
    placed: bool
    worded: bool
    why: str
    printed: str


def diagnose(
    engine: Path,
    golden: Path,
    floor: Path | None,
    checkpoint: Path,
    *,
    reproducing: bool = False,
    fused: bool = False,
) -> Answer:
    """Judge a recording and explain what is wrong with it; `fused`: from what an engine shows whose attention, with its
    cache, is one kernel."""
    with Session.open(engine, UNLIMITED) as ours:
        if fused:
            hidden = (tap.name for tap in ours.taps if local_name(tap.name) in _INSIDE)
            ours.meta.absent.update(dict.fromkeys(hidden, "it is inside of the attention kernel"))
        result = diagnose_recording(ours, checkpoint, golden=golden, floor=floor, reproducing=reproducing)
    event = result.event
    return Answer(event.verdict, event.first_divergence, event.causes, event.notes)


def diagnose_recorded(recorded: Recorded, *, reproducing: bool = False, fused: bool = False) -> Answer:
    paths = recorded.engine, recorded.golden, recorded.floor, recorded.checkpoint
    return diagnose(*paths, reproducing=reproducing, fused=fused)


def as_fused(bug: Bug, recorded: Recorded) -> Bug:
    """Where the bug shows first if nothing inside of the attention is recorded: at its context, of a cache's heads in
    those of the queries that read them."""
    place = bug.place
    if not set(place.taps) & set(_INSIDE):
        return bug
    heads = place.heads
    if set(place.taps) <= set(CACHES):
        model, source = open_checkpoint(recorded.checkpoint)
        source.close()
        each = model.num_heads // model.num_kv_heads
        heads = tuple(head * each + i for head in heads for i in range(each))
    return replace(bug, place=replace(place, taps=(*place.taps, "attn.context"), heads=heads))


def score(bug: Bug, answer: Answer) -> Score:
    """The answer held against the bug. Of a control every cause, and the verdict "diverged" alone, is misleading, and
    silence is `named`."""
    reported = [cause for cause in answer.causes if cause.kind != UNNAMED]
    stated = " | ".join(f"{cause.name}: {cause.in_words()}" for cause in answer.causes[:3])
    stated = stated or (answer.first.in_words() if answer.first else "")
    if bug.harmless:
        accused = any(map(sure, reported)) or answer.verdict == "diverged"
        return Score("misleading" if accused else "named", True, True, "accused" if accused else "", stated)
    if answer.first is None and not reported:
        without = next((note for note in answer.notes if _reported_without_effect(bug, note)), "")
        if without:  # all that follows is right, as where keys and values stand in the same other order
            return Score("named", True, True, "reported as a note, without effect", without)
        return Score("missed", False, False, f"verdict {answer.verdict}", stated)
    placed = answer.first is not None and _placed(bug.place, answer.first)
    if not reported:
        return Score("unnamed", placed, False, "no cause", stated)
    first, *others = reported
    wrong = _wrong(bug, first, answer)
    if not wrong:
        worded = re.search(bug.words, first.text, re.IGNORECASE) is not None
        return Score("named", placed, worded, "" if worded else f"words, not {bug.words}", stated)
    equals = [cause for cause in others if cause.alternative]
    reserved = not sure(first) or any(not _wrong(bug, cause, answer) for cause in equals)
    return Score("unnamed" if reserved else "misleading", placed, False, wrong, stated)


def sure(cause: Cause) -> bool:
    """Whether it is said without reservation."""
    return cause.confidence is None or cause.confidence >= SURE


def class_of(cause: Cause) -> str:
    return cause.kind


def _reported_without_effect(bug: Bug, note: str) -> bool:
    """Whether a note says what was done, and at a tap at which it was."""
    where, _, what = note.partition("has no effect here: ")[2].partition(": ")
    kinds = {kind.rpartition("_")[2] for kind in bug.place.taps}
    return any(kind in where for kind in kinds) and re.search(bug.words, what, re.IGNORECASE) is not None


def _placed(place: Place, first: Divergence) -> bool:
    layer = first.layer
    right = layer == (place.layers or (0,))[0] or (place.layers is None and layer is None)
    ranks = not place.ranks or not first.ranks or set(first.ranks) == set(place.ranks)
    return local_name(first.tap) in place.taps and right and first.step == place.step and ranks


def _wrong(bug: Bug, cause: Cause, answer: Answer) -> str:
    """What is wrong with a cause's class or place; "" for nothing."""
    place, tap = bug.place, cause.tap or (answer.first.tap if answer.first else "")
    if class_of(cause) not in bug.accepted:
        return f"class {class_of(cause)}, not {'/'.join(bug.accepted)}"
    if local_name(tap) not in place.taps:
        return f"at {tap}, not {'/'.join(place.taps)}"
    layers = cause.layers or ((found,) if (found := layer_of(tap)) is not None else ())
    if layers and (place.layers or (0,))[0] != min(layers):
        return f"layers {list(layers)}, not {list(place.layers or ())}"
    if layers and place.layers and not set(layers) <= set(place.layers):
        return f"layers {list(layers)}, not {list(place.layers)}"
    ranks = cause.ranks or (answer.first.ranks if answer.first and not cause.tap else ())
    if place.ranks and not set(ranks) <= set(place.ranks):  # one of several causes may speak of some
        return f"ranks {list(ranks)}, not {list(place.ranks)}"
    if place.ranks and not ranks and "rank" not in cause.in_words():
        return f"all ranks, not {list(place.ranks)}"
    if place.heads and not set(cause.heads) <= set(place.heads):
        return f"heads {list(cause.heads)}, not {list(place.heads)}"
    if place.heads and not cause.heads and cause.tap and "head" not in cause.in_words():
        return f"all heads, not {list(place.heads)}"
    steps = cause.steps or ((answer.first.step,) if answer.first and not cause.tap else ())
    if steps and min(steps) != place.step:
        return f"from step {min(steps)}, not {place.step}"
    return ""
