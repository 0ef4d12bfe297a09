"""`attach` and `import` where the disk fills up: while the engine's ranks write, or while the session is made."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from lockstep.sessions import Session
from lockstep.sessions.verify import verify
from tests.workbench.unprivileged import ROOT

#: An engine that records itself, 0.2 to 1 MB a pass, and has an end of its own.
ENGINE = """
import random, torch
from _lockstep_attached.lockstep_recorder import open_tape
tape = open_tape("mine", 0, 1, mode="eager")
for at, ids in enumerate([[5, 6, 7], [8], [9]]):
    tape.step(ids, 0 if at == 0 else at + 2, "a")
    tape.tap("embed", torch.tensor(ids).float()[:, None].repeat(1, 8), "replicate")
    tape.tap("layers.0.attn_norm", torch.randn(len(ids), 1 << (14 + 2 * at)), "replicate")
    tape.tap("logits", torch.eye(16)[ids[-1:]], "replicate")
    tape.end()
print("the end of the engine")
"""
_ENDS = 7


def carry_out(limit: int, directory: Path) -> str:
    """Attach to it while no file may have more than `limit` bytes; what was reported on stderr. The engine ends as
    ever; a session is whole, or there is none and one line states why."""
    program, target = directory / "engine.py", directory / "out" / "run.session"
    program.write_text(f"{ENGINE}raise SystemExit({_ENDS})\n")
    target.parent.mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "lockstep", "attach", "-o", str(target), "--", sys.executable, str(program)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=110, check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.stdout == "the end of the engine\n", done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    left = {path.name for path in target.parent.iterdir()}
    if target.exists():
        assert done.returncode == _ENDS, done.stderr
        assert verify(target) == []
        with Session.open(target) as session:
            assert 0 < len(session.steps()) <= 3
            lost = len(session.steps()) < 3
        assert lost == ("recording stopped at pass" in done.stderr), done.stderr
        assert left == {"run.session"}
    else:
        assert done.returncode in (2, 3), done.stderr
        stated = done.stderr.replace(
            "recording stopped at pass 0, writing", f"cannot write a session to {target}"
        )
        assert f"cannot write a session to {target}" in stated, done.stderr
        assert left == set(), "half-made files are left"
    return done.stderr
