"""The eight tools. Each carries out commands of the debugger's registry, or calls the library: there is no second way.

Their docstrings are what an agent reads of them.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence

from rich.console import Console

from lockstep.sessions.state import foreign_log
from lockstep.sessions.text import clean
from lockstep.workbench.checking.recorded_run import checkpoint_of
from lockstep.workbench.debugger.answers import Result, Stop
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.judgements import last_judgement
from lockstep.workbench.debugger.core.registry import commands, find
from lockstep.workbench.debugger.errors import CommandError
from lockstep.workbench.debugger.host.options import Launch
from lockstep.workbench.diagnosis.judgement import DiagnosisError
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.export.diagnosis_text import render_diagnosis
from lockstep.workbench.judgements.golden_event import GoldenEvent, plain
from lockstep.workbench.library import comparing, judging
from lockstep.workbench.library.verdict import Verdict
from lockstep.workbench.mcp.answers import answer, basis
from lockstep.workbench.mcp.roots import Roots
from lockstep.workbench.mcp.runs import OpenRuns, limited

_WIDTH = 100


class AgentTools:
    """The tools over what is open. Errors are those of the command line."""

    def __init__(self, roots: Roots) -> None:
        self._roots, self._runs = roots, OpenRuns()

    def close(self) -> None:
        """End all engines; sessions are kept."""
        self._runs.close()

    def open(
        self,
        target: str,
        prompt: str = "",
        chat: bool = False,
        tp: int = 1,
        dtype: str = "auto",
        faults: Sequence[str] = (),
        ids: Sequence[int] = (),
    ) -> str:
        """Open a recording (FILE.session or gallery/NAME) for replay, or start a model (`demo`, a Hugging Face
        directory, a .gguf file) on `tp` ranks before its first step, with `prompt` or, without a tokenizer, with token
        `ids`. `faults` lists known bugs to switch on (["mask=none"]).
        Returns the run's name, which other tools take as `run` (default: the one opened last)."""
        warnings: list[str] = []
        if target.startswith("gallery/") or target.endswith(".session"):
            if prompt or chat or tp != 1 or dtype != "auto" or faults or ids:
                raise UsageError(
                    "prompt, ids, chat, tp, dtype and faults are for a model: a recording is read as it is"
                )
            name = self._runs.replay(self._roots.recording(target))
        else:
            prompts = (prompt,) if prompt else ()
            rows = (",".join(map(str, ids)),) if ids else ()
            launch = Launch(self._roots.model(target), prompts, rows, chat, tp, "cpu", dtype, tuple(faults))
            name, warnings = self._runs.start(launch)
        debugger = self._runs.find(name)
        losses = [f"damaged: {one}" for one in debugger.session.losses]
        notes = [*losses, *filter(None, [foreign_log(debugger.session)]), *warnings]
        event = last_judgement(debugger)
        judged = (
            "never held against a reference"
            if event is None
            else f"held against a reference: {event.verdict}"
        )
        where = debugger.execute("where").to_text()
        steps = debugger.timeline.last(0) + 1
        lines = [f"{name}: {target}, {steps} steps recorded, {judged}", where, *notes]
        return answer("\n".join(lines), basis(debugger), run=name)

    def where(self, run: str = "") -> str:
        """Where the debugger stands: step, operation, token read and emitted, faults, breakpoints, ranks."""
        debugger = self._runs.find(run)
        parts = [debugger.execute(line) for line in ("where", "info ranks", "info breakpoints")]
        return _answered(debugger, "\n".join(part.to_text() for part in parts), parts[0])

    def step(
        self,
        command: str = "next",
        breakpoints: Sequence[str] = (),
        run: str = "",
        limit_seconds: float = 120.0,
    ) -> str:
        """Move: next [N] (tokens), step (layer), stepi (operation), finish, until TAP, goto STEP [TAP], continue,
        reverse-next, reverse-step, reverse-stepi, reverse-continue, origin (back to where an error began).
        `breakpoints` are set first: "break layers.2.attn.scores if step >= 1", "watch layers.*.attn.q_proj absmax >
        50", "catch nan", "delete 1". What still runs after `limit_seconds` is interrupted at an operation."""
        debugger = self._runs.find(run)
        for line in breakpoints:
            _allowed(line, ("breaking",), without=("commands",))
            debugger.execute(line)
        _allowed(command, ("running", "reversing"), also=("origin",))
        with limited(debugger, limit_seconds):
            result = debugger.execute(command)
        return _answered(debugger, result.to_text(), result)

    def show(self, what: str, run: str = "") -> str:
        """Look: print TAP[0, :8] [rank R] [step K], x TAP[…] (bits), frame TAP (statistics of each rank), topk [N],
        attn LAYER HEAD, lens, check (verdicts a layer), info ranks|kv|blocks|weights|toggles|breakpoints|taps [GLOB],
        help [COMMAND]. TAP is a name such as layers.0.attn.q_proj: `info taps` lists them."""
        debugger = self._runs.find(run)
        _allowed(what, ("inspection",), also=("check", "help"))
        result = debugger.execute(what)
        return _answered(debugger, result.to_text(), result)

    def compare(self, against: str = "golden", run: str = "", model: str = "") -> str:
        """Hold the run against `golden` (the reference by transformers on the same tokens, tap by tap; of a recording
        `model` names its checkpoint where it does not), a branch, another run, or another recording."""
        debugger = self._runs.find(run)
        if against != "golden":
            return self._difference(debugger, against)
        if debugger.executor is None and (model or last_judgement(debugger) is None):
            verdict = judging.check(
                debugger.session.path,
                model=self._checkpoint(debugger, model),
                branch=debugger.position.branch,
            )
            return _judged(debugger, verdict)
        text = debugger.call("golden").to_text()
        event = last_judgement(debugger)
        assert event is not None, "`golden` leaves a judgement or raises"
        remarks = [f"note: {one}" for one in event.remarks]
        return answer("\n".join([text, *remarks]), basis(debugger) | _judgement(event), verdict=event.verdict)

    def diagnose(self, run: str = "", model: str = "") -> str:
        """Name what is wrong and why: operation, layers, ranks, heads, steps, what was computed instead, the fix, how
        sure that is. Needs at least one step; of a recording `model` names its checkpoint where it does not."""
        debugger = self._runs.find(run)
        if debugger.executor is not None:
            debugger.call("diagnose")
        elif model or last_judgement(debugger) is None:
            verdict = judging.diagnose(
                debugger.session.path,
                model=self._checkpoint(debugger, model),
                branch=debugger.position.branch,
            )
            debugger.judged[debugger.position.branch] = verdict.event
        event = last_judgement(debugger)
        assert event is not None, "`diagnose` leaves a judgement or raises"
        return answer(_in_words(event), basis(debugger) | _judgement(event), causes=plain(event.causes))

    def branch(self, command: str = "branches", run: str = "") -> str:
        """Change the run on a new branch, or go to another: toggle FAULT VALUE, patch TAP[0, :8] = 0, patch TAP =
        golden, set temperature 0.7, branch NAME, branches, checkpoint, restart. `show` "info toggles" lists faults.
        A toggle runs both branches ahead and stops at the first different token."""
        debugger = self._runs.find(run)
        _allowed(command, ("changing",))
        result = debugger.execute(command)
        return _answered(debugger, result.to_text(), result)

    def export(self, kind: str, file: str, run: str = "") -> str:
        """Write the run to a new file: script, journal, html, svg, png, csv, json or junit."""
        debugger = self._runs.find(run)
        result = debugger.call("export", what=kind, file=str(self._roots.new_file(file)))
        return _answered(debugger, result.to_text(), result)

    def _difference(self, debugger: Debugger, against: str) -> str:
        if against.isdecimal() or any(line.name == against for line in debugger.timeline.lines.values()):
            result = debugger.call("diff", a=str(debugger.position.branch), b=against)
            return _answered(debugger, result.to_text(), result)
        other = self._runs.session_of(against) or self._roots.recording(against)
        found = comparing.diff(debugger.session.path, other, branch_a=debugger.position.branch)
        return answer(str(found), basis(debugger) | {"against": other.name}, verdict=found.verdict)

    def _checkpoint(self, debugger: Debugger, model: str) -> str:
        """The checkpoint that a recording is judged with: the one that was named, or that it names, if that lies under
        the roots."""
        if model:
            return self._roots.model(model)
        self._roots.check_named(debugger.session.meta.model)
        try:
            return str(checkpoint_of(debugger.session))
        except DiagnosisError as error:
            raise UsageError(f"{str(error).partition('; ')[0]}: give `model`, its checkpoint") from error


