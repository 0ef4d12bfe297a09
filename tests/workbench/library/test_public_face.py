"""The package's own names: there for users and type checkers, and nothing of it is loaded before it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "sessions" / "recorded" / "load_bias-false.session"


def python(code: str, place: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", lockstep.__all__)
def test_every_name_is_handed_out(name: str) -> None:
    found = getattr(lockstep, name)
    assert getattr(found, "__doc__", None), f"{name} is documented"
    assert name in dir(lockstep)


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lockstep' has no attribute 'chek'"):
        lockstep.chek  # noqa: B018 - the access is the test


def test_type_checkers_are_shown_the_objects_that_are_handed_out() -> None:
    tree = ast.parse(Path(lockstep.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert shown.keys() == set(lockstep.__all__)
    for name, (home, there) in shown.items():
        assert getattr(lockstep, name) is getattr(sys.modules[str(home)], there)


def test_the_package_alone_loads_nothing(tmp_path: Path) -> None:
    stated = python(
        "import sys; before = set(sys.modules); import lockstep; print(sorted(set(sys.modules) - before))",
        tmp_path,
    )
    assert stated == "['lockstep']\n"


def test_reading_a_session_loads_no_torch(tmp_path: Path) -> None:
    python(
        f"import sys, lockstep\nrun = lockstep.open({str(RECORDED)!r})\n"
        "run.tokens(), run.statistics('logits'), run._repr_html_(), run.attention(0)._repr_html_()\n"
        "run.heatmap('layers.0.attn.probs'), lockstep.diff(run, run)._repr_html_()\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
        "assert 'lockstep.workbench.cli' not in sys.modules, 'it takes the working directory off the path'",
        tmp_path,
    )
