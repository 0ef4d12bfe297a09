"""What a run of the tests leaves in shared memory fails the run; what another run uses does not."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shared_memory import SHARED, left, names

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="this system shows no shared memory")


@pytest.fixture
def place() -> Iterator[Path]:
    path = SHARED / f"psm_lockstep_{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


def test_what_nobody_holds_is_left(place: Path) -> None:
    before = names()
    with place.open("w+b") as file:
        file.write(b"x")
        file.flush()
        assert place.name not in left(before, 0.3), "it is open"
        mapped = mmap.mmap(file.fileno(), 1)
    assert place.name not in left(before, 0.3), "it is mapped"
    mapped.close()
    assert place.name in left(before, 0.3)
    assert place.name not in left({*before, place.name}, 0.3), "it was there before"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("body", "code"), [("pass", 0), ("open({!r}, 'w').close()", 1)], ids=["nothing", "file"]
)
def test_a_run_that_leaves_something_fails(tmp_path: Path, place: Path, body: str, code: int) -> None:
    file = tmp_path / "test_leaving.py"
    file.write_text(f"def test_it():\n    {body.format(str(place))}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.shared_memory", "-p", "no:cacheprovider",
         f"--rootdir={tmp_path}", str(file)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert "1 passed" in done.stdout
    stated = f"the tests have left something in shared memory: {place.name}"
    assert (stated in done.stdout) == bool(code)
