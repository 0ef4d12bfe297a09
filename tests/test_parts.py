"""The parts of `make test-all`: each test is in one of them, and all are run whatever fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parts import FOLDERS, PARTS, ROOT, WHOLE, Result, part_of, run


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
        inside = (Result("tui", 1, 50.0, 9, 1), Result("rest", 0, 40.0, 1)) if name == "slow" else ()
        return Result(name, int(name == "slow"), 60.0, 10, int(name == "slow"), inside=inside)

    assert run([], part) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(WHOLE)]] == list(WHOLE)
    assert [line.split()[0] for line in lines if line.endswith("FAILED")] == ["slow", "slow", "tui"]
    assert lines[-1].startswith("failed: slow, tui ")
    assert run(["engine"], part) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "passed: 10 tests in 1 minutes"


def test_a_part_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["engine", "motor"]) == 2
    assert "no such part: motor; there are quick, engine" in capsys.readouterr().err


def test_what_is_run_at_once_is_counted_by_its_parts() -> None:
    assert part_of("tests.workbench.tui.test_live") == "tui"
    assert part_of("tests.workbench.tuition.test_live") == "rest"
    assert part_of("tests.soak.test_soak.TestIt") == part_of("tests.fuzz.test_fuzz") == "soak"
    assert part_of("tests.real_bugs.test_real_bugs") == "rest"
