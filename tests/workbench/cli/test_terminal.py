"""What stands on the terminal until the screens do."""

from __future__ import annotations

import io

import pytest

from lockstep.workbench.cli.terminal import shown_meanwhile
from tests.workbench.cli.terminal import Terminal


def test_a_line_stands_while_the_screens_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    with shown_meanwhile("lockstep: opening a\x1b[2Jb …"):
        assert screen.getvalue() == "lockstep: opening a?[2Jb …", "nothing that a terminal obeys"
    assert screen.getvalue().endswith("\r\x1b[K"), "gone before the screens are drawn"


def test_no_line_goes_into_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stdout", pipe)
    with shown_meanwhile("lockstep …"):
        pass
    assert pipe.getvalue() == ""
