"""Pane, report and command give the same numbers for every shipped recording: candidates, attention, cache, lens.

Values are compared by their `repr` where they may be NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep.workbench.debugger.answers import TableResult
from lockstep.workbench.debugger.errors import CommandError, NotCaptured
from lockstep.workbench.views.attention import attention
from lockstep.workbench.views.kv_cache import cache
from lockstep.workbench.views.lens import lens
from lockstep.workbench.views.logits import logits
from lockstep.workbench.views.overview import overview, present
from lockstep.workbench.views.request import Request
from lockstep.workbench.views.sentinels import misaligned
from lockstep.workbench.views.story import story_of
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.numbers import cell
from tests.workbench.views.test_same_words import Surfaces, surfaces  # noqa: F401 - the fixture

pytestmark = pytest.mark.sampled_file(2)


def _places(surfaces: Surfaces) -> Iterator[Where]:  # noqa: F811
    """Every step of every branch, the debugger standing there."""
    for branch in surfaces.branches:
        surfaces.debugger.execute(f"branch {branch}")
        for step in surfaces.session.steps(branch):
            surfaces.debugger.execute(f"goto {step}")
            yield Where(branch, step)


def _rows(surfaces: Surfaces, line: str) -> list[list[object]]:  # noqa: F811
    table = surfaces.debugger.execute(line)
    assert isinstance(table, TableResult)
    return table.rows


@pytest.mark.sampled(4)
def test_the_candidates(surfaces: Surfaces) -> None:  # noqa: F811
    lines = {branch: surfaces.line(branch) for branch in surfaces.branches}
    for where in _places(surfaces):
        pane, seen = logits(surfaces.source, where), present(surfaces.source, where)
        assert pane is not None
        assert seen is not None
        (tokens,) = surfaces.stories[where.branch].tokens
        choices = next(line for line in tokens.lines if line.branch == where.branch).choices
        choice = choices[tokens.steps.index(where.step)]
        assert choice is not None
        candidates = [one.candidate for one in pane.candidates]
        assert repr(choice.candidates) == repr(tuple(candidates[: len(choice.candidates)]))
        command = _rows(surfaces, f"topk {len(candidates)}")
        expected = [[one.token, one.label, one.logit, one.probability] for one in candidates]
        assert repr([row[:4] for row in command]) == repr(expected)
        assert [bool(row[4]) for row in command] == [one.chosen for one in candidates]
        assert repr(choice.probability) == repr(seen.probability) == repr(pane.history[-1][2])
        cell = lines[where.branch].tokens.cells[lines[where.branch].prompt + where.step]
        assert cell.label == choice.label == seen.emitted == pane.emitted
        surprise = None if choice.probability is None else 1 - choice.probability
        assert repr(cell.surprise) == repr(surprise)  # NaN too


@pytest.mark.sampled(2)
def test_the_token_that_is_read(surfaces: Surfaces) -> None:  # noqa: F811
    for where in _places(surfaces):
        found = surfaces.debugger.execute("where").to_json()["data"]
        sequences = surfaces.source.record(where.step, where.branch).sequences
        if misaligned(surfaces.session, sequences) is not None:
            continue  # a position that is wrong names another token
        assert found["reads"] == surfaces.line(where.branch).label(found["position"])


@pytest.mark.sampled(8)
def test_the_attention(surfaces: Surfaces) -> None:  # noqa: F811
    branch = surfaces.branches[-1]
    surfaces.debugger.execute(f"branch {branch}")
    for step in (0, surfaces.session.steps(branch).stop - 1):
        surfaces.debugger.execute(f"goto {step}")
        for layer in range(overview(surfaces.source).layers):
            pane = attention(surfaces.source, Where(branch, step), layer)
            request = Request(branch=branch, step=step, attention=((layer, None),))
            (report,) = story_of(surfaces.session, request).attention
            assert report.missing == pane.missing
            if pane.values is None:
                with pytest.raises((CommandError, NotCaptured)):
                    surfaces.debugger.execute(f"attn {layer} 0")
                continue
            for ours, theirs in zip(pane.heads, report.heads, strict=True):
                assert repr(ours.figures) == repr(theirs.figures)
                assert (ours.rank, ours.kv_head) == (theirs.rank, theirs.kv_head)
                text = surfaces.debugger.execute(f"attn {layer} {ours.head}").to_text()
                words = f"row sum {ours.figures.total:.6g}, entropy {cell(ours.figures.entropy)}"
                assert words in text


def test_the_cache(surfaces: Surfaces) -> None:  # noqa: F811
    for where in _places(surfaces):
        pane = cache(surfaces.source, where, 16, 0, "k_cache", False)
        assert pane is not None
        wrong = {row[0] for row in _rows(surfaces, "info kv") if row[5]}
        assert wrong == {one.seq for one in pane.sequences if not one.agrees}
        sequences = surfaces.source.record(where.step, where.branch).sequences
        assert bool(wrong) == (misaligned(surfaces.session, sequences) is not None)
        blocks = _rows(surfaces, "info blocks")
        assert [row[2] for row in blocks] == [" ".join(map(str, one.blocks)) for one in pane.sequences]


def test_the_lens(surfaces: Surfaces) -> None:  # noqa: F811
    for where in _places(surfaces):
        pane = lens(surfaces.source, where)
        if not pane.layers:
            with pytest.raises(NotCaptured):
                surfaces.debugger.execute("lens")
            continue
        best = [[one.candidates[0].label, one.candidates[0].probability, one.entropy] for one in pane.layers]
        assert repr([row[1:4] for row in _rows(surfaces, "lens")]) == repr(best)
