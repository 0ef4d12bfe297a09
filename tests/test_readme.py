"""The README's tour does what it says: its commands run verbatim and print the lines that it shows."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from lockstep.workbench.debugger.core.registry import commands
from lockstep.workbench.tui.keys import keys_of
from lockstep.workbench.tui.panes import pane_classes
from tests.e2e.tour import NAMED, tour
from tests.preloaded import run_module

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

#: The console blocks that are part of the tour, in order: (command, lines shown).
TOUR = [
    (block.splitlines()[0].removeprefix("$ "), block.splitlines()[1:])
    for block in re.findall(r"<!-- tour -->\n```console\n(.*?)```", README, flags=re.DOTALL)
]

#: The keys of the workbench as they are printed.
KEYS = {
    *(key.shown for key in keys_of(commands().values())),
    *(key for pane in pane_classes() for hint in pane.HINTS for key in hint.key.split()),
    *map(str, range(1, len(pane_classes()) + 1)),
    *NAMED,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tour is taken: what one command leaves, the next finds."""
    return tmp_path_factory.mktemp("tour")


def test_there_is_a_tour() -> None:
    assert len(TOUR) >= 5
    assert all(command.startswith("lockstep ") for command, _ in TOUR)


@pytest.mark.parametrize(("command", "shown"), TOUR, ids=[command[:40] for command, _ in TOUR])
def test_the_tour(command: str, shown: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    done = run_module("lockstep.workbench.cli", *shlex.split(command)[1:])
    assert done.returncode == ("verdict     diverged" in shown), done.stderr
    printed = done.stdout.splitlines()
    at = 0
    for line in shown:
        if line == "…":
            continue
        wanted = re.escape(line.rstrip("…"))  # a line may be cut with … as well
        pattern = re.compile(wanted if line.endswith("…") else f"{wanted}$")
        found = next((i for i in range(at, len(printed)) if pattern.match(printed[i].rstrip())), None)
        assert found is not None, f"not printed: {line!r}, in:\n{done.stdout}"
        at = found + 1


def test_the_tour_of_the_screens_is_one_that_can_be_taken() -> None:
    """`tests/e2e/test_tour.py` takes it in a terminal, row by row, as the README has it."""
    steps = tour()
    assert len(steps) >= 12
    for step in steps:
        assert step.keys, "every row says what to press"
        assert step.seen, "and what is then to be seen"
        assert set(step.keys) <= KEYS
    assert {"n", "i", "x", "g", "o", "N", "?", "enter"} <= {key for step in steps for key in step.keys}


def test_the_table_of_keys_is_that_of_the_screens() -> None:
    table = README.partition("| key | | key | |")[2].partition("\n\n")[0]
    named = {key.replace("\\|", "|") for key in re.findall(r"`([^`]+)`", table)}
    assert named <= KEYS, "every key of the README is one of the screens'"
    assert {key.shown for key in keys_of(commands().values()) if key.footer} <= named, "all of the footer's"


def test_screenshots_that_are_shown_exist() -> None:
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path


EXAMPLES = re.findall(r"<!-- example -->\n```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_example_of_the_library_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (example,) = EXAMPLES
    (tmp_path / "workbench").symlink_to(ROOT / "workbench")
    (tmp_path / "example.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("example.py", run_name="__main__")
    out, err = capfd.readouterr()
    assert err == ""
    shape, generated = out.splitlines()
    assert shape == "(20, 256)"
    assert re.fullmatch(r"\[\[\d+(, \d+){7}\]\]", generated)
