"""Commands on sessions that ask for much: each ends, with a result or with a line that states what was refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.workbench.cli.main import run
from tests.sessions.hostile_files import make


@pytest.mark.parametrize(("kind", "code"), [("meta bomb", 3), ("chained branches", 0)])
@pytest.mark.sampled(2)
def test_every_command_ends(tmp_path: Path, kind: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(make(kind, tmp_path / "a.session"))
    for words in (
        ["sessions", "show", path],
        ["diff", path, path],
        ["replay", path, "--ex", "branches"],
        ["export", path, "--json", str(tmp_path / "out.json")],
    ):
        assert run(words) == code, words
        stated = capsys.readouterr()
        assert stated.out or "`session_memory` in config.toml" in stated.err or words[0] == "export", words
