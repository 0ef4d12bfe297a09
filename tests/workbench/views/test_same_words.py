"""Pane, report, JSON and command report the same of every shipped recording: they ask one read model."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.engine.faults.catalogue import FAULTS
from lockstep.sessions import STATISTICS, Session
from lockstep.workbench.cli.main import run
from lockstep.workbench.debugger.answers import Stop
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.errors import NotCaptured
from lockstep.workbench.debugger.host.replay import open_replay
from lockstep.workbench.export.document import document
from lockstep.workbench.export.json import dumps
from lockstep.workbench.export.report import render
from lockstep.workbench.judgements.golden_event import last_golden_event
from lockstep.workbench.views.branch_sentinel import BranchSentinel
from lockstep.workbench.views.journal import journal
from lockstep.workbench.views.operations import operations
from lockstep.workbench.views.overview import overview, present
from lockstep.workbench.views.request import Request
from lockstep.workbench.views.sentinel_watch import SentinelWatch
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.step_verdicts import judged_step
from lockstep.workbench.views.story import Story, story_of
from lockstep.workbench.views.token_line import TokenLine, TokenLines
from lockstep.workbench.views.where import Where
from tests.workbench.export import made

pytestmark = pytest.mark.sampled_file(2)

RECORDED = sorted((Path(__file__).parents[3] / "sessions" / "recorded").glob("*.session"))


@dataclass
class Surfaces:
    """One recording as everyone who reports on it reads it."""

    path: Path
    source: SessionSource
    debugger: Debugger
    stories: dict[int, Story]  # by the branch in focus

    @property
    def session(self) -> Session:
        return self.source.session

    @property
    def branches(self) -> list[int]:
        return [branch.id for branch in self.session.branches()]

    def page(self, branch: int) -> str:
        """The report's words."""
        body = re.sub(r"<(script|style).*?</\1>", " ", render(self.stories[branch]), flags=re.S)
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())

    def json(self, branch: int) -> dict[str, Any]:
        """What `lockstep export --json` writes."""
        found: dict[str, Any] = json.loads(dumps(document(self.stories[branch])))
        return found

    def watch(self, branch: int) -> dict[str, BranchSentinel]:
        """What the Sentinels pane shows when it has looked at every step."""
        scan = SentinelWatch()
        while (watch := scan.watch(self.source, Where(branch))).scanned < watch.total:
            pass
        return {one.kind: one for one in watch.sentinels}

    def line(self, branch: int) -> TokenLine:
        """The token strip."""
        lines = TokenLines()
        while not (line := lines.line(self.source, branch, 0)).complete:
            pass
        return line


@pytest.fixture(scope="module", params=[*RECORDED, None], ids=lambda path: path.stem if path else "forked")
def surfaces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surfaces]:
    """A shipped recording; or one made by hand with a branch that shares two steps with main."""
    path = request.param or _forked(tmp_path_factory.mktemp("forked") / "a.session")
    with Session.open(path) as session, open_replay(path) as debugger:
        stories = {b.id: story_of(session, Request(branch=b.id), FAULTS) for b in session.branches()}
        yield Surfaces(path, SessionSource(session), debugger, stories)


def _forked(path: Path) -> Path:
    """Main turns to NaN, its ranks differ, and it leaves the golden reference; the branch repeats itself."""

    def change(step: int, stats: np.ndarray, sums: np.ndarray, sequence: dict[str, Any]) -> None:
        if step == 1:
            sums[3, 1] = 1
        if step >= 3:
            stats[2:, 1, STATISTICS.index("nan")] = 9

    made.build(path, tokens=range(10, 24), other=[40] * 12, change=change)
    made.judge(path)
    return path


def test_there_are_recordings() -> None:
    assert len(RECORDED) >= 10


