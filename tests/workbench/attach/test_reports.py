"""Whatever the processes of a command leave as their reports is read within bounds, and never trusted."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.workbench.attach.reports import Remark, ranks_with_passes, read_remarks


def report(text: str, kind: str = "changed") -> str:
    return json.dumps({"kind": kind, "text": text}) + "\n"


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


#: What stands in a report's place -> how it is done, and what is reported.
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a named pipe, not a file"),
    "directory": (Path.mkdir, "is a directory, not a file"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "is a link"),
    "secret": (lambda path: path.symlink_to("/etc/hostname"), "is a link"),
    "3 GB": (sparse, "3.0 GiB; at most 4.0 MiB are read"),
    "no reports": (lambda path: path.write_bytes(b"\xff\n[[[[\n"), "line 1 is no report, or was cut off"),
    "one long line": (lambda path: path.write_text(report("x" * 100_000)), "line 1 is no report"),
    "many lines": (
        lambda path: path.write_text(report("x") * 2000),
        "1000 lines are read, and there are more",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_report_that_is_none_is_a_remark_and_the_others_are_read(what: str, tmp_path: Path) -> None:
    put, stated = HOSTILE[what]
    put(tmp_path / "report-1.jsonl")
    (tmp_path / "report-2.jsonl").write_text(report("eager", "changed"))
    tracemalloc.start()
    remarks = read_remarks(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert any(
        one.kind == "failed" and one.text.startswith(f"report-1.jsonl: {stated}") for one in remarks
    ), remarks
    assert remarks[-1] == Remark("changed", "eager")
    assert peak < 8 << 20


def test_a_remark_is_one_line_that_no_terminal_obeys(tmp_path: Path) -> None:
    (tmp_path / "report-1.jsonl").write_text(report("\x1b[2Jcleared \u202e\x07\nTraceback", "failed"))
    (one,) = read_remarks(tmp_path)
    assert one.text.isprintable()
    assert "Traceback" not in one.text


def test_only_folders_of_ranks_with_a_log_count(tmp_path: Path) -> None:
    for name in ("rank0", "rank1", "rank2", "rank3"):
        (tmp_path / name).mkdir()
    (tmp_path / "rank0" / "passes.jsonl").write_text("{}\n")
    (tmp_path / "rank1" / "passes.jsonl").touch()
    os.mkfifo(tmp_path / "rank2" / "passes.jsonl")
    (tmp_path / "rank3" / "passes.jsonl").symlink_to("../rank0/passes.jsonl")
    (tmp_path / "rank4").symlink_to("rank0")
    assert ranks_with_passes(tmp_path) == (0,)
    assert (ranks_with_passes(tmp_path / "none"), read_remarks(tmp_path / "none")) == ((), ())
