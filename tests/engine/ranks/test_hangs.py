"""Who is to blame where a command has no end: named by what each rank has noted of its operations."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import RankTimeout
from lockstep.engine.parallel.operations import Note, OpKind
from lockstep.engine.ranks import client as client_module
from lockstep.engine.ranks.client import Client
from lockstep.engine.ranks.hangs import RankTrace, hang_text
from lockstep.engine.ranks.messages import AddSequence, LoadModel, RunStep, WatchTaps
from lockstep.engine.ranks.progress import RING, ProgressBoard
from lockstep.engine.ranks.vitals import Vitals
from lockstep.engine.taps.names import model_taps
from tests.engine.harness import model_config
from tests.engine.troubled_rank import SPIN_SECONDS

pytestmark = pytest.mark.sampled_file(2)

PROGRAM = "tests.engine.troubled_rank"
O_PROJ = "layers.0.attn.o_proj"
TAPS = ["embed", "layers.0.attn.o_proj", "layers.0.mlp.down"]


# --- by what was noted alone ---------------------------------------------------------------------------


def trace(
    rank: int,
    *noted: tuple[OpKind, int, bool],
    state: str = "sleeping",
    answered: bool = False,
    silent: float = 0.0,
) -> RankTrace:
    """A rank that has noted these kinds at these places; the last may be inside a collective."""
    history, entered = [], 0
    for number, (kind, place, inside) in enumerate(noted, 1):
        entered += kind in (OpKind.ALL_REDUCE, OpKind.GATHER, OpKind.BROADCAST)
        history.append(Note(number, kind, 3, place, entered, inside))
    return RankTrace(rank, history, Vitals(100 + rank, state, 1.5, silent), answered)


REDUCED = (OpKind.ALL_REDUCE, 0, False)
WAITS = (OpKind.ALL_REDUCE, 1, True)


@pytest.mark.parametrize(
    ("traces", "printed"),
    [
        (  # before the collective
            [trace(0, REDUCED, WAITS), trace(1, REDUCED, (OpKind.TAP, 1, False), state="stopped")],
            "rank 1 has not entered the all-reduce of layers.0.attn.o_proj that rank 0 waits in: its process "
            "(pid 101) is stopped (state T: SIGSTOP or SIGTSTP)",
        ),
        (  # the same, asleep in Python: no state shows it
            [trace(0, REDUCED, (OpKind.TAP, 1, False)), trace(1, REDUCED, WAITS)],
            "rank 0 has not entered the all-reduce of layers.0.attn.o_proj that rank 1 waits in: its process "
            "(pid 100) is sleeping (1.5 s of processor time)",
        ),
        (  # within it
            [trace(0, WAITS), trace(1, WAITS, state="stopped")],
            "rank 1 does not come out of the all-reduce of layers.0.attn.o_proj, where rank 0 waits as well",
        ),
        (  # all wait, nobody is stopped: the connection between them
            [trace(0, WAITS), trace(1, WAITS)],
            "rank 0 does not come out of the all-reduce of layers.0.attn.o_proj, where rank 1 waits as well",
        ),
        (  # idle, and never to take the command
            [trace(0, (OpKind.IDLE, 0, False), answered=True), trace(1, (OpKind.IDLE, 0, False))],
            "rank 1 has not begun the command",
        ),
        (  # a rank alone
            [trace(0, (OpKind.TAP, 2, False), state="stopped")],
            "rank 0 does not go on from layers.0.mlp.down, step 3: its process (pid 100) is stopped",
        ),
        (  # elsewhere: all that is known is its silence
            [trace(0, REDUCED, WAITS), trace(1, REDUCED, state="", silent=9.0)],
            "rank 1 has not entered the all-reduce of layers.0.attn.o_proj that rank 0 waits in: nothing was heard "
            "of its process (pid 101) for 9 s",
        ),
        (  # it never started
            [trace(0, (OpKind.RENDEZVOUS, 0, True)), trace(1, state="stopped")],
            "rank 1 does not go on from its start, before its first operation",
        ),
        (  # another way through the code: one all-reduce less
            [
                trace(0, REDUCED, (OpKind.ALL_REDUCE, 1, False), (OpKind.ALL_REDUCE, 2, True)),
                trace(1, REDUCED, (OpKind.ALL_REDUCE, 2, False), (OpKind.GATHER, 2, True)),
            ],
            "rank 1 and rank 0 are out of step: collective 2 is the all-reduce of layers.0.mlp.down (step 3) on rank "
            "1 and the all-reduce of layers.0.attn.o_proj (step 3) on rank 0",
        ),
        (  # and done already
            [trace(0, REDUCED, WAITS), trace(1, REDUCED, (OpKind.IDLE, 0, False), answered=True)],
            "rank 1 has not entered the all-reduce of layers.0.attn.o_proj that rank 0 waits in, and has answered: "
            "the ranks are out of step",
        ),
        (  # three ranks, two of which wait
            [trace(0, REDUCED, WAITS), trace(1, REDUCED, WAITS), trace(2, REDUCED)],
            "rank 2 has not entered the all-reduce of layers.0.attn.o_proj that rank 0, 1 wait in",
        ),
        (
            [trace(0, (OpKind.SEND, 1, True)), trace(1, (OpKind.LOADING, 4, False))],
            "rank 1 does not go on from loading, tensor 4, step 3, while rank 0 waits in the sending of a shard to "
            "rank 1",
        ),
    ],
)  # fmt: skip
def test_the_rank_that_the_others_wait_for_is_named(traces: list[RankTrace], printed: str) -> None:
    assert hang_text(traces, TAPS).startswith(printed)


def test_the_board_keeps_the_last_operations_and_takes_over_a_ring() -> None:
    here, there = ProgressBoard.create(2), ProgressBoard.create(2)
    for number in range(1, RING + 11):
        here.write(1, number, 7, number % 3, number // 2, OpKind.ALL_REDUCE, True)
    here.write(1, RING + 10, 7, 2, 9, OpKind.ALL_REDUCE, False)  # left
    there.put_ring(1, here.ring(1))
    history = there.history(1)
    assert [one.number for one in history] == list(range(11, RING + 11))
    assert there.latest(1) == Note(RING + 10, OpKind.ALL_REDUCE, 7, 2, 9, False)
    assert there.operations() == RING + 10
    assert there.latest(0).kind is OpKind.START
    here.close()
    there.close()


# --- with ranks ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _running() -> Iterator[list[Client]]:
    clients: list[Client] = []
    yield clients
    for client in clients:
        client.close()


@pytest.fixture
def engine(_running: list[Client], variant: Callable[[str], Path]) -> Callable[..., Client]:
    """Two ranks in some trouble, with a prompt; new ones where a test has ended the last."""
    path = variant("qwen2-tied")

    def loaded(**trouble: str) -> Client:
        if not _running or not _running[-1].alive:
            specs = model_taps(model_config(path), 2)
            _running.append(Client(EngineConfig(tp=2, threads=1), specs, program=PROGRAM))
        _running[-1].load(path, trouble)
        _running[-1].call(AddSequence(0, [5, 6, 7]))
        return _running[-1]

    return loaded


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def settle(client: Client) -> None:
    """Until no rank gets on."""
    before, still = -1, 0
    while still < 5:
        time.sleep(0.02)
        now = client.board.operations()
        before, still = now, still + 1 if now == before else 0


def test_a_stopped_rank_is_named_whenever_it_stops(
    engine: Callable[..., Client], variant: Callable[[str], Path]
) -> None:
    """Idle, loading, in a step: seeded, on one engine, which goes on each time."""
    client, chance = engine(), random.Random(0)
    for _ in range(8):
        victim = chance.randrange(2)
        client.call(WatchTaps(statistics=chance.random() < 0.5))
        loading = chance.random() < 0.3
        command = LoadModel(str(variant("qwen2-tied")), client.config) if loading else RunStep()
        idle = chance.random() < 0.2
        if not idle:
            client.send(command)
            time.sleep(chance.uniform(0, 0.01))
        with stopped(client.pids[victim]):
            if idle:
                client.send(command)
            settle(client)
            assert client.blame().startswith(f"rank {victim} "), client.blame()
            assert f"(pid {client.pids[victim]}) is stopped" in client.blame()
        client.collect(command, 60)
        if loading:
            client.call(AddSequence(0, [5, 6, 7]))


def test_a_rank_that_computes_is_slow_not_hung(engine: Callable[..., Client]) -> None:
    """It answers after four times the patience; one that sleeps so long is hung."""
    assert engine(trouble="spin").call(RunStep(), timeout=SPIN_SECONDS / 4)[0].phase == "prefill"


def test_a_hung_rank_ends_the_command_with_its_name(engine: Callable[..., Client]) -> None:
    client = engine()
    client.call(RunStep())
    settle(client)
    ranks = [psutil.Process(pid) for pid in client.pids]
    os.kill(client.pids[1], signal.SIGSTOP)
    with pytest.raises(RankTimeout) as error:
        client.call(RunStep(), timeout=1.0)
    stated, done = str(error.value), error.value.operations
    assert stated.startswith(
        "rank 1 has not entered the all-reduce of embed that rank 0 waits in: its process"
    )
    assert "No answer from rank 0, 1 within 1 s (rank 0 in the all-reduce of embed, step 1" in stated
    assert "rank 1 at rest, between commands, step 1" in stated
    assert done[0][-1] == "the all-reduce of embed (entered)"
    assert done[1][-3:] == [
        "the broadcast of the chosen tokens", "the sending of its answer", "rest, between commands",
    ]  # fmt: skip
    assert not client.alive
    assert not any(rank.is_running() for rank in ranks)


def test_a_rank_stopped_while_it_sends_is_late_not_dead(
    engine: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a message is there and the rest does not come."""
    client = engine()
    settle(client)
    os.kill(client.pids[1], signal.SIGSTOP)

    def stall(answers: object, seconds: float) -> dict[int, str]:
        return {1: client._ranks[1].epitaph()}

    monkeypatch.setattr(client, "_receive", stall)
    with pytest.raises(RankTimeout, match=r"^rank 1 is lost: .* is stopped \(state T"):
        client.call(RunStep())
    assert not client.alive


