"""The reader of lockstep_tap's dump: whole, cut short, damaged, hostile."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from tests.workbench.foreign.readers.tape_dump import FACTS, LINE, X, dump


def read_all(folder: Path) -> list[Any]:
    run = LockstepDump.open(folder)
    return [tensor for rank in range(run.facts.ranks) for one in run.passes(rank) for tensor in one.tensors]


def test_the_least_dump_is_read(tmp_path: Path) -> None:
    (tensor,) = read_all(dump(tmp_path))
    np.testing.assert_array_equal(tensor.array, X)
    facts = LockstepDump.open(tmp_path).facts
    assert (facts.source, facts.ranks, facts.mode, facts.notes) == ("lockstep_tap", 1, "", ())


def test_what_is_reported_of_the_run(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64,
        "num_attention_heads": "many",
        "rms_norm_eps": 1e-6,
        "vocab_size": -3,
        "x": [None],
    }
    reported = {
        "engine": "e 1",
        "mode": "eager",
        "model": "/m/tiny",
        "dtype": "float32",
        "device": "cpu",
        "torch": "2.9",
    }
    facts = LockstepDump.open(dump(tmp_path, reported | {"config": config, "size": 3})).facts
    assert (facts.source, facts.ranks, facts.mode, facts.dtype, facts.device) == (
        "e 1",
        3,
        "eager",
        "float32",
        "cpu",
    )
    assert (facts.model.name, facts.model.path, facts.model.hidden_size) == ("tiny", "/m/tiny", 64)
    assert (facts.model.num_heads, facts.model.vocab_size, facts.model.rms_eps) == (None, None, 1e-6)
    assert facts.versions == {"torch": "2.9"}


def test_ranks_that_left_nothing(tmp_path: Path) -> None:
    run = LockstepDump.open(dump(tmp_path, {"size": 2}))
    assert list(run.passes(1)) == []
    (tmp_path / "rank1").mkdir()
    assert LockstepDump.open(tmp_path).ranks.keys() == {0}


def test_a_line_cut_short_by_the_engines_death_is_left_out(tmp_path: Path) -> None:
    lines = dump(tmp_path) / "rank0" / "passes.jsonl"
    lines.write_text(lines.read_text() + '{"pass": 1, "ids": [7')
    assert len(read_all(tmp_path)) == 1


def test_an_engine_that_raises_all_the_time_is_reported_once(tmp_path: Path) -> None:
    lines = [LINE | {"pass": index, "raised": "E: no"} for index in range(12)]
    notes = LockstepDump.open(dump(tmp_path, lines=lines)).facts.notes
    assert notes[0] == "rank 0, pass 0: the engine raised E: no after embed"
    assert notes[-1] == "rank 0: the engine raised in 2 passes more"
    assert len(notes) == 11


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Opening and walking reads headers; the numbers are read when they are asked for."""
    run = LockstepDump.open(dump(tmp_path))
    (one,) = run.passes(0)
    assert len(one.tensors) == 1
    os.unlink(tmp_path / "rank0" / "pass00000.safetensors")
    with pytest.raises(ForeignDumpError, match="cannot be read"):
        _ = one.tensors[0]


