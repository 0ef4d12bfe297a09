"""What one sentinel found on a whole branch: for the report, the Sentinels pane and the timeline."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.sessions import Session
from lockstep.sessions.text import clean
from lockstep.workbench.views import sentinels
from lockstep.workbench.views.sentinels import NAMES, SentinelFinding, SentinelKind
from lockstep.workbench.views.verdicts import first_failed, judged_of


@dataclass(frozen=True, slots=True)
class BranchSentinel:
    """One sentinel over a branch. `step` is where it first fired (None: nowhere in what was `looked` at), `what`
    states what was found, `ranks` are those that are wrong (empty: none in particular)."""

    kind: SentinelKind
    name: str
    branch: int
    step: int | None = None
    what: str = ""
    looked: str = ""
    tap: str = ""
    ranks: tuple[int, ...] = ()


def fired_at(session: Session, kind: SentinelKind, branch: int, step: int, found: SentinelFinding, looked: str = "",
             name: str = "") -> BranchSentinel:  # fmt: skip
    """The sentinel that fired at `step` as `found` states."""
    tap = "" if found.tap is None else clean(session.taps[found.tap].name, limit=120)
    return BranchSentinel(kind, name or NAMES[kind], branch, step, found.words, looked, tap, found.ranks)


def why_blind(session: Session, branch: int, kind: SentinelKind) -> str:
    """Why a sentinel can see nothing on a branch of a session; "" where it can."""
    if kind == "desync" and not any(session.replicas.groups):
        return "there is one rank" if session.ranks < 2 else "no replicated taps"
    if kind == "cache" and session.meta.foreign is not None:
        return "no cached lengths were recorded"
    return "not compared" if kind == "golden" and not judged_of(session, branch) else ""


def left_golden(session: Session, branch: int) -> BranchSentinel | None:
    """Where a branch first left the golden reference."""
    judged = judged_of(session, branch)
    first, found = first_failed(judged), sentinels.left_golden(session, judged)
    if first is None or found is None:
        return None
    return fired_at(session, "golden", branch, first.step, found, "every judged step")
