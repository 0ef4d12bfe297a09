"""Trials of processes: ranks, hosts, screens and recorders killed or stopped at any moment, machines cut off."""

from __future__ import annotations

import json
import random
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path

import psutil

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.verify import verify
from lockstep.workbench.debugger.events import RankLostEvent, StepEvent
from lockstep.workbench.debugger.host.messages import AnswerFrame, ErrorAnswer, LineRequest, RequestFrame
from tests.checkpoints import tiny_checkpoint, tiny_variant
from tests.e2e import test_machines
from tests.e2e.machines import two_machines
from tests.e2e.terminal import ROOT, terminal
from tests.engine.ranks import test_hangs
from tests.gguf_twins import gguf_twin
from tests.soak.trial import shared
from tests.workbench.debugger.host.test_ending import HostProcess, folded, live
from tests.workbench.references.test_golden import _STARTER

#: Seconds after which what was asked to end has not ended.
_PATIENCE = 60.0
#: Has llama.cpp record a reference of the model that it is given.
_LLAMACPP = """
import sys
from lockstep.workbench.references.golden import Wanted, record_all
from lockstep.workbench.references.request import GoldenSequence
record_all(sys.argv[1], [GoldenSequence((3, 4, 5))], 200, [Wanted("float32", "llama.cpp")], threads=1)
"""


@cache
def model() -> Path:
    """A tiny Qwen2 whose context 4,000 steps do not fill."""
    return tiny_checkpoint(shared(), "qwen2", max_position_embeddings=4096)


@cache
def variant(name: str) -> Path:
    """A model by its name in `tests.checkpoints.VARIANTS`."""
    place = shared() / name
    place.mkdir()
    return tiny_variant(place, name)