@pytest.mark.sampled(4)
def test_what_ran(surfaces: Surfaces, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sessions", "show", str(surfaces.path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    seen, identity, document = (
        overview(surfaces.source),
        surfaces.stories[0].identity,
        surfaces.json(0)["identity"],
    )
    for name, value in (("model", seen.model), ("device", seen.device), ("dtype", seen.dtype)):
        assert value == getattr(identity, name) == document[name]
        assert value in surfaces.page(0)
    assert (seen.model, seen.dtype, seen.ranks) == (shown["model"], shown["dtype"], shown["tp"])
    assert seen.name == identity.file == document["file"]


@pytest.mark.sampled(2)
def test_the_faults(surfaces: Surfaces) -> None:
    surfaces.debugger.execute("goto -1")
    differing = {(fault.name, fault.value): fault for fault in surfaces.stories[0].identity.faults}
    document = {(fault["name"], fault["value"]) for fault in surfaces.json(0)["identity"]["faults"]}
    seen = overview(surfaces.source)
    assert {fault for line in seen.branches for fault in line.rules} == set(differing) == document
    for line, node in zip(seen.branches, journal(surfaces.source, Where()).branches, strict=True):
        assert line == node.line
        assert dict(line.rules) == surfaces.debugger.timeline.line(line.id).rules
        surfaces.debugger.execute(f"branch {line.id}")
        where = surfaces.debugger.execute("where").to_json()
        assert dict(line.rules) == where["data"]["faults"]
    for fault in differing.values():
        assert f"{fault.name}={fault.value} instead of {fault.correct}: {fault.title}" in surfaces.page(0)


def test_the_owner_of_each_step(surfaces: Surfaces) -> None:
    for branch in surfaces.branches:
        for at, step in enumerate(surfaces.session.steps(branch)):
            owner = surfaces.session.owner(step, branch)
            assert owner == surfaces.debugger.timeline.owner(branch, step).id
            (tokens,) = surfaces.stories[branch].tokens
            choice = next(line for line in tokens.lines if line.branch == branch).choices[at]
            assert choice is not None
            assert choice.own == (owner == branch)


@pytest.mark.sampled(4)
def test_the_emitted_tokens(surfaces: Surfaces) -> None:
    for branch in surfaces.branches:
        line, document = surfaces.line(branch), surfaces.json(branch)
        label = surfaces.source.texts.label
        emitted = surfaces.debugger.timeline.tokens(branch)
        cells = [cell for cell in line.tokens.cells if cell.step is not None]
        assert [cell.token for cell in cells] == emitted
        surfaces.debugger.execute(f"branch {branch}")
        surfaces.debugger.execute(f"goto {len(emitted) - 1}")
        printed = surfaces.debugger.execute("print tokens").to_json()
        assert printed["data"]["value"] == emitted
        (tokens,) = document["tokens"]
        of_branch = next(one for one in tokens["lines"] if one["branch"] == branch)
        choices = [one for one in of_branch["choices"] if one is not None]
        labels = [label(token) for token in emitted]
        assert [one["label"] for one in choices] == labels == [cell.label for cell in cells]
        for step, one in enumerate(choices):
            seen = present(surfaces.source, Where(branch, step))
            assert seen is not None
            assert seen.emitted == one["label"]
            assert seen.entropy == one["entropy"] or one["entropy"] == "nan"
        assert all(" ".join(text.split()) in surfaces.page(branch) for text in labels)


