"""An engine that floods the tape fills neither memory nor disk, is sent a line about it, and goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.workbench.attach.inside import lockstep_limits
from lockstep.workbench.attach.inside.lockstep_limits import free_memory
from lockstep.workbench.attach.inside.lockstep_tap import Tape
from lockstep.workbench.foreign.readers.lockstep import LockstepDump


def one_pass(tape: Tape, at: int = 0) -> None:
    tape.step([at], at)
    tape.tap("embed", torch.full((1, 4), float(at)), "replicate")
    tape.end()


def endless_names(tape: Tape) -> None:
    tape.step([1], 1)
    for number in range(2000):
        tape.tap(f"layers.0.x{number}[out]", torch.ones(1, 4))


def one_name_for_ever(tape: Tape) -> None:
    tape.step([1], 1)
    for _ in range(2000):
        tape.tap("embed", torch.ones(1, 4))


def endless_passes(tape: Tape) -> None:
    for at in range(1, 2000):
        one_pass(tape, at)


def huge_tensor(tape: Tape) -> None:
    tape.step([1], 1)
    tape.tap("huge", torch.ones(1).expand(1, 1 << 48))


def many_tensors(tape: Tape) -> None:
    tape.limits.most = 1 << 40
    more_than_may_be_written(tape)


def more_than_may_be_written(tape: Tape) -> None:
    tape.step([1], 1)
    for number in range(2000):
        tape.tap(f"x{number}", torch.ones(1 << 20).expand(1, 1 << 20))


def a_long_name(tape: Tape) -> None:
    tape.step([1], 1)
    tape.tap("x" * 501, torch.ones(1, 4))


FLOODS: list[tuple[Callable[[Tape], None], str]] = [
    (endless_names, "more than 50 taps: choose them (only)"),
    (one_name_for_ever, "more than 50 taps"),
    (more_than_may_be_written, "4 MiB would be written, 4 MiB may be"),
    (endless_passes, "4 MiB would be written, 4 MiB may be (LOCKSTEP_TAP_BYTES)"),
    (huge_tensor, "MiB: choose taps (only), or statistics"),
    (many_tensors, "this pass holds 100 MiB: choose taps"),
    (a_long_name, "a name has at most 500 characters"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("capture", ["full", "stats"])
@pytest.mark.parametrize(("flood", "printed"), FLOODS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_flood_is_stopped_and_reported(
    flood: Callable[[Tape], None], printed: str, capture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(lockstep_limits, "MOST_TAPS", 50)
    monkeypatch.setattr(lockstep_limits, "free_memory", lambda: 2 * 99.5 * (1 << 20))
    monkeypatch.setenv("LOCKSTEP_TAP_BYTES", str(4 << 20))
    tape = Tape(tmp_path, capture=capture)
    one_pass(tape)
    flood(tape)
    tape.close()
    if capture == "stats" and flood in (many_tensors, more_than_may_be_written):  # of which little is kept
        assert "more than 50 taps" in tape.facts["stopped"]
    else:
        assert printed in tape.facts["stopped"]
    assert capfd.readouterr().err.count("recording stopped at") == 1
    assert sum(file.stat().st_size for file in (tmp_path / "rank0").iterdir()) < 5 << 20
    run = LockstepDump.open(tmp_path)
    assert next(run.passes(0)).ids == (0,)  # what was recorded before is kept
    assert printed.split(":")[0] in run.facts.notes[0] or capture == "stats"


def test_threads_that_tap_at_a_time_stop_the_tape_and_nothing_else(tmp_path: Path) -> None:
    tape, failed = Tape(tmp_path), list[BaseException]()
    taken: list[str] = []
    tape.undo = [lambda: taken.append("hook")]
    one_pass(tape)

    def flood() -> None:
        try:
            for at in range(1, 300):
                one_pass(tape, at)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tape.close()
    assert failed == []
    assert "two threads tap at a time" in tape.facts["stopped"]
    assert taken == ["hook"]
    indices = [one.index for one in LockstepDump.open(tmp_path).passes(0)]
    assert indices == list(range(len(indices)))
    assert indices


def test_a_disk_that_cannot_take_the_session_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep_limits.shutil, "disk_usage", lambda _: type("usage", (), {"free": 10_000}))
    tape = Tape(tmp_path, 0, 2)
    one_pass(tape)
    assert "stopped" not in tape.facts
    one_pass(tape, 1)
    assert "no room on the disk for this pass and a session" in tape.facts["stopped"]


def test_free_memory_is_what_the_system_reports() -> None:
    assert free_memory() > 1 << 20
