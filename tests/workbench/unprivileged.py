"""Commands as a user whom the modes of files bind, which root is not: a process without capabilities."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_CAPBSET_DROP = 24


def _give_up_capabilities() -> None:
    """What root may start from now on has none."""
    number = 0
    while _LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1


def unprivileged(*words: str, cwd: Path = ROOT, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a `lockstep` command line; `settings` go into its environment."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "lockstep.workbench.cli", *words],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **settings}, capture_output=True, text=True,
        timeout=150, check=False, preexec_fn=_give_up_capabilities if os.getuid() == 0 else None,
    )  # fmt: skip
