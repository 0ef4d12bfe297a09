"""Trials of `lockstep attach`: an engine that is killed, one that is hostile, one that floods its taps."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from lockstep.sessions import Session
from lockstep.sessions.verify import verify
from lockstep.workbench.exit_codes import Exit
from tests.e2e.terminal import ROOT

PASSES = 40
_PATIENCE = 90.0
#: Two ranks that read the same tokens and wait for each other in every pass, as in an all-reduce. Reports their pids.
ENGINE = f"""
import multiprocessing, os, sys, time
from pathlib import Path
import torch, lockstep_tap
torch.set_num_threads(1)

def work(rank, other, where):
    tape = lockstep_tap.Tape(os.environ["LOCKSTEP_TAP"], rank, 2, engine="toy")
    (where / f"rank{{rank}}.pid").write_text(str(os.getpid()))
    for at in range({PASSES}):
        tape.step([at % 16], at)
        tape.tap("embed", torch.full((1, 8), float(at)), "replicate")
        tape.tap("layers.0.mlp.down", torch.full((1, 8), float(at)), "replicate")
        tape.tap("logits", torch.eye(16)[None, (at + 1) % 16], "replicate")  # the next token
        tape.end()
        other.send_bytes(b"x")
        other.recv_bytes()
        time.sleep(0.02)

