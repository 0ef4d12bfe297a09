"""README and documents do what they state: the commands of the walks run verbatim and print the lines shown."""

from __future__ import annotations

import math
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from lockstep.workbench.debugger.core.registry import commands
from lockstep.workbench.tui.keys import keys_of
from lockstep.workbench.tui.panes import pane_classes
from tests.e2e.tour import NAMED, PAGE, tour
from tests.preloaded import run_module

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: The walks, a page each: what one command leaves, the next finds.
WALKS = (
    "tour.md",
    *(f"start/{name}.md" for name in ("hugging-face", "gguf", "engines", "rl-mismatch", "ci")),
)


#: How far figures of 16-bit arithmetic may be from those shown: processors multiply bfloat16 in different ways.
_ABOUT = 0.25
_FIGURE = r"-?\d+\.\d+(?:e-?\d+)?"


def blocks_of(page: str) -> list[tuple[str, int, bool, list[str]]]:
    """The commands of a page in their order: (command, exit code, whether figures are of 16-bit arithmetic, lines
    shown)."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = []
    blocks = r"<!-- tour ?(\d?) ?(about)? ?-->\n```console\n(.*?)```"
    for code, about, rest in re.findall(blocks, text, flags=re.DOTALL):
        command, *shown = rest.splitlines()
        expected = int(code or ("verdict     diverged" in shown))
        found.append((command.removeprefix("$ "), expected, bool(about), shown))
    return found


def shows(line: str, printed: str, about: bool) -> bool:
    """Whether a line was printed as it is shown, which may be cut with "…"; `about`: but for its figures, which are
    near."""
    wanted, cut = line.rstrip("…").rstrip(), line.endswith("…")
    texts = re.split(_FIGURE, wanted) if about else [wanted]
    figures = re.findall(_FIGURE, wanted) if about else []
    pattern = f" *({_FIGURE})".join(re.escape(text.rstrip() if about else text) for text in texts)
    found = re.match(pattern if cut else f"{pattern}$", printed.rstrip())
    return found is not None and all(
        math.isclose(float(one), float(other), rel_tol=_ABOUT)
        for one, other in zip(found.groups(), figures, strict=True)
    )


def test_figures_are_compared_where_they_are_of_16_bits() -> None:
    line = "layers.0.attn   25.0 %   -2.7 %"
    assert shows(line, "layers.0.attn   26.4 %   -2.5 %", True)
    assert shows(line, "layers.0.attn    9.4 %   -2.5 %", True) is False
    assert not shows(line, "layers.0.attn   26.4 %   -2.5 %", False)
    assert not shows(line, "layers.1.attn   25.0 %   -2.7 %", True)
    assert shows("k3 6.95e-05, 0 …", "k3 6.59e-05, 0 % beyond", True)


#: The keys of the workbench as they are printed.
KEYS = {
    *(key.shown for key in keys_of(commands().values())),
    *(key for pane in pane_classes() for hint in pane.HINTS for key in hint.key.split()),
    *map(str, range(1, len(pane_classes()) + 1)),
    *NAMED,
}


def test_there_are_walks() -> None:
    for page in WALKS:
        assert blocks_of(page), page
        assert all(command.startswith("lockstep ") for command, *_ in blocks_of(page))
    assert len(blocks_of("tour.md")) >= 5


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", ["tour.md", *(pytest.param(one, marks=pytest.mark.slow) for one in WALKS[1:])]
)
def test_a_walk_prints_what_it_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workbench").symlink_to(ROOT / "workbench")
    for source in ((ROOT / "docs" / page).read_text(encoding="utf-8"), _engines()):
        for name, code in re.findall(r"<!-- file (\S+) -->\n```python\n(.*?)```", source, flags=re.DOTALL):
            (tmp_path / name).write_text(code)
    for command, expected, about, shown in blocks_of(page):
        words = [sys.executable if word == "python" else word for word in shlex.split(command)[1:]]
        done = run_module("lockstep.workbench.cli", *words)
        assert done.returncode == expected, f"{command}\n{done.stdout}{done.stderr}"
        printed = done.stdout.splitlines()
        at = 0
        for line in shown:
            if line == "…":
                continue
            found = next((i for i in range(at, len(printed)) if shows(line, printed[i], about)), None)
            assert found is not None, f"{command}: not printed: {line!r}, in:\n{done.stdout}"
            at = found + 1


def _engines() -> str:
    """The page whose program others use as well."""
    return (ROOT / "docs" / "start" / "engines.md").read_text(encoding="utf-8")


def test_the_tour_of_the_screens_is_one_that_can_be_taken() -> None:
    """`tests/e2e/test_tour.py` takes it in a terminal, row by row, as the page has it."""
    steps = tour()
    assert len(steps) >= 12
    for step in steps:
        assert step.keys, "every row states what to press"
        assert step.seen, "and what is then to be seen"
        assert set(step.keys) <= KEYS
    assert {"n", "i", "x", "g", "o", "N", "?", "enter"} <= {key for step in steps for key in step.keys}


def test_the_table_of_keys_is_that_of_the_screens() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| key | | key | |")[2].partition("\n\n")[0]
    named = {key.replace("\\|", "|") for key in re.findall(r"`([^`]+)`", table)}
    assert named <= KEYS, "every key of the page is one of the screens'"
    assert {key.shown for key in keys_of(commands().values()) if key.footer} <= named, "all of the footer's"


def test_screenshots_that_are_shown_exist() -> None:
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


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
