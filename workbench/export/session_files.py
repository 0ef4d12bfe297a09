"""A session as a file of one kind: the one place where command line, debugger and screens get them from."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TextIO

from lockstep.engine.faults.catalogue import FAULTS
from lockstep.sessions import Session
from lockstep.workbench.export import csv
from lockstep.workbench.export.cases import cases
from lockstep.workbench.export.document import document
from lockstep.workbench.export.figures import attention_figure, histories_figure
from lockstep.workbench.export.json import dumps
from lockstep.workbench.export.junit import junit
from lockstep.workbench.export.plots import depth_plot
from lockstep.workbench.export.png import rasterised
from lockstep.workbench.export.report import render
from lockstep.workbench.export.svg import standalone
from lockstep.workbench.views.request import Request
from lockstep.workbench.views.statistics import COLUMNS, MOST_ROWS, rows, select
from lockstep.workbench.views.story import Story, story_of

Content = str | bytes | Callable[[TextIO], None]


class NothingToExport(ValueError):
    """What was asked for is not in the session, or too much: states what to ask for instead."""


class SessionFiles:
    """The files of one session, under one request. The story is reported once, when it is first needed."""

    def __init__(self, session: Session, request: Request) -> None:
        self.session, self.request = session, request
        self._story: Story | None = None

    @property
    def story(self) -> Story:
        """What the page, the figures and the document show."""
        if self._story is None:
            self._story = story_of(self.session, self.request, FAULTS)
        return self._story

    def content(self, kind: str) -> Content:
        """The file of that kind; a table is written to what it is given, since it may be long."""
        if kind == "html":
            return render(self.story)
        if kind == "json":
            return dumps(document(self.story)) + "\n"
        if kind == "csv":
            return self._table()
        if kind == "junit":
            return self._tests()
        assert kind in ("svg", "png"), f"{kind}: one of KINDS"
        return self._figure() if kind == "svg" else rasterised(self._figure())

    def text(self, kind: str) -> str | bytes:
        """The same, whole."""
        found = self.content(kind)
        if isinstance(found, str | bytes):
            return found
        out = io.StringIO()
        found(out)
        return out.getvalue()

    def _figure(self) -> str:
        """One figure: what was asked for, else the error over depth."""
        request, story = self.request, self.story
        if request.attention:
            drawn = [one for one in story.attention if one.heads]
            if not drawn:
                missing = (
                    story.attention[0].missing if story.attention else "too many heads: name one, as in 3:5"
                )
                raise NothingToExport(f"nothing to draw: {missing}")
            return standalone(attention_figure(drawn[0], request.limits.pixels))
        if not request.taps:
            depth = depth_plot(story.judgement.map, story.judgement.first)
            if depth is not None:
                return standalone(depth)
            raise NothingToExport("nothing of this session was judged: add --tap GLOB or --attention LAYER")
        return standalone(histories_figure(story.histories))

    def _table(self) -> Callable[[TextIO], None]:
        session, request = self.session, self.request
        branch, taps = request.branch or 0, select(session, request.taps)
        steps: Sequence[int] = session.steps(branch)
        if request.step is not None:
            if request.step not in steps:
                raise NothingToExport(f"branch {branch} has {len(steps)} steps, counted from 0")
            steps = [request.step]
        count = len(steps) * len(taps) * session.ranks
        if count > MOST_ROWS:
            raise NothingToExport(
                f"{count:,} rows are too many: choose taps with --tap or a step with --step"
            )

        def write(out: TextIO) -> None:
            csv.write(out, COLUMNS, rows(session, branch, steps, taps))

        return write

    def _tests(self) -> str:
        found = list(cases(self.session, self.request.branch, self.request.step))
        if not found:
            raise NothingToExport("nothing of this session was judged: `lockstep check` and `golden` judge")
        return junit(self.session.path.name, found)
