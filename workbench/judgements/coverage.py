"""What a verdict on a recording rests on: which rows are proved to be the same, which taps, which ranks.

    aligned 412/412 rows · 17 of 21 taps × 28 layers · 2/2 ranks · recorded eager

Rows are aligned where the same token has the bit-equal embedding on both sides: until that is proved, no difference
between two recordings means anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.engine.graph import outside_of, parts_in
from lockstep.engine.taps.flow import is_known
from lockstep.engine.taps.names import layer_of, layer_taps, local_name
from lockstep.sessions import Session
from lockstep.sessions.dtypes import rounded
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.meta import PASS_STATISTICS, ROW_STATISTICS, ForeignMeta, is_companion
from lockstep.sessions.slices import apply, parse
from lockstep.sessions.text import clean
from lockstep.workbench.words.plain_text import plural

#: How far rows of a scaled embedding may be from that factor, relative: low precision rounds the factor too.
_SCALED = 1e-2
#: From one number of a dtype to the next, relative.
_STEPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_OF_FLOAT64 = 2.0**-52


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared. `rows` have tokens on both sides (of one recording alone: all), `aligned` of them have the
    same embedding; None: not proved, `alignment` shows why, or what else there is to know. Of the `of_taps` taps that a
    layer has `taps` were recorded, in `layers` layers, of which `by_statistics` left statistics of some alone.
    `shared` rows of a prefix cache are
    among them. `misplaced` is why no verdict can be given at all, `lacking` why nothing can be called right. `unknown`
    taps have names of no operation."""

    rows: int = 0
    aligned: int | None = None
    alignment: str = ""
    taps: int = 0
    of_taps: int = 0
    layers: int = 0
    by_statistics: int = 0
    ranks: int = 1
    of_ranks: int = 1
    mode: str = ""
    statistics_only: bool = False
    absent: tuple[str, ...] = ()
    inferred: dict[str, str] = {}
    requests_inferred: bool = False
    misplaced: str = ""
    lacking: str = ""
    shared: int = 0
    unknown: tuple[str, ...] = ()

    def in_words(self) -> str:
        """The line that begins every verdict."""
        rows = (
            f"{plural(self.rows, 'row')}"
            if self.aligned is None
            else f"aligned {self.aligned}/{self.rows} rows"
        )
        if self.shared:
            rows += f", {self.shared} from the prefix cache"
        if self.alignment:
            rows += f" ({self.alignment})"
        layers = plural(self.layers, "layer")
        if self.by_statistics and not self.statistics_only:
            some = "" if self.by_statistics == self.layers else f", {self.by_statistics} of them"
            layers += f"{some} by statistics"
        parts = [
            rows,
            f"{self.taps} of {plural(self.of_taps, 'tap')} × {layers}",
            f"{self.ranks}/{plural(self.of_ranks, 'rank')}",
            *([f"recorded {self.mode}"] if self.mode else []),
            *(["statistics only"] if self.statistics_only else []),
        ]
        return " · ".join(parts)

    def remarks(self) -> list[str]:
        """What else is to be known of it, a line each."""
        lines = []
        if self.absent:
            lines.append(f"absent: {', '.join(self.absent)}")
        if self.unknown:
            more = f" and {len(self.unknown) - _SHOWN} more" if len(self.unknown) > _SHOWN else ""
            lines.append(
                f"names of no known operation, which are kept and not judged: {', '.join(self.unknown[:_SHOWN])}{more} "
                "(docs/tap-format.md lists the known ones)"
            )
        if self.inferred:
            reported = [f"{tap} {layout}" for tap, layout in self.inferred.items()]
            more = f" and {len(reported) - _SHOWN} more" if len(reported) > _SHOWN else ""
            lines.append(f"layouts inferred, not recorded: {', '.join(reported[:_SHOWN])}{more}")
        if self.requests_inferred:
            lines.append("which rows are whose was determined by positions: the dump names no requests")
        return lines


