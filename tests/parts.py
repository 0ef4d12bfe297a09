"""`make test-all`: the whole suite in parts, with a line for each and which of them have failed.

`make test-all PART=diagnosis` runs one part, `PART="tui cli"` some. Every test is in exactly one: quick ones are a part
of their own, as are those for a GPU, llama.cpp or vLLM; slow ones go by folder, and `rest` has what no folder has.
Where all are asked for, the slow ones are run at once, as `slow`: at the end of each part cores would have nothing to
do. Their seconds are then those that their tests took, on all workers. Of long tables of slow cases each run has a
share, `--turn N` another, and `--turn all` every case: `tests.turns`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from lockstep.engine.machine import usable_cores
from tests.turns import TURNS

ROOT = Path(__file__).resolve().parents[1]
_ELSEWHERE = "gpu or llamacpp or vllm"
_SLOW = f"slow and not ({_ELSEWHERE})"

#: Parts of slow tests: folders, none inside another.
FOLDERS = {
    "engine": ("tests/engine",),
    "sessions": ("tests/sessions",),
    "checking": ("tests/workbench/checking",),
    "diagnosis": ("tests/workbench/diagnosis",),
    "debugger": ("tests/workbench/debugger",),
    "tui": ("tests/workbench/tui",),
    "cli": ("tests/workbench/cli",),
    "e2e": ("tests/e2e",),
    "soak": ("tests/soak", "tests/fuzz"),
}
_ALL = [folder for folders in FOLDERS.values() for folder in folders]

#: Part -> what pytest is given. Files of quick tests stay together, as they share engines; the cases of one slow file
#: may take longer than all other files of its part. Quick files run in their order, e2e first and views last: those
#: of few tests take longest, and xdist would leave them for the end, where other workers have nothing left to do.
PARTS: dict[str, list[str]] = {
    "quick": ["--dist", "loadfile", "--no-loadscope-reorder", "-m", f"not slow and not ({_ELSEWHERE})"],
    **{name: ["--dist", "worksteal", "-m", _SLOW, *folders] for name, folders in FOLDERS.items()},
    "rest": ["--dist", "worksteal", "-m", _SLOW, *(f"--ignore={folder}" for folder in _ALL)],
    "slow": ["--dist", "worksteal", "-m", _SLOW],
    "backends": ["--dist", "loadfile", "-m", _ELSEWHERE],
}
#: What is run where no part is named: every test once.
WHOLE = ("quick", "slow", "backends")


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a part. `code`: pytest's exit code. `inside`: the parts that it is made of."""

    name: str
    code: int
    seconds: float
    tests: int = 0
    failed: int = 0
    skipped: int = 0
    inside: tuple[Result, ...] = ()

    def __str__(self) -> str:
        word = "FAILED" if self.code else "ok"
        count = f"{self.tests:6,} tests {self.failed:4} failed {self.skipped:4} skipped {self.seconds:6.0f} s"
        return f"{self.name:10} {count}  {word}"


def run_part(name: str, turn: str = "all") -> Result:
    """Run one part. Whatever pytest prints is shown."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-parts-") as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            str(usable_cores() + (1 if name == "quick" else 2)),  # slow tests wait a quarter of their time
            f"--junitxml={report}",
            *(() if turn == "all" else (f"--turn={turn}",)),
            *PARTS[name],
        ]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = _cases(report)
        tests, failed, skipped = _counts(cases)
        inside = _inside(cases) if name == "slow" else ()
        return Result(name, code, time.monotonic() - started, tests, failed, skipped, inside)


def _cases(report: Path) -> list[ElementTree.Element]:
    """The tests that were run; none where pytest has not come so far as to write a report."""
    return list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []


def _counts(cases: Sequence[ElementTree.Element]) -> tuple[int, int, int]:
    """Tests, those that failed, and those that were skipped."""
    failed = sum(one.find("failure") is not None or one.find("error") is not None for one in cases)
    return len(cases), failed, sum(one.find("skipped") is not None for one in cases)


def part_of(classname: str) -> str:
    """The part that a slow test is in, by the name of its module or class: "tests.workbench.tui.test_live"."""
    path = f"{classname.replace('.', '/')}/"
    found = (name for name, folders in FOLDERS.items() if any(path.startswith(f"{one}/") for one in folders))
    return next(found, "rest")


def _inside(cases: Sequence[ElementTree.Element]) -> tuple[Result, ...]:
    """Of the slow tests each part's."""
    found: dict[str, list[ElementTree.Element]] = {name: [] for name in (*FOLDERS, "rest")}
    for one in cases:
        found[part_of(one.get("classname", ""))].append(one)
    return tuple(_part(name, ours) for name, ours in found.items())


def _part(name: str, cases: Sequence[ElementTree.Element]) -> Result:
    tests, failed, skipped = _counts(cases)
    return Result(
        name, int(failed > 0), sum(float(one.get("time", 0)) for one in cases), tests, failed, skipped
    )


def run(names: Sequence[str], part: Callable[[str], Result] = run_part) -> int:
    """Run the parts (none named: all); the exit code. One that fails does not end the others."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    results: list[Result] = []
    for name in names or WHOLE:
        results.append(part(name))
        print(results[-1], flush=True)
    shown = [one for each in results for one in (each, *each.inside)]
    if len(shown) > 1:
        print("", *shown, sep="\n")
    failed = [one.name for one in shown if one.code]
    if failed:
        print(f"failed: {', '.join(failed)} (make test-all PART=… runs one)")
    else:
        tests, seconds = sum(one.tests for one in results), sum(one.seconds for one in results)
        print(f"passed: {tests:,} tests in {seconds / 60:.0f} minutes")
    return 1 if failed else 0


def main() -> int:
    """Parts and the turn, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.parts")
    parser.add_argument("names", nargs="*", metavar="PART")
    parser.add_argument("--turn", default="0", choices=[*map(str, range(TURNS)), "all"])
    options = parser.parse_args()
    return run(options.names, partial(run_part, turn=options.turn))


if __name__ == "__main__":
    sys.exit(main())
