"""Another engine along the axes: its own command run again and again, with one argument of the engine changed.

The command is the user's and stays as it is. What a variant is, is asked of the engine where it takes its arguments
(`LOCKSTEP_TAP_ARGUMENTS`), and reported as what was changed for the recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.engine.config import DTYPES
from lockstep.sessions import Session
from lockstep.sessions.keeping import keeping
from lockstep.sessions.limits import UNLIMITED
from lockstep.sessions.meta import ForeignMeta
from lockstep.sessions.text import clean
from lockstep.workbench.attach.launch import AttachError, TapRequest, attach, how_it_ended
from lockstep.workbench.checking.axes.axis import AxisName, AxisResult
from lockstep.workbench.checking.axes.comparison import Variants
from lockstep.workbench.checking.axes.row_judge import KnownRows, RowJudge
from lockstep.workbench.checking.axes.token_comparison import compare_tokens
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.row_sides import RowSide
from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.rows import UNFINISHED
from lockstep.workbench.library.engine_variants import EngineVariant, variants_of, why_none
from lockstep.workbench.library.imported import import_attached
from lockstep.workbench.library.listening import Listener
from lockstep.workbench.models.opening import OpenedModel
from lockstep.workbench.words.plain_text import plural


@dataclass(slots=True)
class CommandAxes:
    """A command whose runs are recorded in `folder`; `opened` is its checkpoint, by which operations are judged. `own`
    are the variants that its user names, by axis."""

    command: Sequence[str]
    asked: TapRequest
    folder: Path
    opened: OpenedModel | None
    listener: Listener
    own: Mapping[AxisName, Sequence[EngineVariant]] = field(default_factory=dict)
    _count: int = 0
    _known: KnownRows = field(default_factory=dict)  # of the command as it is

    def run(self, axes: Sequence[AxisName]) -> tuple[str, list[AxisResult]]:
        """What ran in words, and each variant. AttachError and ForeignDumpError where the command as it is cannot be
        recorded."""
        base = self._record(None, "as it is")
        with Session.open(base, UNLIMITED) as session:  # which we have just written
            engine, ranks, rows = session.meta.source, session.ranks, _rows(session)
        found = []
        for axis in axes:
            variants = [*variants_of(engine, axis, ranks), *self.own.get(axis, ())]
            if not variants:
                found.append(AxisResult(axis, axis, "not tried", why=why_none(engine, axis, ranks)))
            found += [self._along(axis, one, base) for one in variants]
        return f"{clean(engine, limit=80)}, tp={ranks}: {rows} rows", found

    def _along(self, axis: AxisName, variant: EngineVariant, base: Path) -> AxisResult:
        try:
            path = self._record(variant, f"{axis}: {variant.summary}")
        except (AttachError, ForeignDumpError) as error:
            return AxisResult(axis, variant.summary, "not tried", why=str(error))
        with (
            Session.open(base, UNLIMITED) as first,
            Session.open(path, UNLIMITED) as second,
            first.walk(second),
            keeping(first, second),
        ):
            foreign = first.meta.foreign or ForeignMeta()
            unknown = variant.words and not foreign.caches  # the engine does not report on hits
            if axis == "prefix" and not foreign.shared and not unknown:
                why = "no request found its beginning in the cache: send some that share a prefix of whole blocks"
                return AxisResult(axis, variant.summary, "not tried", why=why)
            sides = RowSide(first), RowSide(second)
            if variant.untapped:
                return _by_tokens(axis, variant, *sides)
            found = Variants(*sides, self._judges(first, second)).compare(axis, variant.summary)
            return found if found.verdict == "bug" else _unless_lost(found, first, second)

    def _judges(self, first: Session, second: Session) -> tuple[RowJudge, RowJudge] | None:
        dtype = first.meta.config.dtype
        if self.opened is None or dtype not in DTYPES:
            return None
        facts = Facts.of(self.opened.path, dtype)
        return RowJudge.of(first, facts, self._known), RowJudge.of(second, facts)

    def _record(self, variant: EngineVariant | None, summary: str) -> Path:
        """The session of one run; None: of the command as it is."""
        variant = variant or EngineVariant(summary)
        arguments, words = variant.arguments, variant.words
        self._count += 1
        place = self.folder / str(self._count)
        place.mkdir()
        self.listener.note(f"run {self._count} of the command: {summary}")
        request = replace(self.asked, arguments=tuple(arguments.items()))
        if variant.untapped:
            request = replace(request, capture="ids", only=())
        attached = attach([*self.command, *words], place / "dump", request, place)
        if attached.stopped:
            raise AttachError(f"the command was ended by {attached.stopped}")
        if arguments and not any(name in text for name in arguments for text in attached.changed):
            raise AttachError(
                "the command runs so already, its engine has no such argument, or it never came to that"
            )
        target = place / "run.session"
        import_attached(attached, target, None if variant.untapped else self.opened, self.listener)
        if ended := how_it_ended(attached.code):
            self.listener.note(f"the command {ended}; what it did until then is compared")
        return target


def _by_tokens(axis: AxisName, variant: EngineVariant, base: RowSide, other: RowSide) -> AxisResult:
    """Of the engine as its command starts it, which shows its tokens alone."""
    if (other.session.meta.foreign or ForeignMeta()).mode == "eager":
        return AxisResult(axis, variant.summary, "not tried", why="the command runs eagerly as it is")
    found = compare_tokens(axis, variant.summary, base, other)
    return found if found.verdict == "bug" else _unless_lost(found, base.session, other.session)


def _unless_lost(found: AxisResult, first: Session, second: Session) -> AxisResult:
    """Inconclusive where rows of the command as it is have no counterpart: they prove nothing."""
    rows = _rows(first)
    if found.why or found.rows >= rows:
        return found
    why = f"only {found.rows} of {plural(rows, 'row')} are in both runs"
    if second.meta.foreign is not None and (dropped := second.meta.foreign.dropped.get(UNFINISHED, 0)):
        why += f": {plural(dropped, 'row')} of the variant were dropped ({UNFINISHED})"
    return replace(found, verdict="inconclusive", why=why)


def _rows(session: Session) -> int:
    """How many rows there are."""
    return sum(len(one.ids) for step in session.steps() for one in session.step(step).sequences)