def test_a_stopped_rank_is_reported_before_the_patience_is_over(
    variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what continues it; and once it was continued the command ends as if nothing had been."""
    path, warnings = variant("qwen2-tied"), list[str]()
    monkeypatch.setattr(client_module, "STOPPED_SECONDS", 0.5)

    def warn(text: str) -> None:
        warnings.append(text)
        os.kill(client.pids[1], signal.SIGCONT)

    specs = model_taps(model_config(path), 2)
    with Client(EngineConfig(tp=2, threads=1), specs, program=PROGRAM, on_warning=warn) as client:
        client.load(path)
        client.call(AddSequence(0, [5, 6, 7]))
        os.kill(client.pids[1], signal.SIGSTOP)
        assert client.call(RunStep())[1].phase == "prefill"
    (stated,) = warnings
    assert stated.startswith(
        "rank 1 has not entered the all-reduce of embed that rank 0 waits in: its process"
    )
    assert stated.endswith(
        f"is stopped (state T: SIGSTOP or SIGTSTP); `kill -CONT {client.pids[1]}` continues it"
    )


@pytest.mark.slow
def test_a_rank_that_goes_another_way_is_reported(engine: Callable[..., Client]) -> None:
    """It leaves its all-reduces out: what it does instead is reported, and where the other stands."""
    with pytest.raises(RankTimeout) as error:
        engine(trouble="skip").call(RunStep(), timeout=1.0)
    stated = str(error.value)
    assert stated.startswith(
        "rank 1 and rank 0 are out of step: collective 3 is the gather of the logits (step 0)"
    )
    assert f"and the all-reduce of {O_PROJ} (step 0) on rank 0" in stated


def stop_later(victim: int, seconds: float) -> None:
    """Stop that rank of the engine that is being started, so many seconds from now."""

    def stop() -> None:
        for child in psutil.Process().children():
            words = child.cmdline()
            if PROGRAM in words and json.loads(words[-1])["rank"] == victim:
                child.suspend()
                return
        stop_later(victim, 0.01)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()


def run_for_ever(path: Path, chance: random.Random, victim: int) -> None:
    """A new engine under way; one rank stops at some time, from its start to idleness between steps."""
    config = EngineConfig(tp=2, threads=1, timeout_seconds=2, start_timeout_seconds=300)
    at_start = chance.random() < 0.4
    if at_start:
        stop_later(victim, chance.uniform(0, 3))
    with Client(config, model_taps(model_config(path), 2), program=PROGRAM) as client:
        if not at_start:
            stop_later(victim, chance.uniform(0, 0.5))
        while True:
            client.load(path)
            client.call(AddSequence(0, [5, 6, 7]))
            for _ in range(5):
                client.call(RunStep())
                time.sleep(chance.choice((0, 0, 0.02)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("fresh_processes")  # ranks are found among this process's children
@pytest.mark.parametrize("seed", range(15))
def test_a_rank_stopped_at_any_time_is_named(variant: Callable[[str], Path], seed: int) -> None:
    chance = random.Random(seed)
    victim = chance.randrange(2)
    with pytest.raises(RankTimeout) as error:
        run_for_ever(variant("qwen2-tied"), chance, victim)
    assert str(error.value).startswith(f"rank {victim} "), error.value
    assert " is stopped (state T" in str(error.value)
    print(str(error.value).partition(". No answer")[0])


def test_a_rank_that_stops_while_it_starts_is_named() -> None:
    """Start-up has a patience of its own."""
    config = EngineConfig(tp=2, threads=1, timeout_seconds=600, start_timeout_seconds=1)
    with pytest.raises(RankTimeout, match=r"^rank 0 does not go on from its start.* is stopped .*within 1 s"):
        Client(config, program="tests.engine.stopped_rank")


def test_a_rank_that_stops_while_it_starts_is_not_taken_for_slow() -> None:
    """The patience of start-up is for what computes: on a busy machine it may take minutes."""
    config = EngineConfig(tp=2, threads=1, timeout_seconds=1, start_timeout_seconds=600)
    stated = r"^rank 0 does not go on from its start.* is stopped .*within 1 s"
    with busy(2), pytest.raises(RankTimeout, match=stated):
        Client(config, program="tests.engine.stopped_rank")


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute without an end."""
    with ExitStack() as running:
        for _ in range(count):
            one = running.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            running.callback(one.kill)
        yield
