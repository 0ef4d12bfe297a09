"""No frame between host and ranks holds more than one tensor, however much a step captures or is corrected by."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.engine.errors import RankError
from lockstep.engine.ranks import wire
from lockstep.engine.ranks.messages import Ping, StagePatch
from lockstep.engine.run.memory import report_bytes
from tests.engine.small_frames_rank import MOST

PROMPT = [random.Random(0).randrange(131) for _ in range(200)]


@pytest.fixture(params=[1, 2])
def engine(
    request: pytest.FixtureRequest, variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """An engine whose frames may hold two mebibytes, on either side, with every tap captured whole."""
    monkeypatch.setattr(wire, "MAX_FRAME", MOST)
    config = EngineConfig(tp=request.param, threads=1)
    with Engine(config, program="tests.engine.small_frames_rank") as engine:
        engine.load(variant("qwen2-tied"))
        engine.capture("*", statistics=True)
        engine.add(PROMPT)
        yield engine


def test_a_full_capture_and_its_corrections_may_be_larger_than_a_frame(engine: Engine) -> None:
    """Every tap overwritten by what it gave, once it was recorded: the same bits follow."""
    plain = engine.step()
    assert all(rank.connection.most == report_bytes(engine.model) for rank in engine.client._ranks)
    for report in plain.reports:
        assert len(report.tensors) == len(engine.specs)
        assert sum(len(one.value.data) for one in report.tensors) > 2 * MOST
    engine.client.patch(
        {
            rank: StagePatch(one.tap, 0, 0, [(0, size) for size in one.value.shape], one.value, after=True)
            for rank, one in enumerate(parts)
        }
        for parts in zip(*(report.tensors for report in plain.reports), strict=True)
    )
    engine.rules({})
    engine.add(PROMPT)
    assert (engine.step().checksums == plain.checksums).all()


def test_each_rank_is_sent_its_own_share_alone(engine: Engine) -> None:
    """A patch of the last rank: only that rank's part changes, before anything is summed."""
    plain = engine.step()
    tap = "layers.1.attn.q_proj"
    place = [spec.name for spec in engine.specs].index(tap)
    last = len(plain.reports) - 1
    zeros = wire.WireArray.of(np.zeros((len(PROMPT), 8), np.float32), "float32")
    engine.client.patch([{last: StagePatch(place, 0, 0, [(0, len(PROMPT)), (0, 8)], zeros)}])
    engine.rules({})
    engine.add(PROMPT)
    changed = engine.step()
    for rank, (part, before) in enumerate(zip(changed.parts(tap), plain.parts(tap), strict=True)):
        assert (part[:, :8] == 0).all() == (rank == last)
        assert (part[:, 8:] == before[:, 8:]).all()


def test_a_patch_that_could_not_be_made_leaves_those_in_force(engine: Engine) -> None:
    """What was sent before the failure is not put in force by the next patches either."""
    plain = engine.step().checksums

    def patches() -> Iterator[dict[int, StagePatch]]:
        zeros = wire.WireArray.of(np.zeros((1, 1), np.float32), "float32")
        yield {0: StagePatch(0, 0, 0, [(0, 1), (0, 1)], zeros)}
        raise ValueError("there is no golden value")

    with pytest.raises(ValueError, match="no golden value"):
        engine.client.patch(patches())
    engine.client.patch([])
    engine.rules({})
    engine.add(PROMPT)
    assert (engine.step().checksums == plain).all()


@pytest.mark.parametrize(
    ("junk", "printed"),
    [(b"\x05\x00\x00\x00GET /", "not a message of this protocol"), (b"\xff\xff\xff\xff", "at most 2097152")],
)
def test_a_rank_that_is_sent_junk_ends_and_reports_why(engine: Engine, junk: bytes, printed: str) -> None:
    engine.client._ranks[0].connection.socket.sendall(junk)
    with pytest.raises(RankError, match=f"rank 0 is lost.*{printed}"):
        engine.client.call(Ping())
    assert not engine.client.alive
