"""Terminals for the end-to-end tests, and a model that loads in no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.checkpoints import tiny_checkpoint
from tests.e2e.terminal import Terminal, terminal


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Makes terminals, each with directories of its own; all are closed at the end."""
    with ExitStack() as stack:

        def made(columns: int = 120, rows: int = 40) -> Terminal:
            directory = tmp_path / f"terminal{len(list(tmp_path.iterdir()))}"
            directory.mkdir()
            return stack.enter_context(terminal(directory, columns, rows))

        yield made


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of three layers: it talks nonsense, and does not stop."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")
