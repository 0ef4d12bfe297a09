"""Causes of wrong attention that the integers of the cache show: whose rows were read.

They come before what was found by numbers, and only where attention is wrong by itself: a wrong row that changes
nothing accuses nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from lockstep.engine.taps.names import local_name
from lockstep.sessions import Session
from lockstep.sessions.meta import CACHE_ROWS
from lockstep.workbench.diagnosis.causes import taps_in_words
from lockstep.workbench.diagnosis.findings import WrongOperation
from lockstep.workbench.diagnosis.operations.site import Unjudged
from lockstep.workbench.judgements.cause import UNNAMED, Cause, numbers_in_words
from lockstep.workbench.judgements.golden_event import Divergence
from lockstep.workbench.views.provenance.findings import CacheAudit, CacheFinding, cache_audit, request_name
from lockstep.workbench.views.provenance.ledger import Misuse
from lockstep.workbench.words.plain_text import plural

#: Operations that read the cache.
_READERS = ("attn.scores", "attn.probs", "attn.context", "attn.k_cache", "attn.v_cache")
#: What else a wrong position shows in.
_TURNED = ("attn.q_rope", "attn.k_rope")
#: Further requests that meet the same.
_OTHERS = 4


def with_cache_causes(
    causes: Sequence[Cause],
    wrong: Sequence[WrongOperation],
    first: Divergence | None,
    session: Session,
    branch: int = 0,
) -> tuple[list[Cause], tuple[str, ...]]:
    """The causes with those of the cache before them, and what else to report of it. `wrong` are the operations
    that err on their own inputs, `first` is where the run leaves the reference."""
    report = cache_audit(session, branch)
    if report is None:
        return list(causes), ()
    if report.lacking:
        return list(causes), (f"whose rows of the cache were read is not known: {report.lacking}",)
    if not report.findings:
        return list(causes), (
            f"each row of the cache that was read is of the same tokens ({_extent(report)})",
        )
    found, rest, notes = [], list(causes), []
    for finding in report.findings:
        places = _places(finding, session)
        at = [one for one in wrong if shows(finding.kind, one.tap) and _meets(one, places)]
        if at or (first is not None and shows(finding.kind, first.tap) and (first.step, first.seq) in places):
            taps = [one.tap for one in at] or [first.tap if first is not None else ""]
            ours = [one for one in rest if one.tap in taps]
            found.append(_cause(finding, taps, places, ours, session))
            rest = [one for one in rest if one not in ours or one.kind != UNNAMED]
            rest = [replace(one, alternative=True) if one in ours else one for one in rest]
        else:
            notes.append(f"of the cache, without an effect on what was judged: {finding.in_words()}")
    return [*found, *rest], tuple(notes)


def unknown_rows(session: Session) -> Iterator[Unjudged]:
    """What reads rows of the prefix cache that the session has not, as they were computed for other tokens."""
    foreign = session.meta.foreign
    if foreign is not None and foreign.unknown:
        yield Unjudged(
            CACHE_ROWS,
            0,
            f"{plural(foreign.unknown, 'row')} of the prefix cache were computed for other tokens",
        )


def _extent(report: CacheAudit) -> str:
    return f"{plural(report.rows, 'row')} written in {report.passes} passes"


def shows(kind: Misuse, tap: str) -> bool:
    """Whether a wrong access may show in an operation."""
    name = local_name(tap)
    return name in _READERS or (kind == Misuse.POSITION and name in _TURNED)


def _places(finding: CacheFinding, session: Session) -> set[tuple[int, int]]:
    """The steps and sequences in which the rows were read."""
    prompts = {seq: len(one.prompt_ids) for seq, one in session.meta.sequences.items()}
    return {
        (max(0, one.stop - prompts[one.request]), one.request)
        for one in finding.accesses
        if one.request in prompts
    }


def _meets(one: WrongOperation, places: set[tuple[int, int]]) -> bool:
    return any(step in one.steps and seq in one.seqs for step, seq in places)


def _cause(
    finding: CacheFinding,
    taps: Sequence[str],
    places: set[tuple[int, int]],
    others: Sequence[Cause],
    session: Session,
) -> Cause:
    """The cause at the operations that read the rows; `others` were found there by numbers."""
    steps = tuple(sorted({step for step, _ in places}))
    seqs = sorted({seq for _, seq in places})
    layers = session.meta.model.num_layers or 0
    known = next((one for one in others if one.kind == UNNAMED), None)
    place = (
        f"{taps_in_words(taps, layers)}, steps {numbers_in_words(steps)}, sequences {numbers_in_words(seqs)}"
    )
    return Cause(
        name=f"cache_{finding.kind}", text=finding.in_words(), kind="cache", tap=taps[0], place=place,
        layers=finding.layers, ranks=finding.ranks, steps=steps,
        evidence=(*_evidence(finding), *([] if known is None else [known.text])),
    )  # fmt: skip


def _evidence(finding: CacheFinding) -> Iterator[str]:
    yield (
        f"block tables, slots and lengths as the engine handed them to attention, passes "
        f"{numbers_in_words(finding.passes)}; no numbers of the model"
    )
    others = finding.others()
    yield from others[:_OTHERS]
    if len(others) > _OTHERS:
        yield f"{len(others) - _OTHERS} more requests: {', '.join(map(request_name, finding.requests))}"
