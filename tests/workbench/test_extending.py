"""docs/extending.md is a package that works: its files, and the commands that it shows."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from lockstep.sessions import Session
from lockstep.workbench.cli.main import run
from tests.workbench.added_packages import installed

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")

#: An engine, and a program that serves it.
ENGINE = "import torch\ndef forward(ids, positions): return torch.eye(9)[torch.tensor(ids)]\n"
SERVE = "import acme_engine\nacme_engine.forward([1, 2], [0, 1])\nacme_engine.forward([3], [2])\n"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_page_is_a_package_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project,), (package, inside), (commands,) = (blocks(one) for one in ("toml", "python", "sh"))
    reported = tomllib.loads(project)["project"]
    (tmp_path / "dump").mkdir()
    for k, ids in enumerate(([1, 2], [3])):
        positions = [0, 1] if k == 0 else [2]
        taps = {"embed": [[0.5, 1.0]] * len(ids), "logits": [[0.0, 0.0, 0.0, 1.0]] * len(ids)}
        file = tmp_path / "dump" / f"pass{k}.json"
        file.write_text(json.dumps({"ids": ids, "positions": positions, "taps": taps}))
    (tmp_path / "acme_engine.py").write_text(ENGINE)
    (tmp_path / "serve.py").write_text(SERVE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    files = {"__init__.py": package, "inside.py": inside}
    with installed(tmp_path, reported["name"], files, reported["entry-points"]):
        for line in commands.splitlines():
            assert run(shlex.split(line)[1:]) == 0, line
    for name in ("imported", "attached"):
        with Session.open(tmp_path / f"{name}.session") as session:
            assert [tap.name for tap in session.taps] == ["embed", "logits"]
            assert len(session.steps()) == 2
    assert (tmp_path / "tokens.txt").read_text().startswith("3 ")
