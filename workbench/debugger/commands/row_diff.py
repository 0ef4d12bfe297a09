"""Two recordings row by row, as text: the first operation with equal inputs and unequal output, and how far apart."""

from __future__ import annotations

from lockstep.sessions import Session
from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import TableResult
from lockstep.workbench.debugger.commands.judged_diff import ComparisonTable, ComparisonVerdict
from lockstep.workbench.debugger.errors import DebuggerError
from lockstep.workbench.diagnosis.row_comparison import Place, RowComparison, TapRows, compare_rows
from lockstep.workbench.diagnosis.row_sides import RowSide
from lockstep.workbench.judgements.coverage import Coverage, coverage
from lockstep.workbench.words.plain_text import plural

_COLUMNS = ["tap", "rows", "by itself", "first", "equal bits", "max abs", "max ulp", "rel l2", "NMSE", "PCC", "cosine",
            "KL"]  # fmt: skip
#: Taps that only one of the two has, of which so many are named.
_NAMED = 4


def row_diff(a: Session, branch_a: int, b: Session, branch_b: int) -> ComparisonTable | None:
    """Every tap that differs in some row, and what that rests on; None where not both hold rows of any tap.

    DebuggerError where no token is the same."""
    first, second = RowSide(a, branch_a), RowSide(b, branch_b)
    if not set(first.taps) & set(second.taps):
        return None
    found = compare_rows(first, second)
    if not found.rows:
        raise DebuggerError("the two read different tokens from the first on: no diff of them means anything")
    rests = coverage(a, b, branch=branch_a, other=branch_b) if a.meta.foreign or b.meta.foreign else None
    unsure = doubt(rests, found)
    title = "\n".join([*([f"inconclusive: {unsure}"] if unsure else []), *summary_lines(a, b, found)])
    verdict: ComparisonVerdict = "inconclusive" if unsure else "diverged" if found.differing else "match"
    rows = [_row(one) for one in found.differing]
    return ComparisonTable(title, _COLUMNS, rows, "no row differs", verdict, rests)


def difference_rows(found: RowComparison, most: int | None = None) -> TableResult:
    """Every tap that differs, in the order of execution; or `most` of them, for which those that differ by themselves
    come first."""
    shown = list(found.differing)
    if most is not None:
        shown = sorted(shown, key=lambda one: not one.own)[:most]
    return TableResult("", _COLUMNS, [_row(one) for one in shown], empty="no row differs")


def summary_lines(a: Session, b: Session, found: RowComparison) -> list[str]:
    """What the comparison found, and what it leaves out."""
    sequences = plural(found.sequences, "sequence")
    lines = [f"{plural(found.rows, 'row')} of {sequences} read the same tokens; {in_words(found)}"]
    for seq, position in found.parted:
        lines.append(f"sequence {seq} goes on with another token at position {position}")
    for names, which in ((found.only_first, a), (found.only_second, b)):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            reported = ", ".join(clean(name, limit=60) for name in names[:_NAMED])
            lines.append(f"only in {clean(which.path.name, limit=60)}: {reported}{more}")
    for name, why in found.different[:_NAMED]:
        lines.append(f"not compared: {clean(name, limit=60)}: {why}")
    return lines


def in_words(found: RowComparison) -> str:
    """The first operation that differs by itself."""
    if not found.differing:
        how = "by their statistics, which is no proof" if found.by_statistics_alone else "bit for bit"
        return f"{plural(len(found.taps), 'tap')} equal {how}"
    differ = f"{len(found.differing)} of {plural(len(found.taps), 'tap')} differ"
    one = found.first
    if one is None:
        return differ
    return (
        f"{differ}; the first with equal inputs and unequal output: {clean(one.tap, limit=80)}, "
        f"in {one.own} of {plural(one.rows, 'row')}, first {_place(one.first_own)}"
    )


def doubt(rests: Coverage | None, found: RowComparison) -> str:
    """Why no verdict can be given; "" where one can."""
    if rests is not None and rests.misplaced:
        return rests.misplaced
    # Equal hashes of rows are as good as the rows.
    if (
        rests is not None
        and not found.differing
        and (rests.ranks < rests.of_ranks or not rests.statistics_only)
    ):
        return rests.lacking
    if found.by_statistics_alone and not found.differing:
        return "statistics only: that they are equal proves nothing"
    return ""


def _place(place: Place | None) -> str:
    return "" if place is None else f"at sequence {place[0]}, position {place[1]}"


def _row(one: TapRows) -> list[object]:
    found = one.metrics
    reported: list[object] = (
        [None] * 4 if found is None else [found.max_abs, found.max_ulp, found.rel_l2, one.nmse]
    )
    first = one.first_own or one.first
    return [
        one.tap,
        f"{one.differing}/{one.rows}",
        one.own or None,
        None if first is None else f"{first[0]}:{first[1]}",
        one.kind if one.equal_bits is None else f"{100 * one.equal_bits:.4g} %",
        *reported,
        one.pcc,
        None if found is None else found.cosine,
        one.kl,
    ]
