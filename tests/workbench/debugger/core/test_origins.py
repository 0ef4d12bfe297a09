"""`origin` on a stranger's session, whose taps may have any names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.workbench.debugger.errors import DebuggerError
from lockstep.workbench.debugger.host.replay import open_replay
from tests.sessions.samples import tamper

RECORDED = Path(__file__).parents[4] / "sessions" / "recorded" / "mask-additive.session"
STRANGE = (
    "layers.x.attn.scores",
    "layers.0.attn.surprise",
    "layers.99999999999.foo",
    "attn.k_cache",
    "layers.7",
    "odd",
)


def renamed(path: Path, names: dict[str, str]) -> Path:
    """The recording (NaN from the first scores on) with some of its taps under other names."""
    shutil.copyfile(RECORDED, path)
    for known, strange in names.items():
        tamper(path, "UPDATE taps SET name = ? WHERE name = ?", arguments=(strange, known))
    return path


@pytest.mark.parametrize("name", STRANGE)
def test_a_strangers_tap_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with open_replay(renamed(tmp_path / "a.session", {"layers.0.attn.scores": name})) as debugger:
        debugger.execute("next")
        with pytest.raises(DebuggerError, match=f"^{name} is no tap of a decoder"):
            debugger.execute(f"origin {name}")


@pytest.mark.parametrize("name", STRANGE)
def test_a_strangers_tap_does_not_hide_the_origin_among_the_others(tmp_path: Path, name: str) -> None:
    with open_replay(renamed(tmp_path / "a.session", {"layers.0.attn.scores": name})) as debugger:
        debugger.execute("next")
        found = debugger.execute("origin").to_json()
    assert (found["tap"], found["what"]) == ("layers.0.attn.probs", "NaN")


def test_where_all_that_is_wrong_is_a_strangers_the_first_is_named(tmp_path: Path) -> None:
    path = renamed(tmp_path / "a.session", {})
    tamper(path, "UPDATE taps SET name = 'x.' || name")
    with open_replay(path) as debugger:
        debugger.execute("next")
        with pytest.raises(DebuggerError, match="is no tap of a decoder"):
            debugger.execute("origin")
