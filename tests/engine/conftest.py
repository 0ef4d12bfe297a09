"""Engines shared by the tests of this package: starting a rank costs seconds (it imports torch)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny_variant
from tests.engine.harness import Engine


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny tensors gain nothing from threads, and other processes run beside the tests."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name of `tests.checkpoints.VARIANTS` -> its checkpoint, written once a session."""
    written: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in written:
            written[name] = tiny_variant(tmp_path_factory.mktemp(name), name)
        return written[name]

    return path


@pytest.fixture(scope="session")
def _engines() -> Iterator[dict[int, Engine]]:
    engines: dict[int, Engine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def engine_of(_engines: dict[int, Engine]) -> Callable[[int], Engine]:
    """tp -> an engine of so many rank processes, started when first asked for; load a model into it."""

    def get(tp: int) -> Engine:
        if tp not in _engines:
            _engines[tp] = Engine(tp)
        _engines[tp].revive()
        return _engines[tp]

    return get
