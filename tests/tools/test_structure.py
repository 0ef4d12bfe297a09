"""The rules about structure, on small trees that break them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def structure() -> ModuleType:
    """tools/structure.py, which is no package."""
    spec = spec_from_file_location("structure", ROOT / "tools" / "structure.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["structure"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def problems(structure: ModuleType, tmp_path: Path) -> Callable[[dict[str, str]], list[str]]:
    """The problems of a tree of files."""

    def of(files: dict[str, str]) -> list[str]:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return list(structure.problems(structure.modules(tmp_path)))

    return of


def test_a_class_name_stands_once(problems: Callable[[dict[str, str]], list[str]]) -> None:
    found = problems(
        {"engine/a.py": "class Tap: ...\n", "workbench/b.py": "class Tap: ...\nclass Other: ...\n"}
    )
    assert len(found) == 1
    assert "class Tap stands in engine/a.py, workbench/b.py" in found[0]


def test_a_file_is_not_long(problems: Callable[[dict[str, str]], list[str]]) -> None:
    found = problems({"engine/a.py": "x = 1\n" * 500, "engine/b.py": "x = 1\n" * 501})
    assert found == ["engine/b.py has 501 lines, 500 at most: split it by purpose"]


def test_files_do_not_import_each_other(problems: Callable[[dict[str, str]], list[str]]) -> None:
    """Through a third file, inside a function, and for types alone."""
    found = problems({
        "sessions/a.py": "from lockstep.sessions import b\n",
        "sessions/b.py": "def f():\n    import lockstep.sessions.c\n",
        "sessions/c.py": "if TYPE_CHECKING:\n    from lockstep.sessions.a import X\n",
        "sessions/d.py": "from lockstep.sessions.a import X\n",
    })  # fmt: skip
    assert found == ["lockstep.sessions.a, lockstep.sessions.b, lockstep.sessions.c import each other"]


def test_untyped_data_is_counted(
    structure: ModuleType, problems: Callable[[dict[str, str]], list[str]]
) -> None:
    line = "x: dict[str, Any] = {}\n"
    most = structure.MOST_UNTYPED
    assert problems({"engine/a.py": line * most}) == []
    assert len(problems({"engine/b.py": line})) == 1


@pytest.mark.slow
def test_the_product_keeps_the_rules(structure: ModuleType) -> None:
    assert list(structure.problems(structure.modules(ROOT))) == []
