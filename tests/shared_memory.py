"""A run of the tests leaves nothing in shared memory: what is there is held against what was, once all is over."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

import pytest

SHARED = Path("/dev/shm")
#: What the engine, torch, multiprocessing and vLLM call theirs.
_OURS = ("lockstep*", "torch_*", "psm_*", "sem.*", "vllm_*", "nccl-*")
_BEFORE = pytest.StashKey[set[str]]()


def names() -> set[str]:
    """What lies in shared memory under names of ours; nothing where a system shows none."""
    there = SHARED.iterdir() if SHARED.is_dir() else ()
    return {one.name for one in there if any(fnmatch(one.name, pattern) for pattern in _OURS)}


def left(before: set[str], patience: float = 3.0) -> set[str]:
    """What has come since and nobody holds any more: other runs of the tests may go on beside this one. What is just
    being made or removed has `patience` seconds."""
    deadline, found = time.monotonic() + patience, names() - before
    while found and (found := (found - _held()) & names()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _held() -> set[str]:
    """What a process has mapped or opened."""
    held = set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            held |= set(re.findall(rf"{SHARED}/(\S+)", (process / "maps").read_text(errors="replace")))
            for descriptor in list((process / "fd").iterdir()):
                with suppress(OSError):  # closed since
                    held.add(Path(os.readlink(descriptor)).name)
    return held


def pytest_configure(config: pytest.Config) -> None:
    """Of the workers only the one who started them looks."""
    if not hasattr(config, "workerinput"):
        config.stash[_BEFORE] = names()


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """The run fails where something is left."""
    yield
    before = session.config.stash.get(_BEFORE, None)
    found = set[str]() if before is None else left(before)
    if found:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        text = f"the tests have left something in shared memory: {', '.join(sorted(found))}"
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(text, red=True)