def header(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor_file(entry: dict[str, Any], body: bytes = b"") -> Callable[[Path], object]:
    return lambda home: (home / "pass00000.safetensors").write_bytes(header(json.dumps({"0": entry})) + body)


def line(**changes: Any) -> Callable[[Path], object]:
    return lambda home: (home / "passes.jsonl").write_text(json.dumps(LINE | changes) + "\n")


def tap(**changes: Any) -> Callable[[Path], object]:
    return line(taps=[LINE["taps"][0] | changes])


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda home: (home / name).write_text(content)


def facts(**changes: Any) -> Callable[[Path], object]:
    return text("tape.json", json.dumps(FACTS | changes))


def linked(home: Path) -> None:
    (home / "pass00000.safetensors").rename(home.parent / "elsewhere.safetensors")
    (home / "pass00000.safetensors").symlink_to("../elsewhere.safetensors")


#: What stands in a file's place -> how it is called.
KINDS = {
    "pipe": "a named pipe, not a file", "folder": "a directory, not a file", "endless": "a link",
    "socket": "a socket, not a file",
}  # fmt: skip


def becomes(name: str, kind: str) -> Callable[[Path], object]:
    def put(home: Path) -> None:
        path = home / name
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        else:
            path.symlink_to("/dev/zero")

    return put


HUGE = {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}

HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated facts": (
        text("tape.json", '{"format": "lockstep-ta'),
        "tape.json: not what lockstep_tap writes",
    ),
    "another format": (facts(format="other"), "tape.json: not what"),
    "a later version": (facts(version=2), "version 2; this Lockstep reads up to 1"),
    "a million ranks": (
        facts(size=10**6),
        r"tape.json: not what lockstep_tap writes \(Expected `int` <= 1024",
    ),
    "NaN ranks": (
        text("tape.json", '{"format":"lockstep-tape","version":1,"rank":0,"size":NaN}'),
        "not what",
    ),
    "an infinite rank": (
        text("tape.json", '{"format":"lockstep-tape","version":1,"rank":1e999,"size":1}'),
        "not what",
    ),
    "another rank": (facts(rank=1, size=2), "is of rank 1 of 2: the folder was renamed"),
    "a rank too many": (facts(size=1, rank=1), "is of rank 1 of 1"),
    "deep facts": (text("tape.json", '{"config":' + '{"a":' * 100_000), "not what"),
    "no text": (lambda home: (home / "tape.json").write_bytes(b'{"format":"\xff\xfe"}'), "not what"),
    "long facts": (text("tape.json", " " * (5 << 20)), "5.0 MiB; at most 4.0 MiB are read"),
    "a damaged line": (text("passes.jsonl", '{"pass": 0}\n'), "passes.jsonl:1: not what"),
    "too few positions": (line(positions=[0]), "1 positions for 2 ids"),
    "too many requests": (line(requests=["a"] * 3), "3 requests for 2 ids"),
    "ids beyond all": (line(ids=[0, 2**80]), "passes.jsonl:1: not what"),
    "a file above": (line(file="../../etc/passwd"), "passwd: is no file of rank0"),
    "an absolute file": (line(file="/etc/passwd"), "is no file of rank0: a dump names files of its own"),
    "a link outside": (linked, "pass00000.safetensors: is a link: copy what it points to"),
    "escapes in a file": (line(file="\x1b[2J/x.safetensors"), r"\?\[2J/x.safetensors: is no file"),
    "escapes in a file's name": (line(file="\x1b[2J"), r"rank0/\?\[2J: cannot be read"),
    "no such file": (line(file="pass9.safetensors"), "pass9.safetensors: cannot be read"),
    "no such key": (tap(key="7"), "embed: pass00000.safetensors holds no '7'"),
    "no statistics": (
        lambda home: (facts(capture="stats")(home), tap(key="7")(home)),
        "embed: pass00000.safetensors holds no '7.stats'",
    ),
    "no such layout": (tap(layout="shard(9999)"), "is no layout"),
    "escapes in a name": (tap(name="\x1b]0;x\x07", key="7"), r"passes.jsonl:1: \?\]0;x\?: "),
    "an endless name": (tap(name="a" * 10_000), "not what"),
    "row numbers that do not fit": (tap(rows=[0]), "1 row numbers for 2 rows"),
    "rows outside": (tap(rows=[0, 2]), "2 row numbers for 2 rows of 2 tokens"),
    "a negative row": (tap(rows=[0, -1]), "not what"),
    "sizes that lie": (tensor_file(HUGE), "truncated: the header describes"),
    "a shape that lies": (
        tensor_file({"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}, b"1234"),
        "takes 36 bytes",
    ),
    "a header that lies": (
        lambda home: (home / LINE["file"]).write_bytes(b"\xff" * 7 + b"\x7f{}"),
        "header claims",
    ),
    "a scalar": (
        tensor_file({"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, b"1234"),
        "is no tensor of rows",
    ),
    "a dtype of nobody": (
        tensor_file({"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}, b"12345678"),
        "no tensor",
    ),
    **{
        f"{name} as {kind}": (becomes(name, kind), f"{name}: is {KINDS[kind]}")
        for name in ("tape.json", "passes.jsonl", LINE["file"])
        for kind in KINDS
    },
    "passes twice": (text("passes.jsonl", (json.dumps(LINE) + "\n") * 2), "pass 0 follows 0: two recordings"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_cannot_be_read_is_one_clear_error(what: str, tmp_path: Path) -> None:
    damage, stated = HOSTILE[what]
    damage(dump(tmp_path) / "rank0")
    with pytest.raises(ForeignDumpError, match=stated) as caught:
        read_all(tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000 + len(str(tmp_path))


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_damage_anywhere_is_that_error_or_none(data: st.DataObject, tmp_path: Path) -> None:
    """A byte of any file overwritten, cut off or put in: no other error, whatever is read."""
    home = tmp_path / "rank0"
    whole = dump(tmp_path) / "rank0" if not home.exists() else home
    name = data.draw(st.sampled_from(["tape.json", "passes.jsonl", LINE["file"]]))
    before = (whole / name).read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    piece = data.draw(st.sampled_from([b"", b"9", b"-", b"[", b'"', b"null", b"1e400", b"\x00", b"\xff" * 8]))
    (whole / name).write_bytes(
        before[:at] + piece + before[at + data.draw(st.sampled_from([0, 1, 8, 10**6])) :]
    )
    try:
        with contextlib.suppress(ForeignDumpError):
            read_all(tmp_path)
    finally:
        (whole / name).write_bytes(before)


def test_no_dump_at_all(tmp_path: Path) -> None:
    with pytest.raises(ForeignDumpError, match="give the folder that lockstep_tap's Tape was given"):
        LockstepDump.open(tmp_path)
    with pytest.raises(ForeignDumpError, match="No such file"):
        LockstepDump.open(tmp_path / "none")


def test_a_thousand_ranks_that_contradict_each_other(tmp_path: Path) -> None:
    for rank in range(1000):
        home = tmp_path / f"rank{rank}"
        home.mkdir()
        (home / "tape.json").write_text(json.dumps(FACTS | {"rank": rank, "size": 1000 + (rank == 999)}))
    with pytest.raises(ForeignDumpError, match=r"rank 999 states 1001 ranks .* left from another run"):
        LockstepDump.open(tmp_path)


def test_an_endless_line_is_not_taken_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.workbench.foreign.readers.lockstep.LONGEST_LINE", 1 << 10)
    (dump(tmp_path) / "rank0" / "passes.jsonl").write_text("[" * 5000)
    with pytest.raises(ForeignDumpError, match=r"passes.jsonl:1: longer than"):
        LockstepDump.open(tmp_path)


def test_reading_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lockstep.workbench.foreign.readers.lockstep import LockstepDump\n"
        "(one,) = LockstepDump.open(Path(sys.argv[1])).passes(0); print(one.tensors[0].array.sum())\n"
        "assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[4]
    words = [sys.executable, "-c", code, str(dump(tmp_path))]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("15.0\n", "")
