"""What is shown while tokens come: whole characters, nothing that a terminal obeys."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.workbench.cli import streaming
from lockstep.workbench.cli.streaming import Lines, Panels, Running, Silent, display
from lockstep.workbench.models.tokenizer import Tokenizer
from tests.workbench.models.test_tokenizer import HereBackend, byte_tokenizer

BYTES = Tokenizer(HereBackend(byte_tokenizer()), {}, None, Path("bytes"))
EVIL = "a\x1b]0;title\x07b\x1b[2Jé\u202ez\n"


def ids(text: str) -> list[int]:
    return BYTES.encode(text)[1:]


def feed(shown: streaming.Display, seq: int, tokens: list[int]) -> None:
    for token in tokens[:-1]:
        shown.token(seq, token, None)
    shown.token(seq, tokens[-1], "length")


def test_running_text_is_whole_and_harmless() -> None:
    written: list[str] = []
    with Running(BYTES, written.append) as shown:
        feed(shown, 0, ids(EVIL))
    text = "".join(written)
    assert "é" in text
    assert text.endswith("\n\n")
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "é" in written  # the character came once, when both of its bytes were there


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    written: list[str] = []
    with Running(BYTES, written.append) as shown:
        feed(shown, 0, ids("xé")[:-1])
    assert "".join(written) == "x\ufffd\n"


def test_without_a_tokenizer_ids_are_shown() -> None:
    written: list[str] = []
    with Running(None, written.append) as shown:
        feed(shown, 0, [4, 5, 6])
    assert "".join(written) == "4 5 6\n"


def test_several_sequences_come_as_blocks_when_done() -> None:
    written: list[str] = []
    with Lines(BYTES, 2, written.append) as shown:
        first, second = ids("one"), ids("two!")
        for i in range(3):
            shown.token(0, first[i], "eos" if i == 2 else None)
            shown.token(1, second[i], None)
        shown.token(1, second[3], "length")
    assert written == ["--- prompt 1 (eos)\none\n", "--- prompt 2 (length)\ntwo!\n"]


def test_panels_paint_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=60, height=20)
    monkeypatch.setattr(streaming, "Console", lambda: screen)
    with Panels(BYTES, 2) as shown:
        feed(shown, 0, ids("one [bold]not markup[/]"))
        feed(shown, 1, ids(EVIL))
    assert isinstance(screen.file, io.StringIO)
    painted = screen.file.getvalue()
    assert "one [bold]not markup[/]" in painted
    assert "prompt 2 (length)" in painted
    assert "\x1b]0;" not in painted


def test_the_display_suits_the_run() -> None:
    assert isinstance(display(BYTES, 2, json=True), Silent)
    assert isinstance(display(BYTES, 1, json=False), Running)
    assert isinstance(display(BYTES, 2, json=False), Lines)  # stdout is not a terminal here
