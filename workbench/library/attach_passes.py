"""The runs of a command that `attach` makes: one, or one for statistics and then closer ones; one without a tap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from markupsafe import Markup

from lockstep.engine.config import EngineConfig
from lockstep.engine.run.estimates import LeftBehind, PassSize, captured_bytes
from lockstep.engine.taps.names import model_taps
from lockstep.sessions import Session
from lockstep.sessions.copy import copy
from lockstep.sessions.keeping import keeping
from lockstep.sessions.text import clean
from lockstep.workbench.attach.launch import ALWAYS, Attached, AttachError, TapRequest, attach, how_it_ended
from lockstep.workbench.checking.closer_look import first_look, further_look
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.checking.same_run import SameRun, same_run
from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.library import html
from lockstep.workbench.library.imported import ImportedRun, import_attached
from lockstep.workbench.library.listening import Listener
from lockstep.workbench.library.recordings import judged_recording
from lockstep.workbench.library.verdict import Verdict
from lockstep.workbench.models.opening import OpenedModel
from lockstep.workbench.settings import session_limits

_AGAIN = "the command is run again (a server needs the same requests as before, and is ended as before, as by ctrl+c)"


@dataclass(frozen=True, slots=True)
class PassReport:
    """One run of the command: what was kept of it, and what that showed."""

    kept: str
    found: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class AttachedRuns:
    """What came of the runs: the last that left something, what its session holds, and (with a model) its verdict.
    `text` shows whether the tokens are those of the command without a tap, `other_text` that they are not."""

    attached: Attached
    imported: ImportedRun
    result: CheckResult | None
    passes: tuple[PassReport, ...] = ()
    text: str = ""
    other_text: bool = False
    command: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def session(self) -> Path:
        """The recording, for `lockstep.open`."""
        return self.imported.session

    @property
    def verdict(self) -> Verdict | None:
        """How the model judges it; None where none was given."""
        return None if self.result is None else Verdict(self.result, warnings=self.warnings)

    @property
    def exit_code(self) -> int:
        """The command's, as a shell counts."""
        return self.attached.exit_code

    @property
    def judged(self) -> CheckResult:
        """The verdict, where there is a model."""
        assert self.result is not None, "there is a model to compare with"
        return self.result

    def noted(self, found: str, listener: Listener) -> AttachedRuns:
        """With what the last pass showed, which is reported."""
        *before, last = self.passes
        listener.note(f"pass {len(self.passes)}: {found}")
        return replace(self, passes=(*before, replace(last, found=found)))

    def unsure(self, why: str) -> AttachedRuns:
        """With a verdict that is not given where nothing wrong was found. What was found is wrong all the same: a pass
        is judged by its own rows, against a reference on its own tokens."""
        if self.result is None:
            return self
        event = self.result.event
        verdict = "inconclusive" if event.verdict == "match" else event.verdict
        event = msgspec.structs.replace(event, verdict=verdict, notes=(*event.notes, why))
        return replace(self, result=replace(self.result, event=event))

    def to_json(self) -> dict[str, object]:
        """Plain values: what `--json` prints."""
        reported = self.imported.to_json() | {"command": list(self.command), "code": self.attached.code}
        if self.text:
            reported["text"] = self.text
        if self.passes:
            reported["passes"] = [{"kept": one.kept, "found": one.found} for one in self.passes]
        return reported if self.result is None else reported | {"judged": self.result.to_json()}

    def __repr__(self) -> str:
        verdict = "not judged" if self.verdict is None else repr(self.verdict)
        return f"<AttachedRuns {clean(str(self.session))}: {clean(self.imported.coverage.in_words())}; {verdict}>"

    def _repr_html_(self) -> str:
        remarks = [("note", line) for line in (*self.imported.lines(), self.text) if line]
        passes = [(f"pass {i}", f"{one.kept}: {one.found}") for i, one in enumerate(self.passes, 1)]
        reported = [("session", str(self.session)), *passes, *remarks]
        verdict = Markup("" if self.verdict is None else self.verdict._repr_html_())
        return html.block(html.heading(self.imported.coverage.in_words()), verdict, html.lines(reported))