#: Endings of taps that hold statistics of the tap without them.
_STATISTICS = (ROW_STATISTICS, PASS_STATISTICS)
#: Of inferred layouts and of unknown names so many are listed.
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What one session has: the taps of which there is anything, those of them that left tensors, the ranks that did,
    and what it lacks."""

    taps: set[str]
    tensors: set[str]
    ranks: tuple[int, ...]
    lacking: str
    foreign: ForeignMeta

    @classmethod
    def of(cls, session: Session, branch: int) -> _Recorded:
        foreign = session.meta.foreign or ForeignMeta(ranks=tuple(range(session.ranks)))
        captured = session.captured_taps(branch)
        measured = {name.removesuffix(end) for name in captured for end in _STATISTICS if name.endswith(end)}
        tensors = {name for name in captured if not is_companion(name)}
        missing = sorted(set(range(session.ranks)) - set(foreign.ranks))
        lacking = ""
        if missing:
            lacking = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} left no pass"
        elif foreign.statistics_only:
            lacking = "the recording has statistics only: record the tensors (`--capture full`)"
        elif foreign.unknown:
            lacking = f"{plural(foreign.unknown, 'row')} of the prefix cache were computed for other tokens"
        taps = (tensors | measured) - set(session.meta.absent)
        return cls(taps, taps & tensors, foreign.ranks, lacking, foreign)


def coverage(
    session: Session, reference: Session | None = None, *, branch: int = 0, other: int = 0
) -> Coverage:
    """What a verdict on `branch` of `session` against `reference` (its branch `other`) rests on: where that is another
    recording, on what both have."""
    mine = _Recorded.of(session, branch)
    sides = [mine]
    if reference is not None and reference.meta.foreign is not None:
        sides.append(_Recorded.of(reference, other))
    seen = set.intersection(*(side.taps for side in sides))
    layers = {layer for tap in seen if (layer := layer_of(tap)) is not None}
    whole: set[str] = set.intersection(*(side.tensors for side in sides))
    local = {local_name(tap) for tap in seen if layer_of(tap) is not None}
    parts = parts_in(local)
    names = layer_taps(parts)
    wanted = [name for name in names if not name.endswith(".partial") or session.ranks > 1]
    absent = [one.tap for one in outside_of(parts) if one.tap not in seen]
    absent += [name for name in wanted if name not in local]
    rows, aligned, alignment = _aligned(session, branch, reference, other)
    inferred = {tap: layout for side in sides for tap, layout in side.foreign.inferred.items()}
    return Coverage(
        rows=rows,
        aligned=aligned,
        alignment=alignment,
        taps=len(set(wanted) & local),
        of_taps=len(wanted),
        layers=len(layers),
        by_statistics=len(layers & {layer_of(tap) for tap in seen - whole if not is_companion(tap)}),
        ranks=len(mine.ranks),
        of_ranks=session.ranks,
        mode=clean(
            " and ".join(dict.fromkeys(side.foreign.mode for side in sides if side.foreign.mode)), limit=80
        ),
        statistics_only=any(side.foreign.statistics_only for side in sides),
        absent=tuple(absent),
        inferred={clean(tap, limit=80): clean(layout, limit=40) for tap, layout in inferred.items()},
        requests_inferred=any(side.foreign.requests_inferred for side in sides),
        misplaced="" if reference is None else _misplaced(rows, aligned, alignment),
        lacking="; ".join(side.lacking for side in sides if side.lacking),
        shared=mine.foreign.shared - mine.foreign.unknown,
        unknown=tuple(
            clean(tap, limit=80) for tap in sorted(seen) if not (is_companion(tap) or is_known(tap))
        ),
    )


def _misplaced(rows: int, aligned: int | None, alignment: str) -> str:
    if aligned is None:
        return f"that the rows are the same is not proved: {alignment}"
    if aligned < rows:
        return f"only {aligned} of {rows} rows have the embedding of their token: {alignment}"
    return "" if rows else "no row is in both recordings"


def _aligned(
    session: Session, branch: int, reference: Session | None, other: int
) -> tuple[int, int | None, str]:
    """Rows, how many of them are proved to be the reference's, and what there is to report of it."""
    mine: list[NDArray[Any]] = []
    theirs: list[NDArray[Any]] = []
    rows, known = 0, True
    for step in session.steps(branch):
        reported = {one.seq: one for one in session.step(step, branch).sequences}
        if reference is None or step not in reference.steps(other):
            rows += sum(len(one.ids) for one in reported.values()) if reference is None else 0
            continue
        others = {one.seq: one for one in reference.step(step, other).sequences}
        for seq in sorted(reported.keys() & others.keys()):
            if list(reported[seq].ids) != list(others[seq].ids):
                continue
            part = _shared_part(session, branch, step, seq)
            count = len(parse(part)[0]) if part else len(reported[seq].ids)  # type: ignore[arg-type]  # chosen rows
            rows += count
            pair = _embeddings((session, branch), (reference, other), step, seq, part)
            known = known and pair is not None and len(pair[0]) == len(pair[1]) == count
            if known and pair is not None:
                mine.append(pair[0])
                theirs.append(pair[1])
    if reference is None:
        return rows, None, ""
    if not known or not mine:
        return rows, None, "`embed` is not in both recordings, row by row"
    step_of_dtype = max((_STEPS[dtype] for dtype in _dtypes(session, reference)), default=_OF_FLOAT64)
    return rows, *_same_rows(np.concatenate(mine), np.concatenate(theirs), step_of_dtype)


