"""The parts of `make test-all`: each test is in one of them, and all are run whatever fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parts import FOLDERS, PARTS, ROOT, Result, run


def _folders_of(file: Path) -> list[str]:
    """The parts whose folders hold a test file."""
    return [
        name for name, folders in FOLDERS.items() if any(file.is_relative_to(ROOT / one) for one in folders)
    ]


def test_every_slow_test_is_in_one_part() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    assert len(files) > 200
    counts = {file: len(_folders_of(file)) for file in files}
    assert set(counts.values()) == {0, 1}
    assert {name for file in files for name in _folders_of(file)} == set(FOLDERS), "a part has no tests"
    # What is in no folder is in the rest, which leaves out nothing but those.
    folders = {folder for each in FOLDERS.values() for folder in each}
    assert {one.partition("=")[2] for one in PARTS["rest"] if one.startswith("--ignore=")} == folders
    assert not [one for one in PARTS["rest"] if one.startswith("tests/")]


def test_a_part_that_fails_does_not_end_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def part(name: str) -> Result:
        return Result(name, int(name in ("tui", "rest")), 60.0, 10, int(name == "tui"))

    assert run([], part) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(PARTS)]] == list(PARTS)
    assert [line.split()[0] for line in lines if line.endswith("FAILED")] == ["tui", "rest"] * 2
    assert lines[-1].startswith("failed: tui, rest ")
    assert run(["engine"], part) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "passed: 10 tests in 1 minutes"


def test_a_part_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["engine", "motor"]) == 2
    assert "no such part: motor; there are quick, engine" in capsys.readouterr().err
