"""What packages of somebody else's add, and what becomes of those that add nonsense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.workbench.attach.doors import doors
from lockstep.workbench.cli.main import run
from lockstep.workbench.extensions import ExtensionError, extensions
from lockstep.workbench.foreign.added import format_names, open_dump
from tests.workbench.added_packages import installed

RECORDED = Path(__file__).resolve().parents[2] / "sessions" / "recorded" / "mask-additive.session"

#: What a reader, a door and an exporter may be, and what is reported of it.
NONSENSE = {
    "import nothing_of_that_name\n": "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_that_name'",
    "x = 1 / 0\n": "cannot be imported: ZeroDivisionError",
    "other = print\n": "cannot be imported: AttributeError",
    "given = 3\n": "is no function",
}
GIVES = {
    "def given(folder, model): return None\n": "its reader gave NoneType, which is no ForeignRun: no folder",
    "def given(folder, model): return {}['x']\n": "its reader failed: KeyError: 'x'",
    "def given(folder): pass\n": "its reader failed: TypeError",
}
RUNS = {
    "facts = None\n    def passes(self, rank): yield 3": "its facts are NoneType, not ForeignFacts",
    "facts = ForeignFacts('x', 1)\n    def passes(self, rank): yield 3": "hold int, not ForeignPass",
    "facts = ForeignFacts('x', 1)\n    def passes(self, rank): return 3": "its reader failed: TypeError",
    "facts = ForeignFacts('x', 1)\n    def passes(self, rank): yield {}['a']": "its reader failed: KeyError: 'a'",
}


def readers(folder: Path, text: str, name: str = "acme", package: str = "lockstep-acme"):  # type: ignore[no-untyped-def]
    """A package with a reader."""
    point = f"{package.replace('-', '_')}:given"
    return installed(folder, package, {"__init__.py": text}, {"lockstep.readers": {name: point}})


@pytest.mark.parametrize("text", NONSENSE | GIVES, ids=str.strip)
def test_a_reader_that_is_none_is_reported_with_its_package(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with readers(tmp_path, text):
        assert "acme" in format_names()
        assert run(["import", "acme", str(tmp_path), "-o", str(tmp_path / "o.session")]) == 3
    reported = capsys.readouterr().err
    assert reported.startswith("lockstep: error: lockstep-acme 1.0 adds 'acme' to lockstep.readers, and ")
    assert (NONSENSE | GIVES)[text] in reported
    assert not (tmp_path / "o.session").exists()


@pytest.mark.parametrize("body", RUNS)
def test_a_run_that_is_none_is_reported_with_its_package(
    body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "from lockstep.workbench.foreign.passes import ForeignFacts\n"
        f"class Run:\n    folder = '.'\n    {body}\ndef given(folder, model): return Run()\n"
    )
    with readers(tmp_path, text):
        assert run(["import", "acme", str(tmp_path), "-o", str(tmp_path / "o.session")]) == 3
    reported = capsys.readouterr().err
    assert "lockstep-acme 1.0" in reported
    assert RUNS[body] in reported
    assert not (tmp_path / "o.session").exists()


def test_ours_is_never_hidden(tmp_path: Path) -> None:
    ours = format_names()
    with readers(tmp_path, "x = 1 / 0\n", name="lockstep"):
        assert format_names() == ours
        with pytest.raises(Exception, match=r"no rank0/tape\.json"):
            open_dump("lockstep", tmp_path, None)


def test_of_two_with_one_name_neither_is_taken(tmp_path: Path) -> None:
    with readers(tmp_path, ""), readers(tmp_path, "", package="lockstep-other"):
        assert "acme" not in extensions("lockstep.readers")


def test_a_name_that_would_act_on_a_terminal_is_none(tmp_path: Path) -> None:
    with readers(tmp_path, "", name="\x1b[2J"):
        assert not [name for name in format_names() if not name.isprintable()]


def test_a_known_format_names_the_package_that_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.workbench.foreign.added.extensions", lambda *_: {})
    assert run(["import", "msprobe", str(tmp_path)]) == 3
    assert (
        "importing msprobe needs a package of its own: pip install lockstep-msprobe"
        in capsys.readouterr().err
    )


def test_help_does_not_search_for_packages() -> None:
    code = (
        "import importlib.metadata as m\ndef refuse(**_): raise AssertionError('searched')\nm.entry_points = refuse\n"
        "from lockstep.workbench.cli.main import run\nassert run(['--help']) == run(['sessions']) == 0\n"
        "import sys; assert 'lockstep.workbench.extensions' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


DOORS = {
    "def given(): return None\n": "it gave NoneType, not EngineDoor",
    "from lockstep.workbench.attach.doors import EngineDoor\nfrom pathlib import Path\n"
    "def given(): return EngineDoor('x', Path('/nowhere'), {})\n": "its file /nowhere does not exist",
}


@pytest.mark.parametrize("text", NONSENSE | DOORS, ids=str.strip)
def test_a_door_that_is_none_is_reported_where_it_is_asked_for(text: str, tmp_path: Path) -> None:
    entries = {"lockstep.engines": {"acme": "lockstep_acme:given"}}
    with installed(tmp_path, "lockstep-acme", {"__init__.py": text}, entries):
        with pytest.raises(ExtensionError, match=r"^lockstep-acme 1\.0") as error:
            doors("acme", ("auto", "vllm"))
        assert (NONSENSE | DOORS)[text] in str(error.value)
        assert doors("vllm", ("auto", "vllm")) == ({}, [])
        found, wrong = doors("auto", ("auto", "vllm"))
    assert (found, wrong) == ({}, [str(error.value)])


EXPORTERS = {
    "def given(session, path, request): pass\n": (3, "it wrote no file"),
    "def given(session, path, request): raise KeyError(3)\n": (3, "it failed: KeyError: 3"),
    "from lockstep.workbench.export.session_files import NothingToExport\n"
    "def given(session, path, request): raise NothingToExport('no token')\n": (2, "--to acme: no token"),
}


@pytest.mark.parametrize("text", EXPORTERS)
def test_an_exporter_that_writes_nothing_leaves_nothing(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, reported = EXPORTERS[text]
    target = tmp_path / "out.txt"
    target.write_text("before")
    entries = {"lockstep.exporters": {"acme": "lockstep_acme:given"}}
    with installed(tmp_path, "lockstep-acme", {"__init__.py": text}, entries):
        assert run(["export", str(RECORDED), "--to", f"acme={target}"]) == code
        assert reported in capsys.readouterr().err
        assert run(["export", str(RECORDED), "--to", "other=x"]) == 2
        assert "no such exporter; there is: acme" in capsys.readouterr().err
        assert run(["export", str(RECORDED), "--to", "acme"]) == 2
    assert target.read_text() == "before"
