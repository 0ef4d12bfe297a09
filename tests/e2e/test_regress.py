"""docs/regress.md is a walk that can be taken: its commands, in their order, print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "regress.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_git_bisect_ends_at_the_planted_commit(tmp_path: Path) -> None:
    (engine,) = blocks("python")
    (tmp_path / "engine.py").write_text(engine)
    scripts, (shown,) = blocks("sh"), blocks("text")
    folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "LOCKSTEP_DATA_DIR": str(tmp_path / "data"),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-ec", "\n".join(scripts)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    at = 0
    for line in shown.splitlines():
        found = done.stdout.find(line, at)
        assert found >= 0, (line, done.stdout)
        at = found
