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
from lockstep.workbench.views.story import tell
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.numbers import cell
from tests.workbench.views.test_same_words import Told, told  # noqa: F401 - the fixture


def _places(told: Told) -> Iterator[Where]:  # noqa: F811
    """Every step of every branch, the debugger standing there."""
    for branch in told.branches:
        told.debugger.execute(f"branch {branch}")
        for step in told.session.steps(branch):
            told.debugger.execute(f"goto {step}")
            yield Where(branch, step)


def _rows(told: Told, line: str) -> list[list[object]]:  # noqa: F811
    table = told.debugger.execute(line)
    assert isinstance(table, TableResult)
    return table.rows


@pytest.mark.sampled(4)
def test_the_candidates(told: Told) -> None:  # noqa: F811
    lines = {branch: told.line(branch) for branch in told.branches}
    for where in _places(told):
        pane, seen = logits(told.source, where), present(told.source, where)
        assert pane is not None
        assert seen is not None
        (tokens,) = told.stories[where.branch].tokens
        choices = next(line for line in tokens.lines if line.branch == where.branch).choices
        choice = choices[tokens.steps.index(where.step)]
        assert choice is not None
        candidates = [one.candidate for one in pane.candidates]
        assert repr(choice.candidates) == repr(tuple(candidates[: len(choice.candidates)]))
        command = _rows(told, f"topk {len(candidates)}")
        expected = [[one.token, one.label, one.logit, one.probability] for one in candidates]
        assert repr([row[:4] for row in command]) == repr(expected)
        assert [bool(row[4]) for row in command] == [one.chosen for one in candidates]
        assert repr(choice.probability) == repr(seen.probability) == repr(pane.history[-1][2])
        cell = lines[where.branch].tokens.cells[lines[where.branch].prompt + where.step]
        assert cell.label == choice.label == seen.emitted == pane.emitted
        surprise = None if choice.probability is None else 1 - choice.probability
        assert repr(cell.surprise) == repr(surprise)  # NaN too


def test_the_token_that_is_read(told: Told) -> None:  # noqa: F811
    for where in _places(told):
        found = told.debugger.execute("where").to_json()["data"]
        sequences = told.source.record(where.step, where.branch).sequences
        if misaligned(told.session, sequences) is not None:
            continue  # a position that is wrong names another token
        assert found["reads"] == told.line(where.branch).label(found["position"])


@pytest.mark.sampled(4)
def test_the_attention(told: Told) -> None:  # noqa: F811
    branch = told.branches[-1]
    told.debugger.execute(f"branch {branch}")
    for step in (0, told.session.steps(branch).stop - 1):
        told.debugger.execute(f"goto {step}")
        for layer in range(overview(told.source).layers):
            pane = attention(told.source, Where(branch, step), layer)
            request = Request(branch=branch, step=step, attention=((layer, None),))
            (report,) = tell(told.session, request).attention
            assert report.missing == pane.missing
            if pane.values is None:
                with pytest.raises((CommandError, NotCaptured)):
                    told.debugger.execute(f"attn {layer} 0")
                continue
            for ours, theirs in zip(pane.heads, report.heads, strict=True):
                assert repr(ours.figures) == repr(theirs.figures)
                assert (ours.rank, ours.kv_head) == (theirs.rank, theirs.kv_head)
                text = told.debugger.execute(f"attn {layer} {ours.head}").to_text()
                words = f"row sum {ours.figures.total:.6g}, entropy {cell(ours.figures.entropy)}"
                assert words in text


def test_the_cache(told: Told) -> None:  # noqa: F811
    for where in _places(told):
        pane = cache(told.source, where, 16, 0, "k_cache", False)
        assert pane is not None
        wrong = {row[0] for row in _rows(told, "info kv") if row[5]}
        assert wrong == {one.seq for one in pane.sequences if not one.agrees}
        sequences = told.source.record(where.step, where.branch).sequences
        assert bool(wrong) == (misaligned(told.session, sequences) is not None)
        blocks = _rows(told, "info blocks")
        assert [row[2] for row in blocks] == [" ".join(map(str, one.blocks)) for one in pane.sequences]


def test_the_lens(told: Told) -> None:  # noqa: F811
    for where in _places(told):
        pane = lens(told.source, where)
        if not pane.layers:
            with pytest.raises(NotCaptured):
                told.debugger.execute("lens")
            continue
        best = [[one.candidates[0].label, one.candidates[0].probability, one.entropy] for one in pane.layers]
        assert repr([row[1:4] for row in _rows(told, "lens")]) == repr(best)
