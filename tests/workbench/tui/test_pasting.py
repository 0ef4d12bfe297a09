"""A paste is text, however long it is and whatever it holds: cut to what a field takes, and shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events
from textual.widgets import Input

from lockstep.workbench.models.identify import Found
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.pasting import PasteParser
from lockstep.workbench.tui.screens.home import HomeScreen
from lockstep.workbench.tui.screens.model_form import ModelForm
from lockstep.workbench.tui.widgets.field import Field
from tests.workbench.tui.conftest import Bench, press, settle, text_of

pytestmark = pytest.mark.sampled_file(2)

HOSTILE = "\x1b[31mred\x1b[0m\x1bn\x03 q\r\nsecond\tline " * 1000  # 30 kB


def _sent(text: str, piece: int) -> list[object]:
    parser = PasteParser()
    sent = f"x\x1b[200~{text}\x1b[201~y"
    return [one for at in range(0, len(sent), piece) for one in parser.feed(sent[at : at + piece])]


@pytest.mark.parametrize("piece", [4096, 997])
@pytest.mark.parametrize(
    "text", [HOSTILE, "plain", "", "\x1b" * 5000, "\x1b[201" * 3000, "\x1b[200~" * 3000, "x" * 300_000]
)
def test_a_paste_is_one_message_and_no_key_press(text: str, piece: int) -> None:
    first, paste, last = _sent(text, piece)
    assert isinstance(first, events.Key)
    assert isinstance(last, events.Key)
    assert (first.key, last.key) == ("x", "y")
    assert isinstance(paste, events.Paste)
    assert paste.text == text[: 1 << 16]


def test_an_end_cut_in_two_ends_the_paste() -> None:
    kinds = [type(one).__name__ for one in _sent("some text", 9)]
    assert kinds == ["Key", "Paste", "Key"]


def test_the_terminals_driver_has_this_parser() -> None:
    driver = LockstepApp(lambda chosen: HomeScreen(examine=False)).driver_class
    assert vars(__import__(driver.__module__, fromlist=["_"]))["XTermParser"] is PasteParser


async def test_every_field_takes_a_hostile_paste(bench: Bench) -> None:
    async with bench() as pilot:
        for keys in (("1", "slash"), ("colon",), ("e", "tab")):
            await press(pilot, *keys)
            field = pilot.app.focused
            assert isinstance(field, Field), keys
            field.value = ""
            pilot.app.post_message(events.Paste(HOSTILE))
            await settle(pilot)
            assert len(field.value) == Field.LIMIT, keys
            assert field.value.startswith("␛red␛␛␃ q second line ␛red"), keys
            assert field.value.isprintable(), keys
            shown = field.value[-20:].strip()
            assert any(shown in line for line in text_of(pilot)), f"{keys}: its end, where the cursor stands"
            assert any("cut to its first 4096" in one.message for one in pilot.app._notifications), keys
            await press(pilot, "escape")
            pilot.app.clear_notifications()


async def test_the_palette_takes_a_hostile_paste(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "ctrl+p")
        pilot.app.post_message(events.Paste(HOSTILE))
        await settle(pilot)
        field = pilot.app.focused
        assert isinstance(field, Input)
        assert field.value.startswith("␛red␛␛␃ q second line ␛red")
        assert field.value.isprintable()


async def test_the_first_screen_takes_a_hostile_paste() -> None:
    app = LockstepApp(lambda chosen: HomeScreen(examine=False))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "o")
        app.post_message(events.Paste(HOSTILE))
        await settle(pilot)
        assert any("there is no ␛red" in line for line in text_of(pilot))
        await press(pilot, "enter")
        assert any("there is no ␛red" in line for line in text_of(pilot))
        app.push_screen(ModelForm(Found("model", Path("m"), "a model", (1, 2))))
        await settle(pilot)
        app.post_message(events.Paste("two\rlines"))  # as xterm and tmux send a line's end
        await settle(pilot)
        assert app.screen.query_one("#prompt", Field).value == "two lines"
        app.copy_to_clipboard("copied\x1b[2J")
        await press(pilot, "ctrl+v")
        assert app.screen.query_one("#prompt", Field).value == "two linescopied␛"
