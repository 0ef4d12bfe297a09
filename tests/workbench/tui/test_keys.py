"""The keys of the workbench are the registry's, and those of the view."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from textual import events

from lockstep.workbench.debugger.core.registry import Command, commands, parse_line
from lockstep.workbench.tui import keys, settings
from lockstep.workbench.tui.app import LockstepApp
from lockstep.workbench.tui.reader import Reader
from lockstep.workbench.tui.screens.view_actions import ViewActions
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from tests.workbench.tui.conftest import Bench, enter, press, replaying, settle, text_of

pytestmark = pytest.mark.sampled_file(2)

_SETTINGS = Path(__file__).resolve().parents[3] / "docs" / "settings.md"


def test_every_key_means_one_thing() -> None:
    found = keys.keys_of(commands().values())
    presses = [key.press for key in found]
    assert len(set(presses)) == len(presses)
    assert {"n", "N", "s", "S", "i", "I", "c", "C", "f", "b", "B", "g", "o", "x", "ctrl+c"} <= set(presses)


def test_a_commands_key_runs_that_command() -> None:
    for one in commands().values():
        if one.key is not None and one.key.line:
            assert parse_line(one.key.line)[0] is one


def test_every_key_of_the_view_has_its_action() -> None:
    for key in keys.VIEW_KEYS:
        name = key.action.removeprefix("view('").partition("'")[0]
        assert callable(getattr(ViewActions, name)), key


async def test_keys_in_a_replay_are_the_debuggers_commands(bench: Bench) -> None:
    async with bench() as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, WorkbenchScreen)
        ran: list[str] = []
        carry_out = screen.driver.run

        async def run(line, where):
            ran.append(line)
            return await carry_out(line, where)

        screen.driver.run = run
        await press(pilot, "N", "n", "s", "i", "I", "S", "f", "C", "c", "b", "B", "escape", "o")
        lines = {key.press: key.line for key in screen.keymap.keys}
        present = screen.overview.taps[screen.where.tap]
        expected = [lines[key] for key in ("N", "n", "s", "i", "I", "S", "f", "C", "c", "b", "B", "o")]
        assert [line.split()[0] for line in ran] == [line.split()[0] for line in expected]
        assert ran[10] == "info breakpoints"
        assert present


async def test_steps_follow_each_other_operation_by_operation_in_a_replay(bench: Bench) -> None:
    async with bench() as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, WorkbenchScreen)
        assert screen.overview is not None
        taps = screen.overview.taps
        await enter(pilot, "colon", f"goto 3 {taps[-1]}")
        await press(pilot, "i")
        assert (screen.where.step, screen.where.tap) == (4, 0)
        await press(pilot, "I")
        assert (screen.where.step, taps[screen.where.tap]) == (3, taps[-1])
        await press(pilot, "s")
        assert (screen.where.step, screen.where.tap) == (4, 0)
        await press(pilot, "S")
        assert screen.where.step == 3
        seen = []
        await press(pilot, "[")
        for _ in range(3):
            await press(pilot, "s")
            seen.append(taps[screen.where.tap])
        assert screen.where.step in (2, 3)
        await press(pilot, "n")
        assert screen.where.step > 2


async def test_the_last_step_has_no_next_and_the_first_none_before(bench: Bench) -> None:
    async with bench() as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, WorkbenchScreen)
        assert screen.overview is not None
        last = len(screen.overview.taps) - 1
        await enter(pilot, "colon", f"goto 11 {screen.overview.taps[last]}")
        await press(pilot, "i", "i", "s")
        assert (screen.where.step, screen.where.tap) == (11, last)
        assert any("end of the recording" in line for line in text_of(pilot))
        await enter(pilot, "colon", "goto 0 embed")
        await press(pilot, "I", "I", "N")
        assert (screen.where.step, screen.where.tap) == (0, 0)
        assert any("the beginning" in line for line in text_of(pilot))
        await press(pilot, "i")
        assert (screen.where.step, screen.where.tap) == (0, 1)


async def test_a_key_typed_before_the_commands_are_known_acts_later(bench: Bench) -> None:
    async with bench() as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, WorkbenchScreen)
        fresh = WorkbenchScreen(screen.reader, type(screen.driver)(screen.reader.source.path))
        await pilot.app.push_screen(fresh)
        await pilot.press("N", "N")
        for _ in range(200):
            if fresh.where.step == 9:
                break
            await pilot.pause(0.05)
        assert fresh.where.step == 9


async def test_no_key_overtakes_one_that_waits_for_the_commands(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench() as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, WorkbenchScreen)
        fresh = WorkbenchScreen(screen.reader, type(screen.driver)(screen.reader.source.path))
        known, commands_of = asyncio.Event(), fresh.driver.commands

        async def late() -> Sequence[Command]:
            await known.wait()
            return await commands_of()

        monkeypatch.setattr(fresh.driver, "commands", late)
        await pilot.app.push_screen(fresh)
        for key in ("N", ":", *"goto", " ", "4", "\r", "2"):  # faster than any of them is handled
            pilot.app.post_message(events.Key({"\r": "enter", ":": "colon", " ": "space"}.get(key, key), key))
        await pilot.pause()
        assert fresh.pane == 1
        known.set()
        await settle(pilot)
        assert (fresh.where.step, fresh.pane) == (4, 2)


def test_every_action_has_a_name_of_its_own() -> None:
    found = keys.keys_of(commands().values())
    assert len({key.name for key in found}) == len(found)
    assert not {key.name for key in keys.VIEW_KEYS} & {
        word for one in commands().values() for word in (one.name, *one.aliases)
    }


def test_user_keys_replace_an_actions_own_and_report_what_cannot_be() -> None:
    made = keys.user_keys(
        list(commands().values()),
        {
            "next": ("space", "f5"), "zoom": ("Z",), "info kv": ("K",), "lens": (), "step": ("i",), "nxt": ("u",),
            "golden": ("t",), "copy-pane": ("Z",),
        },
        {"t": "the Operations pane"},
    )  # fmt: skip
    by_press = {key.press: key.name for key in made.keys}
    assert (by_press["space"], by_press["f5"], by_press["Z"], by_press["K"]) == (
        "next",
        "next",
        "zoom",
        "info kv",
    )
    assert "n" not in by_press, "in place of its own"
    assert by_press["i"] == "step", "what the user sets goes before what is usual"
    assert len(by_press) == len(made.keys), "no key means two things"
    assert [problem.partition(":")[0] for problem in made.problems] == ["nxt", "golden", "copy-pane", "step"]
    assert "no such action or command" in made.problems[0]
    assert "the Operations pane already" in made.problems[1]
    assert "key of zoom already" in made.problems[2]
    assert "was the key of stepi" in made.problems[3]


def test_without_settings_the_keys_are_the_usual_ones() -> None:
    made = keys.user_keys(list(commands().values()), {}, {})
    assert (made.keys, made.problems, made.moved) == (keys.keys_of(commands().values()), (), {})


async def test_the_users_keys_act_and_are_shown(session: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[keys]\nreverse-next = "ctrl+b"\n"info taps" = "f6"\nhelp-pane = "!"\nnxt = "u"\n')
    reader = Reader.open(session)
    app = LockstepApp(replaying(reader), settings.load(file))
    async with app.run_test(size=(120, 60)) as pilot:
        await settle(pilot)
        assert any("nxt: no such action or command" in notice.message for notice in app._notifications)
        assert any("config.toml, [keys]" in notice.message for notice in app._notifications)
        foot = text_of(pilot)[-1]
        assert "^b back" in foot
        assert "! help" in foot
        await press(pilot, "N")
        assert app.screen.where.step == 11, "its own key does nothing any more"
        await press(pilot, "ctrl+b")
        assert app.screen.where.step == 10
        await press(pilot, "exclamation_mark")
        sheet = "\n".join(text_of(pilot))
        assert "^b  previous token" in sheet
        await press(pilot, "escape", "f6")
        assert any("layers.0.attn.q_proj" in line for line in text_of(pilot))
    reader.close()


async def test_the_keys_of_the_panes_are_the_users_too(session: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[keys]\npane-kv-cache = "f3"\npane-tensor = []\n"info taps" = "2"\n')
    reader = Reader.open(session)
    app = LockstepApp(replaying(reader), settings.load(file))
    async with app.run_test(size=(140, 60)) as pilot:
        await settle(pilot)
        tabs = next(line for line in text_of(pilot) if "Operations" in line)
        assert tabs.split()[:7] == ["1", "Operations", "Attention", "f3", "KV", "cache", "4"]
        assert tabs.split()[-3:] == ["Tensor", "0", "Experts"]
        assert any("key of pane-attention, which has none now" in one.message for one in app._notifications)
        await press(pilot, "3")
        assert app.screen.pane == 1, "its own key does nothing any more"
        await press(pilot, "f3")
        assert app.screen.pane == 3
        await press(pilot, "question_mark")
        sheet = "\n".join(text_of(pilot))
        assert re.search(r"f3 +the KV cache pane", sheet, re.I)
        assert "1 … 9" not in sheet
    reader.close()


@pytest.mark.parametrize(("size", "columns"), [((100, 60), 1), ((140, 60), 2)])
async def test_the_help_cuts_no_word(session: Path, size: tuple[int, int], columns: int) -> None:
    reader = Reader.open(session)
    async with LockstepApp(replaying(reader)).run_test(size=size) as pilot:
        await settle(pilot)
        await press(pilot, "question_mark")
        sheet = text_of(pilot)
        first = next(line for line in sheet if "next token" in line)
        assert ("two branches" in first) == (columns == 2)
        assert not any(
            "…" in line.partition("│")[2].rpartition("│")[0].replace("1 … 9", "") for line in sheet[3:40]
        )
    reader.close()


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ('keys = "n"', r"config\.toml: keys = 'n': must be a table"),
        ("[keys]\nnext = 5", r"config\.toml: \[keys\] next = 5: 5 is no key"),
        ('[keys]\nnext = ["n", "spcae"]', r"config\.toml: \[keys\] next = .*'spcae' is no key"),
        ('[keys]\nnext = "ctrl-n"', r"'ctrl-n' is no key"),
    ],
)
def test_what_is_no_key_is_refused_with_key_and_file(tmp_path: Path, text: str, reported: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(settings.SettingsError, match=reported):
        settings.load(file)


def test_a_theme_that_is_kept_leaves_the_keys_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[keys]\ntheme = "F"\nnext = "space"\n')
    settings.save("theme", "lockstep-light", file)
    found = settings.load(file)
    assert (found.theme, found.keys) == ("lockstep-light", {"theme": ("F",), "next": ("space",)})


def test_the_documentation_lists_every_action_with_its_key() -> None:
    listed = re.findall(r"^\| `(.+?)` \| `(.+?)` \|", _SETTINGS.read_text(encoding="utf-8"), re.M)
    assert [(name, key.removeprefix("\\")) for name, key in listed] == [
        (key.name, key.shown) for key in keys.keys_of(commands().values())
    ]


def test_the_settings_of_the_documentation_hold(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(re.search(r"```toml\n(.+?)```", _SETTINGS.read_text(encoding="utf-8"), re.S)[1])
    found = settings.load(file)
    assert keys.user_keys(list(commands().values()), found.keys, {}).problems == ()
    assert found.catch == settings.DEFAULTS.catch