if __name__ == "__main__":
    fork, where = multiprocessing.get_context("fork"), Path(sys.argv[1])
    ends = fork.Pipe()
    ranks = [fork.Process(target=work, args=(rank, ends[rank], where)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    (where / "engine.pid").write_text(str(os.getpid()))
    for end in ends:
        end.close()
    while any(rank.exitcode != 0 for rank in ranks):
        if any(rank.exitcode for rank in ranks):
            for rank in ranks:
                rank.terminate()
            sys.exit(9)
        time.sleep(0.01)
"""
#: What an engine may do beside its work, as a shell's words in the dump folder.
HOSTILE = (
    "mkfifo report-0.jsonl", "ln -s /dev/zero report-0.jsonl", "truncate -s 3G report-0.jsonl",
    "mkdir report-0.jsonl", "yes '{' | head -c 4000000 > report-0.jsonl", "mkdir rank9; mkfifo rank9/tape.json",
    "mkdir rank9; ln -s /dev/zero rank9/tape.json", "mkdir rank9; mkfifo rank9/passes.jsonl",
    "mkdir rank9; truncate -s 3G rank9/tape.json", "ln -s / rank9", "setsid sleep 600 & sleep 0.2",
    "(setsid sleep 600 &); sleep 0.2", "setsid sh -c 'trap : TERM HUP; sleep 600; sleep 600' & sleep 0.2",
    "exec 2>&-", "exit 1", "kill -KILL $$", "cd ..; rm -rf dump; mkdir dump", "printf '\\033[2J\\007' > report-0.jsonl",
)  # fmt: skip
#: Ways to tap without end; `tape` has recorded a pass.
FLOODS = (
    "for i in range(10**9): tape.tap(f'layers.0.x{i}[out]', one) or tape.closed and sys.exit(print('went on'))",
    "for i in range(10**9): tape.tap('embed', one) or tape.closed and sys.exit(print('went on'))",
    "for i in range(1, 10**9): tape.step([1], i); tape.tap('embed', one); tape.closed and sys.exit(print('went on'))",
    "tape.tap('x', one[:, :1].expand(1, 1 << 45)); print('went on')",
    "for i in range(10**9): tape.tap(f'x{i}', torch.ones(1, 1 << 20)) or tape.closed and sys.exit(print('went on'))",
    "[t.start() for t in [threading.Thread(target=many) for _ in range(8)]]; print('went on')",
)
FLOODING = """
import os, sys, threading
import torch, lockstep_tap
tape, one = lockstep_tap.Tape(os.environ["LOCKSTEP_TAP"], engine="toy"), torch.ones(1, 8)
def many():
    for i in range(1, 500):
        tape.step([1], i)
        tape.tap("embed", one)
tape.step([1], 0)
for name in ("embed", "logits"):
    tape.tap(name, one, "replicate")
tape.end()
tape.step([1], 1)
"""


def _attach(directory: Path, *command: str, **settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "lockstep", "attach", "-o", str(directory / "a.session"), "--", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **settings},
    )  # fmt: skip


def _pid(file: Path, attach: subprocess.Popen[str]) -> int:
    deadline = time.monotonic() + _PATIENCE
    while not (file.exists() and file.read_text()):
        assert attach.poll() is None, attach.communicate()
        assert time.monotonic() < deadline, f"no {file.name}"
        time.sleep(0.01)
    return int(file.read_text())


def _nothing_left(directory: Path, deadline: float) -> None:
    """Of temporary folders: a watcher may still be at work."""
    while (left := list(directory.rglob("lockstep-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == [], left


def kill_attached(seed: int, directory: Path) -> None:
    """By turns a rank, the other, the program that started them, and `attach` itself, at any moment of the run."""
    chance, path = random.Random(seed), directory / "a.session"
    (directory / "engine.py").write_text(ENGINE)
    attach = _attach(directory, sys.executable, str(directory / "engine.py"), str(directory))
    name = ("rank0", "rank1", "engine", "attach")[seed % 4]
    victim = _pid(directory / f"{'engine' if name == 'attach' else name}.pid", attach)
    time.sleep(chance.uniform(0, PASSES * 0.03))
    with suppress(ProcessLookupError):  # it has ended
        os.kill(attach.pid if name == "attach" else victim, signal.SIGKILL)
    _, stated = attach.communicate(timeout=_PATIENCE)
    _nothing_left(directory, time.monotonic() + _PATIENCE)
    if name == "attach" and attach.returncode == -signal.SIGKILL:
        assert not path.exists()
        return
    assert attach.returncode in (0, 9, 137, Exit.CANNOT_LOAD), stated
    if attach.returncode == Exit.CANNOT_LOAD:
        assert "no rank wrote a pass: the command" in stated, stated
        return
    assert verify(path) == []
    with Session.open(path) as session:
        ids = [one for step in session.steps() for one in session.step(step).sequences[0].ids]
        assert ids == [at % 16 for at in range(len(ids))], ids
        assert 0 < len(ids) <= PASSES
    if attach.returncode:
        assert (
            "the command ended with exit code 9" in stated or "the command was ended by SIGKILL" in stated
        ), stated
    else:
        assert len(ids) == PASSES
    if attach.returncode == 9:
        assert (
            f"rank {name[-1]} did not come to the end" in stated or "of 2" in stated or "1/2 ranks" in stated
        ), stated


def attach_hostile(seed: int, directory: Path) -> None:
    """One kind of hostility after a whole recording."""
    program = directory / "engine.py"
    program.write_text(FLOODING + "tape.close()\n")
    words = HOSTILE[seed % len(HOSTILE)]
    script = f'"$0" {program} && cd $LOCKSTEP_TAP && {words}'
    attach = _attach(directory, "sh", "-c", script, sys.executable)
    _, stated = attach.communicate(timeout=_PATIENCE)
    assert attach.returncode in (0, 137, Exit.CANNOT_LOAD, Exit.INCONCLUSIVE), (attach.returncode, stated)
    assert "\x1b" not in stated
    assert "Traceback" not in stated
    assert (attach.returncode == Exit.CANNOT_LOAD) == (not (directory / "a.session").exists()), stated
    _nothing_left(directory, time.monotonic())


def attach_flood(seed: int, directory: Path) -> None:
    """One kind of flood, and how much memory and disk it takes."""
    program = directory / "engine.py"
    program.write_text(FLOODING + FLOODS[seed % len(FLOODS)] + "\n")
    attach = _attach(directory, sys.executable, str(program), LOCKSTEP_TAP_BYTES=str(16 << 20))
    most = 0
    while attach.poll() is None:
        with suppress(OSError):  # files go while they are counted
            most = max(most, sum(file.stat().st_blocks * 512 for file in directory.rglob("pass*")))
        time.sleep(0.05)
    out, stated = attach.communicate()
    assert (attach.returncode, out) == (0, "went on\n"), stated
    assert "stopped recording at" in stated or "recording stopped at" in stated, stated
    assert most < 64 << 20, most
    with Session.open(directory / "a.session") as session:
        assert len(session.steps()) >= 1