@pytest.mark.sampled(2)
def test_the_verdict_and_the_first_wrong_tap(surfaces: Surfaces) -> None:
    for branch in surfaces.branches:
        story, document = surfaces.stories[branch], surfaces.json(branch)
        surfaces.debugger.execute(f"branch {branch}")
        if last_golden_event(surfaces.session, branch) is None:
            assert (story.judgement.first, surfaces.watch(branch)["golden"].step) == (None, None)
            with pytest.raises(NotCaptured, match="never held against"):
                surfaces.debugger.execute("golden")
            continue
        found = surfaces.debugger.execute("golden").to_json()
        first, summary = story.judgement.first, found["first_divergence"]
        assert (first is None) == (found["verdict"] == "match") == (summary is None)
        fired = surfaces.watch(branch)["golden"]
        steps = [judged_step(surfaces.source, Where(branch, step)) for step in surfaces.session.steps(branch)]
        failed = next((one for one in steps if one.first is not None), None)
        words = " ".join(surfaces.page(branch).split())
        if first is None:
            assert failed is None
            assert document["judgement"]["first"] is None
            assert fired.step is None
            assert "Agrees with the golden reference" in words
            continue
        place = (first.step, first.tap)
        assert failed is not None
        assert failed.first is not None
        assert place == (failed.step, failed.first.name) == (summary["step"], summary["tap"])
        assert place == (document["judgement"]["first"]["step"], document["judgement"]["first"]["tap"])
        assert place == (fired.step, fired.tap)
        assert f"Leaves the golden reference at {first.tap}" in words
        seen = present(surfaces.source, Where(branch, first.step))
        assert seen is not None
        assert (seen.verdict, seen.first_wrong) == ("fail", first.tap)
        assert story.judgement.causes[0].in_words() == failed.causes[0] == found_cause(found)
        assert failed.causes[0] in words
        surfaces.debugger.execute("goto -1")
        surfaces.debugger.execute("catch golden")
        stop = surfaces.debugger.execute("continue")
        surfaces.debugger.execute("delete")
        assert isinstance(stop, Stop)
        assert (stop.step, stop.tap) == place
        assert stop.description.endswith(fired.what)


def found_cause(golden: dict[str, Any]) -> str:
    """The first cause as the command prints it."""
    cause = golden["causes"][0]
    residual = cause["residual"]
    left = "" if not residual >= 1e-4 else f" (leaves {100 * residual:.2g} % of the error)"
    place = f"{cause['place']}: " if cause["place"] else ""
    return f"{place}{cause['text']}{left}"


@pytest.mark.sampled(4)
def test_the_sentinels(surfaces: Surfaces) -> None:
    """The report looks at a step where it was recorded, the pane and `catch` wherever it is shared."""
    for branch in surfaces.branches:
        pane, story = surfaces.watch(branch), surfaces.stories[branch]
        shared = {one.kind: one for one in story.sentinels if one.branch == 0}
        reported = {one.kind: one for one in story.sentinels if one.branch == branch}
        inherited = {
            kind for kind, one in pane.items()
            if one.step is not None and surfaces.session.owner(one.step, branch) != branch
        }  # fmt: skip
        assert all(
            (pane[kind].step, pane[kind].what) == (shared[kind].step, shared[kind].what) for kind in inherited
        )
        document = {one["name"]: one for one in surfaces.json(branch)["sentinels"] if one["branch"] == branch}
        for kind, one in reported.items():
            if kind in inherited:
                continue
            reported_json = document[one.name]
            assert (one.name, one.step, one.what, one.tap, one.ranks) == (
                pane[kind].name, pane[kind].step, pane[kind].what, pane[kind].tap, pane[kind].ranks,
            )  # fmt: skip
            assert (reported_json["step"], reported_json["what"], reported_json["tap"]) == (
                one.step,
                one.what,
                one.tap,
            )
            assert one.name in surfaces.page(branch)
            assert " ".join(one.what.split()) in surfaces.page(branch)
        for kind in ("desync", "repetition", "nan", "inf"):
            assert _caught(surfaces.debugger, branch, kind) == pane[kind].step, kind
        timeline = surfaces.debugger.timeline
        for step in surfaces.session.steps(branch):
            seen = operations(surfaces.source, Where(branch, step))
            assert ("≠" in seen.agreement) == (timeline.desync(branch, step) is not None)


def _caught(debugger: Debugger, branch: int, sentinel: str) -> int | None:
    """The step at which `catch` stops first."""
    debugger.execute(f"branch {branch}")
    debugger.execute("goto -1")
    debugger.execute(f"catch {sentinel}")
    stop = debugger.execute("continue")
    debugger.execute("delete")
    assert isinstance(stop, Stop)
    return stop.step if stop.hit_breakpoint_ids else None