def _allowed(
    line: str, groups: Collection[str], also: Collection[str] = (), without: Collection[str] = ()
) -> None:
    """UsageError for a command that there is not, or that is not this tool's: it names those that are."""
    taken = {
        name: spec
        for name, spec in commands().items()
        if name not in without and (spec.group in groups or name in also)
    }
    word = line.split(maxsplit=1)[0] if line.strip() else ""
    try:
        is_taken = find(word).name in taken
    except CommandError:
        is_taken = False
    if not is_taken:
        raise UsageError(f"{clean(word, limit=40)!r} is not this tool's: it takes {', '.join(taken)}")


def _answered(debugger: Debugger, text: str, result: Result) -> str:
    """The text; of a stop, also why it stopped."""
    data = {"stop": result.to_json()} if isinstance(result, Stop) else {}
    return answer(text, basis(debugger), **data)


def _judged(debugger: Debugger, verdict: Verdict) -> str:
    debugger.judged[debugger.position.branch] = verdict.event
    return answer(
        str(verdict), basis(debugger) | _judgement(verdict.event), verdict=verdict.verdict,
        causes=plain(verdict.causes),
    )  # fmt: skip


def _judgement(event: GoldenEvent) -> dict[str, object]:
    """What a verdict rests on."""
    rests = "" if event.coverage is None else event.coverage.in_words()
    first = event.first_divergence
    found: dict[str, object] = {
        "reference": event.reference or "none",
        "steps": event.steps,
        "compared": rests,
    }
    if first is not None:
        found |= {"first_wrong": first.tap, "at_step": first.step, "wrong_ranks": list(first.ranks)}
    return found


def _in_words(event: GoldenEvent) -> str:
    out = io.StringIO()
    render_diagnosis(
        event, Console(file=out, width=_WIDTH, color_system=None, highlight=False, soft_wrap=True)
    )
    return out.getvalue().rstrip()
