"""This engine and transformers in a child, on the same workloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.engine.config import EngineConfig
from lockstep.workbench.bench.contenders import (
    ContenderFailure,
    EngineContender,
    PeerContender,
    loaded_engine,
    memory_of,
)
from lockstep.workbench.bench.messages import Workload
from tests.checkpoints import tiny_checkpoint


@pytest.mark.slow
def test_a_peer_runs_batches_and_survives_what_it_cannot(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2")
    with PeerContender("transformers", path, "float32", 1, 128) as peer:
        assert peer.load_seconds > 0
        assert peer.load_bytes > 100 << 20
        timing = peer.run(Workload(3, 20, 2))
        assert 0 <= timing.bytes < peer.load_bytes
        assert (timing.prefill > 0, len(timing.decode)) == (True, 2)
        with pytest.raises(ContenderFailure, match="transformers: "):
            peer.run(Workload(-1, 20, 2))
        assert len(peer.run(Workload(1, 20, 1)).decode) == 1


@pytest.mark.slow
def test_a_peer_that_cannot_load_reports_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (
        pytest.raises(ContenderFailure, match="transformers: "),
        PeerContender("transformers", tmp_path, "float32", 1, 64),
    ):
        pass


def test_the_engine_is_left_as_it_was(tmp_path: Path) -> None:
    config = EngineConfig(threads=1, max_tokens=64, max_sequences=3)
    path = tiny_checkpoint(tmp_path, "llama")
    engine, seconds = loaded_engine(path, config)
    with engine:
        for statistics in (False, True):
            one = EngineContender("lockstep", engine, path, seconds, memory_of(engine).now, statistics)
            timing = one.run(Workload(3, 20, 4))
            assert len(timing.decode) == 4
            assert 0 <= timing.bytes < one.load_bytes
        assert engine.generate([[3, 4, 5]], 2)  # no sequence is left in its way


def test_an_engine_is_as_it_would_be_for_so_many(tmp_path: Path) -> None:
    """Weights are laid out by how many sequences it is for."""
    path = tiny_checkpoint(tmp_path, "llama")
    engine, seconds = loaded_engine(path, EngineConfig(threads=1, max_tokens=32, max_sequences=16))
    with engine:
        one = EngineContender("lockstep", engine, path, seconds, memory_of(engine).now)
        for batch, for_many in ((16, True), (1, False), (2, False), (9, True), (17, True)):
            assert len(one.run(Workload(batch, 4, 1)).decode) == 1
            assert engine.client.config.for_many == for_many
