"""A foreign name never makes a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.workbench.paths import file_stem, new_session_path
from tests.sessions.strangers import WORDS

NAMES = (
    *WORDS, "..", ".", "~", "~root", ".hidden", "-rf", "a\\b", "C:\\x", "con", "Nul.txt", "COM1", "x" * 300, "é" * 300,
    "雨" * 300, "\udcff", "a\u0301", "layers.0.attn.q_proj", "load_bias=false", "$(id)", "*", "?", "a b", "'", '"',
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_name_is_one_name(name: str, tmp_path: Path) -> None:
    stem = file_stem(name)
    file = tmp_path / f"{stem}-step3.svg"
    file.touch()  # the system takes it
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert Path(stem).name == stem
    assert 0 < len(stem.encode()) <= 101
    assert not stem.startswith((".", "-", "~"))
    assert not set(stem) & set("/\\:*?\"'<>|$`~ \n\t\0")
    assert stem.split(".")[0].upper() not in ("CON", "NUL", "COM1")
    assert file_stem(stem) == stem


def test_what_a_name_states_is_kept() -> None:
    assert file_stem("layers-0-attn-q_proj") == "layers-0-attn-q_proj"
    assert file_stem("Qwen2.5-0.5B=x") == "Qwen2.5-0.5B=x"
    assert file_stem("../../etc/passwd") == "etc-passwd"
    assert file_stem("模型") == "模型"
    assert file_stem("") == file_stem("...") == "unnamed"


def test_a_session_of_a_model_with_any_name_lies_in_the_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(tmp_path))
    for name in NAMES:
        assert new_session_path(name).parent == tmp_path / "sessions"
