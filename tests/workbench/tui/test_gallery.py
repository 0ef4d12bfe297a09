"""The gallery opens without a model; its questions are answered by the screens, with the keys that the page gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from textual import events

from lockstep.sessions import Session
from lockstep.workbench.cli.main import run
from lockstep.workbench.paths import GALLERY, find_session
from tests.workbench.tui.conftest import Bench, press, settle, text_of

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "gallery.md").read_text(encoding="utf-8")
#: (recording, keys, what is then on screen) of every row.
ROWS = [
    (
        section.partition("\n")[0],
        re.findall(r"`([^`]+)`", keys),
        re.findall(r"\*\*(.+?)\*\*(?=[, ]|$)", answer.strip()),
    )
    for section in PAGE.split("\n## ")[1:]
    for keys, answer in re.findall(r"^\| [^|]+\? \| ([^|]+) \| (.+) \|$", section, flags=re.MULTILINE)
]


def test_there_are_eight_recordings_with_three_questions_each() -> None:
    names = [name for name, _, _ in ROWS]
    assert len(set(names)) == 8
    assert all(names.count(name) == 3 for name in names)
    assert all(find_session(name).parent == GALLERY for name in names)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "keys", "seen"), ROWS, ids=[f"{name}-{i % 3}" for i, (name, *_) in enumerate(ROWS)]
)
async def test_a_question_is_answered(name: str, keys: list[str], seen: list[str], bench: Bench) -> None:
    async with bench(path=find_session(name)) as pilot:
        for key in keys:
            if key.startswith(":"):
                await press(pilot, "colon")
                pilot.app.post_message(events.Paste(key[1:]))
                await press(pilot, "enter")
            else:
                await press(pilot, key)
        await settle(pilot)
        lines = text_of(pilot)
    # A sentence of the pane goes on below, beside the column of the model's tree.
    shown = " ".join(" ".join([*lines[:5], *(line[24:] for line in lines[5:])]).split())
    assert seen
    for text in seen:
        assert " ".join(text.split()) in shown, "\n".join(lines)


def test_a_gallery_recording_is_replayed_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "gallery/mask-additive", "--batch", "--ex", "golden"]) == 0
    assert "layers.0.attn.scores" in capsys.readouterr().out
    assert not list(GALLERY.glob("*-wal"))


def test_every_recording_is_whole() -> None:
    for path in GALLERY.glob("*.session"):
        with Session.open(path) as session:
            assert not session.losses