@dataclass(frozen=True, slots=True)
class RepeatedCommand:
    """Runs `command` as often as it takes. The last run's session is `target`; `dumps` is where ranks write, `scratch`
    holds what is needed for a while. `model` is the checkpoint that runs are held against."""

    command: Sequence[str]
    target: Path
    dumps: Path
    scratch: Path
    model: str | None = None
    opened: OpenedModel | None = None
    listener: Listener = field(default_factory=Listener)

    def once(self, asked: TapRequest) -> AttachedRuns:
        """One run, judged if there is a model."""
        return self._run(asked, self.dumps)

    def closer(self, asked: TapRequest) -> AttachedRuns:
        """A run that keeps statistics of every row. Where these leave the reference, another that keeps the tensors
        around that place as well; and where the place turns out to be before these, a last one."""
        listener = self.listener
        listener.note(
            "pass 1 keeps statistics and a hash of every row; where they leave the reference, the command is run again "
            "for the tensors around that place (--once: one run that keeps all tensors)"
        )
        runs = self._pass(1, asked, (), "statistics of everything")
        look = first_look(runs.judged, self._layers(), self._size())
        for number in (2, 3):
            runs = runs.noted(look.why, listener)
            if not look.tensors:
                return runs
            if runs.attached.stopped:
                listener.note(f"the command is not run again: {runs.attached.stopped} ended it")
                return runs
            listener.note(f"pass {number} keeps {look.summary}: {_AGAIN}")
            earlier = self.scratch / f"pass{number - 1}.session"
            copy(self.target, earlier)
            try:
                again = self._pass(number, asked, look.tensors, look.summary)
            except (AttachError, ForeignDumpError) as error:
                listener.note(f"pass {number}: {error}; what pass {number - 1} recorded is kept")
                return runs
            runs = replace(again, passes=(*runs.passes, *again.passes))
            same = self._same(earlier)
            listener.note(f"pass {number}: {same.in_words()}")
            if same.other_tokens:
                why = f"the runs of the command read other tokens: {same.other_tokens}"
                return runs.noted(why, listener).unsure(why)
            look = further_look(runs.judged, look)
        return runs.noted(look.why, listener)

    def as_started(self, asked: TapRequest) -> Path | None:
        """A run of the engine as it is: a session of the tokens that it read. None where none are seen."""
        listener = self.listener
        listener.note("first without the tap, as the command starts it: its tokens alone are noted")
        path = self.scratch / "as-started.session"
        try:
            attached = attach(
                self.command,
                self.scratch / "as-started",
                replace(asked, capture="ids", only=()),
                self.scratch,
            )
            import_attached(attached, path, None, self.listener)
        except (AttachError, ForeignDumpError) as error:
            listener.note(f"its tokens are not compared: {error}")
            return None
        listener.note(f"and now with the tap: {_AGAIN}")
        return path

    def compared(self, runs: AttachedRuns, as_started: Path) -> AttachedRuns:
        """The runs with a word on whether the engine generates the same without a tap. Where it does not, what was
        recorded may lack what is wrong."""
        same = self._same(as_started)
        with Session.open(as_started, session_limits()) as session:
            mode = session.meta.foreign.mode if session.meta.foreign is not None else ""
        without = f"without the tap ({mode or 'as started'})"
        if not same.other_tokens:
            return replace(runs, text=f"{without} {same.in_words()}")
        changed = "; ".join(runs.attached.changed) or "nothing of the engine was changed for the recording"
        why = f"{without} the command generates another text: {same.other_tokens}; with the tap: {changed}"
        return replace(runs, text=why, other_text=True).unsure(why)

    def _pass(self, number: int, asked: TapRequest, tensors: tuple[str, ...], summary: str) -> AttachedRuns:
        request = replace(asked, capture="stats", tensors=(*ALWAYS, *tensors))
        return replace(self._run(request, self.dumps / f"pass{number}"), passes=(PassReport(summary),))

    def _run(self, asked: TapRequest, dump: Path) -> AttachedRuns:
        attached = attach(self.command, dump, asked, self.scratch)
        imported = import_attached(attached, self.target, self.opened, self.listener)
        if ended := how_it_ended(attached.code):
            self.listener.note(f"the command {ended}; what it did until then is recorded")
        result = None
        if self.model is not None:
            result = judged_recording(self.target, self.model, None, True, 0, "cpu", self.listener)
        self.listener.clear()
        return AttachedRuns(attached, imported, result)

    def _same(self, earlier: Path) -> SameRun:
        limits = session_limits()
        with (
            Session.open(earlier, limits) as first,
            Session.open(self.target, limits) as run,
            keeping(first, run),
        ):
            return same_run(first, run)

    def _size(self) -> int:
        """About the bytes that all tensors of the run would take, as float32 and of one rank: passes hold each row
        once, whatever other rows they hold."""
        assert self.opened is not None, "there is a model to compare with"
        with Session.open(self.target, session_limits()) as session:
            sequences = [one for step in session.steps() for one in session.step(step).sequences]
            lengths = [PassSize(len(one.ids), max(one.positions, default=0) + 1) for one in sequences]
            everything = LeftBehind(full=range(len(model_taps(self.opened.config, 1))))
        return captured_bytes(self.opened.config, EngineConfig(dtype="float32"), everything, lengths)

    def _layers(self) -> int:
        with Session.open(self.target, session_limits()) as session:
            return session.meta.model.num_layers or 0