@cache
def expected() -> list[int]:
    """The tokens that an undisturbed run of the model of `live` has first."""
    words = ["generate", str(model()), "--tp", "2", "--ids", "3,14,15", "--max-tokens", "300", "--json"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "lockstep.workbench.cli", *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    (sequence,) = json.loads(done.stdout)["sequences"]
    return list(sequence["ids"])


@contextmanager
def host_process(*words: str) -> Iterator[HostProcess]:
    """A host that is taken away afterwards."""
    host = HostProcess(*words)
    try:
        yield host
    finally:
        host.close()


def check_tokens(path: Path, reported: int) -> None:
    """Every step that was reported is recorded, with the tokens of an undisturbed run."""
    assert verify(path) == []
    with Session.open(path) as session:
        assert len(session.steps()) > reported, f"{len(session.steps())} steps; step {reported} was reported"
        emitted = [session.step(step).sequences[0].emitted for step in session.steps()]
    count = min(len(emitted), len(expected()))
    assert emitted[:count] == expected()[:count], "other tokens than undisturbed"


def kill_rank(seed: int, directory: Path) -> None:
    """One of two ranks while the model runs, every third time at rest; every fifth time the ranks start again."""
    chance, path, reported = random.Random(seed), directory / "a.session", -1
    victim, idle = chance.randrange(2), seed % 3 == 0
    named = f"rank {victim} is lost: killed by SIGKILL"
    with host_process(*live(model(), path)) as host:
        connection = host.ready()
        other = host.ranks[1 - victim]
        if not idle:
            connection.send(RequestFrame(1, LineRequest("until 100000")))
        timer = threading.Timer(chance.uniform(0, 1.0), host.ranks[victim].kill)
        timer.start()
        while not isinstance(frame := connection.receive(), AnswerFrame | RankLostEvent):
            reported = max(reported, frame.step) if isinstance(frame, StepEvent) else reported
        stated = frame.message if isinstance(frame, RankLostEvent) else ""
        if isinstance(frame, AnswerFrame):
            assert isinstance(frame.answer, ErrorAnswer), frame
            stated = frame.answer.error.message
        assert named in stated, stated
        other.wait(_PATIENCE)
        if seed % 5 == 0:
            for number, line in enumerate(("restart", "next 3"), 2):
                connection.send(RequestFrame(number, LineRequest(line)))
                while not (isinstance(frame := connection.receive(), AnswerFrame) and frame.id == number):
                    reported = max(reported, frame.step) if isinstance(frame, StepEvent) else reported
                assert not isinstance(frame.answer, ErrorAnswer), frame.answer
        connection.close()
        host.ended()
    assert folded(path) >= reported
    if reported >= 0:
        check_tokens(path, reported)


def kill_host(seed: int, directory: Path) -> None:
    """While it drives two ranks: they end, and the next writer folds the session."""
    chance, path, reported = random.Random(seed), directory / "a.session", -1
    with host_process(*live(model(), path)) as host:
        connection = host.ready()
        connection.send(RequestFrame(1, LineRequest("until 100000")))
        timer = threading.Timer(chance.uniform(0, 1.0), host.process.kill)
        timer.start()
        with suppress(OSError, EOFError):
            while True:
                frame = connection.receive()
                reported = max(reported, frame.step) if isinstance(frame, StepEvent) else reported
        connection.close()
        host.process.wait(_PATIENCE)
        _, alive = psutil.wait_procs(host.ranks, timeout=_PATIENCE)
        assert alive == [], "ranks outlive their host"
        host.folder.close()
        assert not host.directory.exists(), "temporary files of the host are left"
    check_tokens(path, reported)
    SessionWriter.reopen(path).close()
    assert folded(path) >= reported


def kill_screens(seed: int, directory: Path) -> None:
    """The screens in a real terminal, while the model runs."""
    chance = random.Random(seed)
    place = directory / "terminal"
    place.mkdir()
    with terminal(place) as here:
        here.start(f"lockstep tui {model()} --tp 2 --ids 3,14,15 --save live.session")
        here.wait("● stopped", "step 0/0")
        here.type("c")
        here.until(lambda shown: re.search(r"step [1-9]", shown))
        time.sleep(chance.uniform(0, 1.0))
        found = re.search(r"step (\d+)/", here.text())
        assert found is not None
        here.signal("lockstep.workbench.cli", signal.SIGKILL)
        here.nothing_is_left()
        assert folded(place / "live.session") >= int(found[1])
        check_tokens(place / "live.session", int(found[1]))


@cache
def gguf() -> Path:
    """A tiny model as a GGUF file without a tokenizer."""
    return gguf_twin(variant("llama-llama3"), shared() / "tiny.gguf", keys={"tokenizer.ggml.model": "none"})


def kill_recorder(seed: int, directory: Path) -> None:
    """The recorder of a golden reference, every third time whoever asked for it."""
    _kill_recorder(seed, directory, _STARTER, variant("qwen2-tied"))


def kill_llamacpp(seed: int, directory: Path) -> None:
    """The same with llama.cpp's recorder."""
    _kill_recorder(seed, directory, _LLAMACPP, gguf())


def _kill_recorder(seed: int, directory: Path, program: str, model: Path) -> None:
    chance, half_made = random.Random(seed), directory / "cache" / "golden"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(model)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as starter:
        while not (recorders := psutil.Process(starter.pid).children()) and starter.poll() is None:
            time.sleep(0.01)
        (recorder,) = recorders
        time.sleep(chance.uniform(0, 4.0))
        with suppress(psutil.NoSuchProcess):  # it is done
            (starter if seed % 3 == 2 else recorder).kill()
        _, stated = starter.communicate(timeout=_PATIENCE)
        recorder.wait(_PATIENCE)
    recorded = list(half_made.iterdir())
    for path in recorded:  # it was done before
        assert path.suffix == ".session", f"half made: {path.name}"
        assert verify(path) == []
    if not recorded and seed % 3 != 2:
        assert "killed by SIGKILL" in stated, stated[-300:]


def stop_rank(seed: int, directory: Path) -> None:
    """SIGSTOP to one of two ranks, from their start to rest between steps; every other time on a busy machine."""
    load = test_hangs.busy(2) if seed % 2 else nullcontext()
    with redirect_stdout(StringIO()), load:
        test_hangs.test_a_rank_stopped_at_any_time_is_named(variant, seed)


def run_live(steps: int, path: Path) -> None:
    """So many steps under a host, every one of which is there for a reader as soon as it was reported."""
    with host_process(*live(model(), path)) as host:
        connection = host.ready()
        connection.send(RequestFrame(1, LineRequest(f"next {steps}")))
        reported, read = -1, 0
        while not isinstance(frame := connection.receive(), AnswerFrame):
            if isinstance(frame, StepEvent):  # the newest: a slow client is not sent each
                assert frame.step > reported, f"step {frame.step} was reported after {reported}"
                reported = frame.step
                if reported >= read:
                    read = reported + 20
                    with Session.open(path) as session:
                        assert len(session.steps()) > reported
                        assert session.stats(reported) is not None
        assert not isinstance(frame.answer, ErrorAnswer), frame.answer
        assert read > 20
        connection.close()
        host.ended()
    assert folded(path) == steps - 1
    check_tokens(path, steps - 1)


def live_steps(seed: int, directory: Path) -> None:
    """The whole of it."""
    run_live(4000, directory / "a.session")


def join_machines(seed: int, directory: Path) -> None:
    """Two groups of torchrun's on two machines; the first time nothing happens to them, the last time they hold
    another secret."""
    tests = (
        test_machines.test_two_groups_of_torchrun_generate_what_local_ranks_do,
        test_machines.test_a_machine_that_is_cut_off_in_mid_step_is_named_and_nothing_hangs,
    )
    with two_machines(directory, secrets.token_hex(32)) as machines:
        if seed == 4:
            test_machines.test_ranks_with_another_secret_are_refused_on_both_sides(
                machines, variant("qwen2-tied")
            )
        else:
            tests[seed > 0](machines, variant("qwen2-tied"))
