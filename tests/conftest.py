"""What every test gets: directories of its own, and no network. What it leaves in the working directory or in
shared memory fails the run."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from lockstep.engine import children
from tests.preloaded import Forking, Server
from tests.shared_memory import pytest_configure, pytest_sessionfinish  # noqa: F401 - hooks
from tests.turns import left_out

# The same examples every time, and no judgement of a busy machine's speed; `make fuzz` tries more.
settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("suite")

#: Where it is not Linux, each child is started.
_FORKING = hasattr(os, "pidfd_open")

# What the suite starts is sent SIGHUP by some tests, and would inherit that nohup ignores it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


#: Names the address of the server that forks for all workers of xdist.
_SHARED_SERVER = "LOCKSTEP_TEST_SERVER"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--turn N`: of long tables of slow cases a share."""
    parser.addoption("--turn", type=int, help="run a share of each long table of slow cases: tests/turns.py")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before xdist starts its workers: the server that forks their children."""
    config = session.config
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no" or not _FORKING:
        return
    folder = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
    server = Server(Path(folder.name) / "server")
    server.ensure_started()
    os.environ[_SHARED_SERVER] = server.address
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(server.close)
    config.add_cleanup(lambda: os.environ.pop(_SHARED_SERVER, None))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting leaves, torch, transformers and thousands of tests among it, is no garbage: the collector walks
    through it neither now nor later."""
    with children.loading():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a `sampled` test's cases, and of the tests of a `sampled_file`, every so many-th stays quick. A slow test that
    states no time of its own has ten minutes: the machine may be busy. Where a turn is asked for, slow cases of others
    are left out."""
    seen = Counter[str]()
    for item in items:
        for name, until in (("sampled", "["), ("sampled_file", "::")):
            sampled = item.get_closest_marker(name)
            if sampled is not None and not item.get_closest_marker("slow"):
                among = item.nodeid.partition(until)[0]
                if seen[among] % sampled.args[0]:
                    item.add_marker(pytest.mark.slow)
                seen[among] += 1
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))
    turn: int | None = config.getoption("turn")
    if turn is not None:
        others = left_out([item.nodeid for item in items if item.get_closest_marker("slow")], turn)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
        items[:] = [item for item in items if item.nodeid not in others]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test for a GPU is skipped where torch sees none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU here")


@pytest.fixture(scope="session", autouse=True)
def own_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sessions and caches go to a temporary directory, never to the user's; one for the whole run, so that
    what was recorded once (golden references) is there for the next test."""
    root, here = tmp_path_factory.mktemp("lockstep"), set(os.listdir())
    values = {
        "LOCKSTEP_DATA_DIR": str(root / "data"),
        "LOCKSTEP_CACHE_DIR": str(root / "cache"),
        "LOCKSTEP_STATE_DIR": str(root / "state"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    before = {name: os.environ.get(name) for name in (*values, "XDG_RUNTIME_DIR")}
    os.environ.pop("XDG_RUNTIME_DIR", None)
    os.environ.update(values)
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    left = {name for name in set(os.listdir()) - here if not name.startswith((".", "__"))}
    assert left <= {"snapshot_report.html"}, f"tests have written into the working directory: {sorted(left)}"


@pytest.fixture(scope="session", autouse=True)
def preloaded_processes(own_directories: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ranks, hosts and recorders are forked from a process that has torch loaded: see `tests.preloaded`."""
    if not _FORKING:
        yield
        return
    shared = os.environ.pop(_SHARED_SERVER, None)
    server = Server(
        Path(shared or tmp_path_factory.mktemp("children") / "server"), elsewhere=shared is not None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "subprocess", Forking(server))
        yield
    server.close()


@pytest.fixture
def fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process that the test starts is a new Python, as it is for a user."""
    monkeypatch.setattr(children, "subprocess", subprocess)
