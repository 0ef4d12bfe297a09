"""Another engine along the axes: its own command run again and again, with one argument of the engine changed.

The command is the user's and stays as it is. What a variant is, is asked of the engine where it takes its arguments
(`LOCKSTEP_TAP_ARGUMENTS`), and told as what was changed for the recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.engine.config import DTYPES
from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.sessions.meta import ForeignMeta
from lockstep.sessions.text import clean
from lockstep.workbench.attach.launch import AttachError, TapRequest, attach, how_it_ended
from lockstep.workbench.checking.axes.axis import AxisName, AxisResult
from lockstep.workbench.checking.axes.comparison import Variants
from lockstep.workbench.checking.axes.row_judge import RowJudge
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.row_sides import RowSide
from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.rows import UNFINISHED
from lockstep.workbench.library.imported import import_attached
from lockstep.workbench.library.listening import Listener
from lockstep.workbench.models.opening import OpenedModel
from lockstep.workbench.words.plain_text import plural

Arguments = Mapping[str, int | bool]


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """What an engine is asked for along one axis, and that in words: arguments that it is given whatever its command
    says, or `words` behind the command."""

    told: str
    arguments: Arguments = field(default_factory=dict)
    words: tuple[str, ...] = ()

    @classmethod
    def by_words(cls, words: Sequence[str]) -> EngineVariant:
        """The command with these words more."""
        return cls(f"with {' '.join(words)} = as started", words=tuple(words))


#: vLLM's arguments (`vllm.engine.arg_utils.EngineArgs`), by axis.
_VLLM: Mapping[AxisName, tuple[EngineVariant, ...]] = {
    "batch": (EngineVariant("one request at a time = as started", {"max_num_seqs": 1}),),
    "chunk": (  # a threshold for long prompts would hold only while several requests are there
        EngineVariant(
            "passes of 4 rows at most = as started",
            {"enable_chunked_prefill": True, "max_num_batched_tokens": 4, "max_num_seqs": 4},
        ),
    ),
    "prefix": (EngineVariant("without the prefix cache = with it", {"enable_prefix_caching": False}),),
    "tp": tuple(EngineVariant(f"tp {tp} = as started", {"tensor_parallel_size": tp}) for tp in (1, 2, 4)),
    "ep": (EngineVariant("experts among the ranks = as started", {"enable_expert_parallel": True}),),
}
_ENGINES: Mapping[str, Mapping[AxisName, tuple[EngineVariant, ...]]] = {"vllm": _VLLM}


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

    def run(self, axes: Sequence[AxisName]) -> tuple[str, list[AxisResult]]:
        """What ran in words, and each variant. AttachError and ForeignDumpError where the command as it is cannot be
        recorded."""
        base = self._record(None, "as it is")
        with Session.open(base, UNLIMITED) as session:  # which we have just written
            engine, ranks, rows = session.meta.source, session.ranks, _rows(session)
        known = _ENGINES.get(engine.split(" ")[0].lower(), {})
        found = []
        for axis in axes:
            variants = [
                one for one in known.get(axis, ()) if one.arguments.get("tensor_parallel_size") != ranks
            ]
            if axis == "ep" and ranks == 1:
                variants = []
            variants += self.own.get(axis, ())
            if not variants:
                found.append(AxisResult(axis, axis, "not tried", why=_why_not(engine, axis, ranks)))
            found += [self._along(axis, one, base) for one in variants]
        return f"{clean(engine, limit=80)}, tp={ranks}: {rows} rows", found

    def _along(self, axis: AxisName, variant: EngineVariant, base: Path) -> AxisResult:
        try:
            path = self._record(variant, f"{axis}: {variant.told}")
        except (AttachError, ForeignDumpError) as error:
            return AxisResult(axis, variant.told, "not tried", why=str(error))
        with (
            Session.open(base, UNLIMITED) as first,
            Session.open(path, UNLIMITED) as second,
            first.walk(second),
        ):
            foreign = first.meta.foreign or ForeignMeta()
            unknown = variant.words and not foreign.caches  # the engine does not tell of hits
            if axis == "prefix" and not foreign.shared and not unknown:
                why = "no request found its beginning in the cache: send some that share a prefix of whole blocks"
                return AxisResult(axis, variant.told, "not tried", why=why)
            sides = RowSide(first), RowSide(second)
            found = Variants(*sides, self._judges(first, second)).compare(axis, variant.told)
            return found if found.verdict == "bug" else _unless_lost(found, first, second)

    def _judges(self, first: Session, second: Session) -> tuple[RowJudge, RowJudge] | None:
        dtype = first.meta.config.dtype
        if self.opened is None or dtype not in DTYPES:
            return None
        facts = Facts.of(self.opened.path, dtype)
        return RowJudge.of(first, facts), RowJudge.of(second, facts)

    def _record(self, variant: EngineVariant | None, told: str) -> Path:
        """The session of one run; None: of the command as it is."""
        arguments, words = ({}, ()) if variant is None else (variant.arguments, variant.words)
        self._count += 1
        place = self.folder / str(self._count)
        place.mkdir()
        self.listener.note(f"run {self._count} of the command: {told}")
        request = replace(self.asked, arguments=tuple(arguments.items()))
        attached = attach([*self.command, *words], place / "dump", request, place)
        if attached.stopped:
            raise AttachError(f"the command was ended by {attached.stopped}")
        if arguments and not any(name in text for name in arguments for text in attached.changed):
            raise AttachError("the command runs so already, or its engine has no such argument")
        target = place / "run.session"
        import_attached(attached, target, self.opened, self.listener)
        if ended := how_it_ended(attached.code):
            self.listener.note(f"the command {ended}; what it did until then is compared")
        return target


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


def _why_not(engine: str, axis: AxisName, ranks: int) -> str:
    """Why an engine has no variant along an axis."""
    if axis == "ep" and ranks == 1:
        return "there is one rank"
    if axis in ("order", "preempt", "speculation"):
        return "which requests come when is the command's own: it cannot be asked of the engine"
    return f"{clean(engine, limit=80) or 'this engine'} cannot be asked for a variant of it: it is the command's own"
