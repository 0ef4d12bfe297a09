"""What is wrong by itself: each operation of a recording held against its own inputs, and what it computed instead.

A finding is one operation on some ranks, over all steps and sequences. Each is there because that operation, given
the inputs that the recording itself holds, did not give what it should have: so several bugs are found in one pass, and
none that only inherits an error is among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from lockstep.engine.taps.flow import is_known
from lockstep.sessions.limits import LimitExceeded
from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.hypotheses.setting import Setting
from lockstep.workbench.diagnosis.hypotheses.variant import Fit, cost
from lockstep.workbench.diagnosis.operations.deviation import Deviation
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.shares import head_offset
from lockstep.workbench.diagnosis.operations.site import Site, Unjudged
from lockstep.workbench.diagnosis.search import Search
from lockstep.workbench.diagnosis.search_time import SearchEnded, SearchTime


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A variant that was tried at a finding, without its numbers. `elements` is how many it had to reproduce with
    `parameters` fitted numbers; `residual` the share of the error's norm that it leaves, `ratio` that over the noise.
    """

    name: str
    kind: str
    text: str
    fitted: Mapping[str, object]
    parameters: int
    elements: int
    residual: float
    ratio: float
    accepted: bool
    everywhere: bool
    edits: tuple[Edit, ...] = ()
    setting: Setting | None = None

    @property
    def cost(self) -> int:
        return cost(self.parameters, self.ratio)

    @classmethod
    def of(cls, found: Fit, elements: int, site: Site) -> Hypothesis:
        one = found.variant
        return cls(
            one.name, one.kind, one.text, dict(one.fitted), one.parameters, elements, found.residual, found.ratio,
            found.accepted, found.everywhere, one.edits, Setting.of(site) if one.edits else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class WrongOperation:
    """An operation that is wrong on its own inputs. `order` is the tap's place in the forward pass; `heads` are numbers
    of the whole model. `example` is the worst element in words, with what it should have been. `tried` are the names of
    all variants that were; `hypotheses` those that explain it (`accepted`), then those that explain a part."""

    tap: str
    operation: str
    layer: int | None
    order: int
    ranks: tuple[int, ...]
    ratio: float
    single: float
    max_abs: float
    rel_l2: float
    steps: tuple[int, ...]
    seqs: tuple[int, ...]
    heads: tuple[int, ...]
    positions: tuple[int, ...]
    every_row: bool
    example: str
    hypotheses: tuple[Hypothesis, ...]
    tried: tuple[str, ...]
    shape: str = ""

    @property
    def accepted(self) -> tuple[Hypothesis, ...]:
        return tuple(one for one in self.hypotheses if one.accepted)


@dataclass(frozen=True, slots=True)
class Survey:
    """All operations of a recording: how many could be judged by tap, what was found, what could not be judged.
    `untried`: why not all hypotheses were tried, by the taps of which that is so; those that time left no judging of
    are `unjudged` too. `ended`: why it was not gone through to the end, "" where it was."""

    judged: Mapping[str, int]
    findings: tuple[WrongOperation, ...]
    unjudged: tuple[Unjudged, ...]
    untried: Mapping[str, str] = field(default_factory=dict)
    ended: str = ""


#: Hears of an operation that is wrong as soon as it is found.
Found = Callable[[WrongOperation], None]


def first_explained(report: Callable[[str], None]) -> Found:
    """Reports the first operation of which it is found what ran instead: "layers.0.attn.q_proj: … is not added"."""
    reported = False

    def found(finding: WrongOperation) -> None:
        nonlocal reported
        if finding.accepted and not reported:
            reported = True
            report(f"{finding.tap}: {finding.accepted[0].text}")

    return found


def survey(
    operations: Iterable[Site | Unjudged],
    taps: RecordedTaps,
    time: SearchTime | None = None,
    report: Found = lambda finding: None,
) -> Survey:
    """What is wrong among operations of a recording, and why, as far as there is time."""
    order = {tap.name: number for number, tap in enumerate(taps.recording.session.taps)}
    judged: dict[str, int] = {}
    found, unjudged, search, ended = [], [], Search(time or SearchTime()), ""
    try:
        for site in operations:
            search.time.check_judging()
            if isinstance(site, Unjudged):
                unjudged.append(site)
                continue
            deviation = site.deviation
            judged[site.tap] = judged.get(site.tap, 0) + len(site.ranks)
            if deviation is not None:
                found.append(_finding(site, deviation, order[site.tap], search))
                report(found[-1])
    except (SearchEnded, LimitExceeded) as error:
        ended, reached = str(error), {*judged, *(one.tap for one in unjudged)}
        left = [tap for tap in order if tap not in reached and taps.captured(tap) and is_known(tap)]
        unjudged += [Unjudged(tap, 0, ended) for tap in left]
    return Survey(judged, tuple(found), tuple(unjudged), search.ended, ended)


def _finding(site: Site, deviation: Deviation, order: int, search: Search) -> WrongOperation:
    found, tried = search.fits(site)
    elements = sum(int(scope.sum()) for scope in deviation.scopes)
    offset = head_offset(site) if deviation.heads is not None else 0
    max_abs, example = _worst(site)
    return WrongOperation(
        tap=site.tap,
        operation=site.operation,
        layer=site.layer,
        order=order,
        ranks=site.ranks,
        ratio=deviation.ratio,
        single=deviation.single,
        max_abs=max_abs,
        rel_l2=deviation.rel_l2,
        steps=tuple(sorted({step for step, _ in site.wrong_passes})),
        seqs=tuple(sorted({seq for _, seq in site.wrong_passes})),
        heads=tuple(head + offset for head in deviation.heads or ()),
        positions=tuple(sorted({row.position for row in deviation.rows})),
        every_row=deviation.every_row,
        example=example,
        hypotheses=tuple(Hypothesis.of(one, elements, site) for one in found),
        tried=tuple(tried),
        shape=deviation.shape,
    )


def _worst(site: Site) -> tuple[float, str]:
    """The largest difference, and where it is with what should have been there."""
    largest, words = -1.0, ""
    for part in site.parts:
        if not part.fits or not site.deviation or site.deviation.shape:
            continue
        error = part.error()
        if not error.size or not float(error.max()) > largest:
            continue
        where = np.unravel_index(int(error.argmax()), error.shape)
        largest = float(error[where])
        row = part.rows[min(int(where[site.token_axis]), len(part.rows) - 1)] if part.rows else None
        token = "" if row is None else f" (step {row.step}, position {row.position})"
        place = list(map(int, where))
        words = (
            f"element {place}{token} is {part.seen[where]:.6g}, its inputs give {part.expected[where]:.6g}"
        )
    return max(largest, 0.0), words
