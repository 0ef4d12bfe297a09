"""What becomes of an engine when a rank dies, raises, hangs or loses its host: no rank is lost without its
name, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import RankError, RankTimeout, RequestError
from lockstep.engine.ranks.client import Client
from lockstep.engine.ranks.messages import (
    AbandonStep,
    AddSequence,
    Ping,
    ReadCache,
    ReadTap,
    ReadWeight,
    RemoveSequence,
    Rewind,
    RunStep,
    SetSampling,
)
from lockstep.engine.ranks.reports import PauseReport
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.breaks import PauseSpec
from lockstep.engine.taps.names import model_taps
from tests.engine.harness import model_config

pytestmark = pytest.mark.sampled_file(2)

ROOT = Path(__file__).parents[3]
PAUSED = RunStep(pause=PauseSpec("operation"))
O_PROJ = "layers.0.attn.o_proj"  # where the troubled rank gets into trouble


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of temporary files that must be empty at the end."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return place


@pytest.fixture
def start(own_tmp: Path, variant: Callable[[str], Path]) -> Iterator[Callable[..., Client]]:
    """Start a troubled engine at TP=2 with a model and a prompt; afterwards nothing of it may be left."""
    clients: list[Client] = []
    pids: list[int] = []

    def go(**trouble: str) -> Client:
        path = variant("qwen2-tied")
        specs = model_taps(model_config(path), 2)
        client = Client(EngineConfig(tp=2, threads=1), specs, program="tests.engine.troubled_rank")
        clients.append(client)
        pids.extend(client.pids)
        client.load(path, trouble)
        client.call(AddSequence(0, [5, 6, 7]))
        return client

    yield go
    for client in clients:
        client.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)], "a rank outlived its engine"
    assert not list(own_tmp.iterdir()), "files were left behind"
    assert not [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]


def reach(client: Client, rank: int, tap: str) -> None:
    """Wait until a rank stands at a tap, or in its collective."""
    while f"{tap}, " not in client.standing()[rank]:
        time.sleep(0.01)


def check_on(client: Client) -> None:
    """Look at idle ranks until something is wrong."""
    while True:
        client.check()


@contextmanager
def ends(client: Client) -> Iterator[None]:
    """The engine must have ended, with all its processes, when the block is left."""
    ranks = [psutil.Process(pid) for pid in client.pids]
    yield
    assert not client.alive
    assert not any(rank.is_running() for rank in ranks)
    with pytest.raises(RankError, match="ended"):
        client.call(Ping())


def test_a_rank_killed_while_idle_is_named(start: Callable[..., Client]) -> None:
    client = start()
    client.call(RunStep())
    with ends(client):
        client.check()
        os.kill(client.pids[0], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 0 is lost: killed by SIGKILL"):
            check_on(client)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_a_step_is_named_with_its_operation(
    start: Callable[..., Client], victim: int
) -> None:
    """Rank 1 is at work; rank 0 waits for it in the collective. Whichever dies, it is the one that is named,
    not the one whose connection broke because of it."""
    client = start(trouble="sleep")
    client.send(RunStep())
    reach(client, 0, O_PROJ)
    reach(client, 1, O_PROJ)
    with ends(client):
        os.kill(client.pids[victim], signal.SIGKILL)
        with pytest.raises(RankError, match=f"rank {victim} is lost: killed by SIGKILL") as error:
            client.collect(RunStep(), 60)
        assert not isinstance(error.value, RankTimeout)
        at = f"in the all-reduce of {O_PROJ}" if victim == 0 else f"at {O_PROJ}"
        assert f"rank {victim} {at}, step 0" in str(error.value)


def test_a_rank_killed_while_paused_is_named(start: Callable[..., Client]) -> None:
    client = start()
    assert all(isinstance(one, PauseReport) for one in client.call(PAUSED))
    with ends(client):
        os.kill(client.pids[1], signal.SIGKILL)
        with pytest.raises(
            RankError, match=r"rank 1 is lost: killed by SIGKILL.*rank 1 at embed \(paused\), step 0"
        ):
            client.call(ReadTap(0))


def test_a_paused_engine_closes_and_closing_twice_is_harmless(start: Callable[..., Client]) -> None:
    client = start()
    client.call(PAUSED)
    with ends(client):
        client.close()
        client.close()


def test_a_rank_that_raises_is_named_with_its_traceback(start: Callable[..., Client]) -> None:
    client = start(trouble="raise")
    with ends(client), pytest.raises(RankError, match="rank 1 raised ArithmeticError: trouble was") as error:
        client.call(RunStep())
    assert f"rank 1 at {O_PROJ}, step 0" in str(error.value)
    assert any("troubled_rank.py" in note for note in error.value.__notes__)


def test_one_rank_that_refuses_ends_the_engine_with_what_it_reported(start: Callable[..., Client]) -> None:
    client = start(trouble="refuse")
    with ends(client), pytest.raises(RequestError, match=r"this rank alone refuses.*rank 1 alone"):
        client.call(RunStep())


def test_mistakes_and_slow_passes_leave_the_engine_alive(start: Callable[..., Client]) -> None:
    client = start(trouble="slow", step="1")
    for command, message in [
        (AddSequence(0, [1]), "sequence 0 is already there"),
        (AddSequence(1, []), "the prompt is empty"),
        (AddSequence(1, [131]), "token id 131 is out of range.*0 to 130"),
        (AddSequence(1, [-1]), "token id -1 is out of range"),
        (AddSequence(1, [1] * 257), "257 tokens, the context holds 256"),
        (RunStep({0: 131}), "token id 131 is out of range"),
        (RunStep({9: 1}), "there is no sequence 9: there is 0"),
        (RemoveSequence(9), "there is no sequence 9"),
        (SetSampling(9, Sampling()), "there is no sequence 9"),
        (ReadCache(0, 9), "there is no sequence 9"),
        (ReadCache(3), "there is no layer 3: the model has 3"),
        (ReadTap(0), "embed has not passed"),
        (ReadTap(9999), "there is no tap 9999"),
        (ReadWeight("nonsense"), "there is no weight 'nonsense'"),
        (Rewind({0: (9, 0, 0)}, 0), "cannot rewind sequence 0 to 9 ids.*it has 3 ids"),
        (AbandonStep(), "no step is paused"),
    ]:
        with pytest.raises(RequestError, match=message):
            client.call(command)
    assert client.alive
    assert client.call(RunStep())[0].sequences[0].positions == [0, 1, 2]
    # Six pauses of a fifth of a second are longer than the limit together, but each moves on before it.
    assert client.call(RunStep(), timeout=1.0)[0].phase == "decode"


HOST = """
import sys, time
from pathlib import Path
from lockstep.engine.ranks.client import Client
from lockstep.engine.config import EngineConfig
from lockstep.engine.ranks.messages import AddSequence, RunStep
client = Client(EngineConfig(tp=2, threads=1), program="tests.engine.troubled_rank")
client.load(Path(sys.argv[1]), {"trouble": "sleep"})
client.call(AddSequence(0, [5, 6, 7]))
client.send(RunStep())
while client.board.latest(0).place != client.board.latest(1).place or client.board.latest(1).place == 0:
    time.sleep(0.01)
print(*client.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_ranks_end_with_their_host(own_tmp: Path, variant: Callable[[str], Path]) -> None:
    """One rank sleeps in Python, the other waits for it in a collective: both end, and leave no file."""
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(variant("qwen2-tied"))], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in host.stdout.readline().split()]
    assert len(ranks) == 2
    host.kill()
    host.wait()
    host.stdout.close()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    assert not list(own_tmp.iterdir())
