"""What a child process inherits: nothing by which it would take code from the working directory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from lockstep.engine.children import ROOT, child_environment, names_working_directory, start_python

_HOSTILE = {
    "PYTHONPATH": ":lib:/opt/own:.", "PYTHONHOME": "here", "PYTHONUSERBASE": ".", "PYTHONPYCACHEPREFIX": "x",
    "PYTHONSTARTUP": "/opt/start.py", "PYTHONINSPECT": "1", "PYTHONBREAKPOINT": "evil.run",
    "PATH": ":/usr/bin:bin:/bin", "LD_LIBRARY_PATH": "/opt/lib;:", "LD_PRELOAD": "libc.so.6 ./evil.so",
    "TRITON_CACHE_DIR": "cache",
}  # fmt: skip
_CHECKED = {
    "PYTHONPATH": f"{ROOT}:/opt/own", "PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/opt/lib",
    "LD_PRELOAD": "libc.so.6",
}  # fmt: skip


def _inherit(monkeypatch: pytest.MonkeyPatch, values: Mapping[str, str]) -> None:
    for name in _HOSTILE:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_what_names_the_working_directory_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    _inherit(monkeypatch, {**_HOSTILE, "HF_HOME": "data"})
    child = child_environment({"OMP_NUM_THREADS": "3"})
    assert {name: child[name] for name in _HOSTILE if name in child} == _CHECKED
    assert (child["PYTHONSAFEPATH"], child["OMP_NUM_THREADS"], child["HF_HOME"]) == ("1", "3", "data")
    assert names_working_directory() == [
        "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX", "PATH", "LD_LIBRARY_PATH",
        "LD_PRELOAD", "TRITON_CACHE_DIR",
    ]  # fmt: skip


def test_a_harmless_environment_is_inherited_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = {"PYTHONPATH": f"{ROOT}:/opt/own", "PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/opt/lib"}
    _inherit(monkeypatch, harmless)
    assert names_working_directory() == []
    assert child_environment({}) == {**os.environ, "PYTHONSAFEPATH": "1"}


def test_an_empty_variable_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _inherit(monkeypatch, {"PYTHONPATH": "", "LD_LIBRARY_PATH": ""})
    assert names_working_directory() == []
    child = child_environment({})
    assert (child["PYTHONPATH"], child.get("LD_LIBRARY_PATH")) == (ROOT, None)


def test_children_of_children_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "colorsys.py").write_text("print('from the working directory')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path.parent}:")
    program = (
        "import colorsys, subprocess, sys\n"
        "code = 'import colorsys, lockstep.engine.children as c; print(c.ROOT)'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)"
    )
    with start_python("-c", program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        out, err = child.communicate(timeout=60)
    assert (out.decode(), err.decode()) == (f"{ROOT}\n", "")
