"""The tape: what it writes is what was there, whatever the engine does, and it never stands in the engine's way."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.engine.taps import measure, parts
from lockstep.workbench.attach.inside import lockstep_tap
from lockstep.workbench.attach.inside.lockstep_tap import Tape, hashes, statistics
from lockstep.workbench.attach.tap_file import BEHIND
from lockstep.workbench.foreign.readers.lockstep import LockstepDump

INSIDE = Path(lockstep_tap.__file__).parent
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def test_what_was_tapped_is_read_back(tmp_path: Path) -> None:
    """Of every dtype, by the public library and by our reader; strided, sliced, empty."""
    made = {str(dtype): (torch.randn(3, 5, 2) * 9).to(dtype) for dtype in DTYPES}
    made |= {
        "turned": torch.randn(4, 3).T,
        "sliced": torch.randn(3, 9)[:, 2:7],
        "alike": torch.ones(1).expand(3, 4),
    }
    made["small"] = torch.randn(3, 4).to(torch.float8_e4m3fn)
    made["empty"] = torch.empty(3, 0)
    tape = Tape(tmp_path, engine="mine 1", config={"hidden_size": 5, "limit": float("inf")})
    tape.step(torch.tensor([7, 8, 9]), 4, "a")
    for name, x in made.items():
        tape.tap(name, x, "replicate")
    tape.tap("some", made["sliced"][:2], rows=[0, 2])
    tape.close()
    assert sorted(path.name for path in (tmp_path / "rank0").iterdir()) == [
        "pass00000.safetensors", "passes.jsonl", "tape.json",
    ]  # fmt: skip
    library = list(safetensors.torch.load_file(tmp_path / "rank0" / "pass00000.safetensors").values())
    run = LockstepDump.open(tmp_path)
    (read,) = run.passes(0)
    assert (read.ids, read.positions, read.requests) == ((7, 8, 9), (4, 5, 6), ("a", "a", "a"))
    for (name, x), theirs, ours in zip(made.items(), library, read.tensors, strict=False):
        assert torch.equal(theirs.double(), x.double()), name
        assert ours.tap == name
        assert ours.array is not None
        bits = theirs.view(torch.uint16) if theirs.dtype is torch.bfloat16 else theirs
        np.testing.assert_array_equal(ours.array, bits.numpy())
        assert ours.dtype == str(theirs.dtype).removeprefix("torch.")
    assert read.tensors[-1].rows == (0, 2)
    assert (run.facts.source, run.facts.ranks, run.facts.dtype) == ("mine 1", 1, "float64")
    assert run.facts.model.hidden_size == 5


def test_statistics_and_hashes_in_place_of_numbers(tmp_path: Path) -> None:
    x = torch.randn(4, 33)
    x[1, 3], x[2, 5], x[3] = torch.nan, -torch.inf, torch.nan
    tape = Tape(tmp_path, capture="stats")
    tape.step([1, 2, 3, 4], 0)
    tape.tap("full", x)
    tape.tap("half", x.bfloat16())
    tape.close()
    full, half = next(LockstepDump.open(tmp_path).passes(0)).tensors
    for one, value in ((full, x), (half, x.bfloat16())):
        assert one.array is None
        expected = parts.statistics(measure.measure(value).numpy())  # the engine's own, of another author
        np.testing.assert_allclose(one.statistics, expected, rtol=1e-6)
        assert one.hashes is not None
        assert one.hashes.dtype == np.uint64
        assert len(set(one.hashes.tolist())) == 4
    assert (full.dtype, half.dtype) == ("float32", "bfloat16")


def test_tensors_are_measured_together_and_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a width wait for each other; each has its own rows, whenever it was measured, and in the order seen."""
    tensors = [torch.randn(n, m).to(d) for n in (1, 3) for m in (5, 8) for d in (torch.float32, torch.half)]
    found = []
    for limit in (0, 40, 1 << 24):
        monkeypatch.setattr(lockstep_tap, "WAITING_BYTES", limit)
        tape = Tape(tmp_path / str(limit), capture="stats")
        tape.step([1, 2, 3], 0)
        for number, x in enumerate(tensors):
            tape.tap(f"x{number}", x)
        tape.close()
        (one,) = LockstepDump.open(tmp_path / str(limit)).passes(0)
        found.append([(x.tap, x.statistics, x.hashes) for x in one.tensors])
    for alone, some, together in zip(*found, strict=True):
        for other in (some, together):
            assert alone[0] == other[0]
            np.testing.assert_array_equal(alone[1], other[1])
            np.testing.assert_array_equal(alone[2], other[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_of_every_dtype(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 7) * 3).to(dtype)
    wide = x.double().numpy()
    found = statistics(x).numpy()
    np.testing.assert_allclose(found[:, 0], wide.min(1), rtol=1e-6)
    np.testing.assert_allclose(found[:, 3], np.sqrt((wide**2).mean(1)), rtol=1e-6)
    np.testing.assert_array_equal(found[:, 7], (wide == 0).sum(1))


@given(st.binary(min_size=1, max_size=40), st.integers(0, 39), st.integers(0, 7))
def test_a_hash_is_of_the_bits(row: bytes, place: int, bit: int) -> None:
    """Equal for equal rows, whatever else is there and however it lies in memory; another for one flipped bit."""
    x = torch.tensor(list(row), dtype=torch.uint8)
    flipped = x.clone()
    flipped[place % len(row)] ^= 1 << bit
    one, same, other = hashes(torch.stack([x, x, flipped])).tolist()
    assert one == same != other
    assert hashes(torch.stack([flipped, x], 1).T)[1] == one


def test_hashes_of_rounding_noise_do_not_collide() -> None:
    """A plain weighted sum does here: differences of one in the last place cancel."""
    noise = torch.randint(-1, 2, (20000, 6), generator=torch.Generator().manual_seed(1))
    rows = (torch.arange(6) * 100 + 16000 + noise).to(torch.int16).view(torch.bfloat16)
    assert len(set(hashes(rows).tolist())) == len({tuple(row) for row in rows.view(torch.int16).tolist()})


def test_tensors_of_some_taps_and_statistics_of_the_others(tmp_path: Path) -> None:
    tape = Tape(tmp_path, capture="stats", tensors=["embed", "layers.1.*"])
    x = torch.arange(6.0).reshape(2, 3)
    tape.step([3, 4], 0)
    for name in ("embed", "layers.0.attn_norm", "layers.1.attn_norm", "layers.10.attn_norm"):
        tape.tap(name, x, "replicate")
    tape.close()
    (read,) = LockstepDump.open(tmp_path).passes(0)
    kept = {one.tap: one.array is not None for one in read.tensors}
    assert kept == {
        "embed": True, "layers.0.attn_norm": False, "layers.1.attn_norm": True, "layers.10.attn_norm": False
    }  # fmt: skip
    assert all((one.array is None) == (one.statistics is not None) for one in read.tensors)


def test_ids_alone(tmp_path: Path) -> None:
    tape = Tape(tmp_path, capture="ids", tensors="*")
    tape.step([3, 4], 0, "a")
    tape.tap("embed", torch.ones(2, 3))
    tape.reached("return")
    assert tape.line is None  # no logits are awaited
    (read,) = LockstepDump.open(tmp_path).passes(0)
    assert (read.ids, read.positions, read.requests, list(read.tensors)) == ((3, 4), (0, 1), ("a", "a"), [])


def test_only_some_taps_and_passes(tmp_path: Path) -> None:
    tape = Tape(tmp_path, only=["layers.1.*", "embed"], passes=2)
    for _ in range(3):
        tape.step([1], 0)
        for name in ("embed", "layers.0.x", "layers.1.x", "layers.10.x"):
            tape.tap(name, torch.ones(1, 1))
    assert tape.closed
    read = list(LockstepDump.open(tmp_path).passes(0))
    assert [[x.tap for x in one.tensors] for one in read] == [["embed", "layers.1.x"]] * 2


class Untouchable:
    """Whoever looks at it has done something."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was looked at")


def test_nothing_is_done_while_no_pass_is_open(tmp_path: Path) -> None:
    tape = Tape(tmp_path, only="layers.1.*")
    tape.tap("layers.1.x", Untouchable())
    tape.step([1], 0)
    tape.tap("layers.0.x", Untouchable())
    tape.close()
    tape.tap("layers.1.x", Untouchable())
    tape.step(Untouchable(), 1)
    assert "stopped" not in tape.facts
    assert len(list(LockstepDump.open(tmp_path).passes(0))) == 1


def test_positions_of_any_form(tmp_path: Path) -> None:
    tape = Tape(tmp_path)
    ids = torch.tensor([[1, 2], [3, 4]])
    for given_positions in (
        torch.tensor([[5, 6]]),
        torch.arange(5, 7),
        torch.tensor([[[5, 6]]] * 3).expand(3, 2, 2),
        5,
    ):
        tape.step(ids, given_positions, ["a", "a", "b", ""])
    tape.close()
    read = list(LockstepDump.open(tmp_path).passes(0))
    assert [one.positions for one in read] == [(5, 6, 5, 6)] * 4
    assert {one.requests for one in read} == {("a", "a", "b", "")}


@pytest.mark.parametrize(
    ("bad", "printed"),
    [
        (lambda tape: tape.tap("q", object()), "pass 1, q: "),
        (lambda tape: tape.tap("q", torch.zeros(2, 2, dtype=torch.cfloat)), "pass 1, writing: KeyError: 'complex64'"),
        (lambda tape: tape.step([1, 2], [0, 1], ["a"]), "pass 2, step: ValueError: 1 requests for 2 tokens"),
        (lambda tape: tape.step([1, 2], [0, 1, 2]), "pass 2, step: RuntimeError"),
    ],
)  # fmt: skip
def test_an_error_ends_the_recording_not_the_engine(
    bad: Any, printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape = Tape(tmp_path)
    for index in range(2):
        tape.step([1, 2], 0)
        tape.tap("x", torch.full((2, 2), float(index)))
    bad(tape)
    tape.tap("late", torch.ones(2, 2))
    tape.step([1, 2], 0)
    tape.close()
    assert f"recording stopped at {printed}" in capsys.readouterr().err
    run = LockstepDump.open(tmp_path)
    assert printed in run.facts.notes[0]
    whole = [[x.tap for x in one.tensors] for one in run.passes(0)]
    assert whole == [["x"]] * (2 if printed.startswith("pass 2") else 1)
    assert not list((tmp_path / "rank0").glob("*late*"))


def test_a_full_disk_ends_the_recording_not_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape = Tape(tmp_path)
    (tmp_path / "rank0" / "passes.jsonl").symlink_to("/dev/full")
    tape.step([1], 0)
    tape.tap("x", torch.ones(1, 1))
    tape.close()
    assert "No space left" in capsys.readouterr().err


def test_a_second_tape_is_refused(tmp_path: Path) -> None:
    Tape(tmp_path).close()
    with pytest.raises(FileExistsError, match="remove it, or record elsewhere"):
        Tape(tmp_path)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Tape(tmp_path, 2, 2)
    with pytest.raises(ValueError, match="'stat'"):
        Tape(tmp_path, capture="stat")


def test_a_graph_that_is_captured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a tensor is read: of a pass, and of one that began before the capture."""
    untouched = FakeTensorMode().from_tensor(torch.ones(1, dtype=torch.int64))  # to read it is an error
    begun = Tape(tmp_path / "begun")
    begun.step([1], 0)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    begun.tap("x", torch.ones(1, 1))
    tape = Tape(tmp_path / "captured")
    tape.step(untouched, untouched)
    for one in (begun, tape):
        assert "run the engine eager" in one.facts["stopped"]


DYING = """
import multiprocessing, os, sys
sys.path.insert(0, {root!r})
import torch
from lockstep.workbench.attach.inside.lockstep_tap import Tape

def run(rank, end):
    tape = Tape({folder!r}, rank, 3)
    for i in range(3):
        tape.step([i], i)
        tape.tap("x", torch.full((1, 4), float(i)))
    end()

def fail():
    raise ArithmeticError("late")

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=run, args=(1, lambda: None))
    killed = multiprocessing.get_context("fork").Process(target=run, args=(2, lambda: os.kill(os.getpid(), 9)))
    for one in (child, killed):
        one.start()
        one.join()
    run(0, fail)
"""


@pytest.mark.slow
def test_a_dying_engine_leaves_whole_passes(tmp_path: Path) -> None:
    """By an exception, at the end of a child of multiprocessing, by SIGKILL."""
    code = DYING.format(root=str(INSIDE.parents[2]), folder=str(tmp_path / "dump"))
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "ArithmeticError" in done.stderr
    run = LockstepDump.open(tmp_path / "dump")
    read = [[x.tensors[0].array for x in run.passes(rank)] for rank in range(3)]
    assert [len(arrays) for arrays in read] == [3, 3, 2]
    assert all((x == i).all() for arrays in read for i, x in enumerate(arrays) if x is not None)
    assert run.facts.notes == (
        "rank 2 did not come to the end of its recording, as others did: it was killed, or left at once",
        "rank 0, pass 2: the engine raised ArithmeticError: late after x",
    )
    assert (run.facts.ranks, sorted(run.ranks)) == (3, [0, 1, 2])


def test_compiled_code_is_left_alone(tmp_path: Path) -> None:
    tape = Tape(tmp_path)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        tape.tap("inside", x)
        return x + 1

    tape.step([1], 0)
    compiled(torch.ones(1, 1))
    tape.tap("outside", torch.ones(1, 1))
    tape.close()
    assert [x.tap for x in next(LockstepDump.open(tmp_path).passes(0)).tensors] == ["outside"]


def test_the_files_stand_alone() -> None:
    """They are copied into engines that have no other file of ours, and maybe no numpy."""
    own = {f"lockstep_{name}" for name in ("tap", "limits", *BEHIND)}
    for path in (INSIDE / f"{name}.py" for name in sorted(own)):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text, feature_version=(3, 10))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                assert top == "torch" or top in own or top in sys.stdlib_module_names, (path.name, name)


def test_tape_json_reports_what_it_is(tmp_path: Path) -> None:
    Tape(tmp_path, 1, 2, engine="e", model="m", mode="eager").close()
    reported = json.loads((tmp_path / "rank1" / "tape.json").read_text())
    assert reported["format"] == "lockstep-tape"
    assert (reported["version"], reported["rank"], reported["size"], reported["capture"]) == (1, 1, 2, "full")
    assert reported["tap"] == lockstep_tap.__version__