def _embeddings(
    a: tuple[Session, int], b: tuple[Session, int], step: int, seq: int, part: str
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """The embeddings of both sides, each rounded as the other is; where one has statistics alone the extremes of each
    row. Of the first side those in `part` are known."""
    left, right = _rows(*a, "embed", step, seq, part), _rows(*b, "embed", step, seq)
    right = right if right is None else apply(right, part)
    if left is None or right is None:
        left, right = (
            _rows(*side, "embed" + ROW_STATISTICS, step, seq) if rows is None else _extremes(rows)
            for side, rows in ((a, left), (b, right))
        )
        if left is None or right is None or min(left.shape[1], right.shape[1]) < 2:
            return None
        left, right = left[:, :2], right[:, :2]
    for dtype in _dtypes(a[0], b[0]):
        left, right = rounded(left, dtype), rounded(right, dtype)
    return (left, right) if left.shape[1] == right.shape[1] else None


def _dtypes(*sessions: Session) -> list[str]:
    """Those that the sides' numbers are rounded to."""
    reported = [session.meta.config.dtype or "float32" for session in sessions]
    return [dtype for dtype in reported if dtype in _STEPS]


def _shared_part(session: Session, branch: int, step: int, seq: int) -> str:
    """The rows of a step that were computed for its tokens, where others come from a cache of other tokens; "": all."""
    foreign = session.meta.foreign
    if foreign is None or not foreign.unknown or not session.has_tap("embed"):
        return ""
    parts = session.parts("embed", step=step, seq=seq, branch=branch).values()
    return next((one.slice for one in parts if one.slice.startswith("{")), "")


def _rows(
    session: Session, branch: int, tap: str, step: int, seq: int, part: str = ""
) -> NDArray[Any] | None:
    if not session.has_tap(tap):
        return None
    try:
        found = session.rebuilt(tap, step=step, seq=seq, branch=branch, slice=part).array
    except LayoutError:
        return None
    return found if found is not None and found.ndim == 2 and found.size else None


def _extremes(rows: NDArray[Any]) -> NDArray[Any]:
    return np.stack([rows.min(axis=1), rows.max(axis=1)], axis=1)


def _same_rows(mine: NDArray[Any], theirs: NDArray[Any], step: float) -> tuple[int, str]:
    """How many rows are equal, or are so but for one factor; and what to report of it. Equal to the bit, or to
    two roundings to a dtype with that relative `step`: an embedding that the model multiplies by a number of its own
    has that number's, and the product's."""
    wide, right = mine.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore"):
        equal = np.asarray((np.abs(wide - right) <= step * np.abs(right)).all(axis=1))
    if equal.all():
        return len(equal), ""
    power = (right**2).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        factors = (wide * right).sum(axis=1) / power
        usual = float(np.median(factors))
        apart = np.abs(wide - usual * right).max(axis=1) / np.abs(usual * right).max(axis=1)
    if np.isfinite(usual) and abs(usual - 1) > _SCALED and bool((apart <= _SCALED).all()):
        return len(equal), f"embedding times {usual:.4g}"
    others = {row.tobytes() for row in np.ascontiguousarray(theirs.astype(mine.dtype))}
    strange = [row for row in np.ascontiguousarray(mine)[~equal] if row.tobytes() in others]
    what = (
        "the others have the embedding of another token, so rows are misplaced"
        if strange
        else "the others have no token's: another checkpoint, another dtype, or an embedding that is wrong"
    )
    return int(equal.sum()), what
