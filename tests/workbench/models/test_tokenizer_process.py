"""The process that a tokenizer runs in: bounded, started again, ended with its starter; hostile tokenizers."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lockstep.engine.errors import CheckpointError
from lockstep.workbench.models.tokenizer import Tokenizer, find_tokenizer, need_tokenizer
from lockstep.workbench.models.tokenizer_messages import MEMORY, SECONDS
from lockstep.workbench.models.tokenizer_process import TokenizerProcess
from tests.workbench.models.hostile_tokenizers import KINDS, SLOW, use
from tests.workbench.models.test_tokenizer import write_tokenizer

pytestmark = pytest.mark.sampled_file(2)

ROOT = Path(__file__).resolve().parents[3]


def _check(kind: str, folder: Path) -> None:
    KINDS[kind](folder)
    error = use(folder)
    assert "\n" not in error
    assert not error or str(folder) in error
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 <= MEMORY


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SLOW])
def test_a_hostile_tokenizer_is_one_error(kind: str, tmp_path: Path) -> None:
    _check(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", SLOW)
def test_a_tokenizer_that_takes_all_time_or_memory_is_ended(kind: str, tmp_path: Path) -> None:
    _check(kind, tmp_path)


def test_a_panic_is_an_error_that_names_the_model_and_ends_nothing(tmp_path: Path) -> None:
    KINDS["a regular expression that gives up"](tmp_path)
    tokenizer = need_tokenizer(find_tokenizer(tmp_path), tmp_path)
    for _ in range(5):
        with pytest.raises(CheckpointError, match="the tokenizer failed: PanicException"):
            tokenizer.encode("a" * 100)
    assert tokenizer.decode(tokenizer.encode("b")) == "b"
    assert tokenizer.token(1) == "b"


def _process(tokenizer: Tokenizer) -> TokenizerProcess:
    backend = tokenizer._backend
    assert isinstance(backend, TokenizerProcess)
    return backend


def test_a_process_that_was_killed_is_started_again_three_times(tmp_path: Path) -> None:
    tokenizer = need_tokenizer(find_tokenizer(write_tokenizer(tmp_path)), tmp_path)
    for _ in range(2):
        _process(tokenizer)._process.kill()
        with pytest.raises(CheckpointError, match="killed by SIGKILL"):
            tokenizer.encode("ab")
        assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    _process(tokenizer)._process.kill()
    assert tokenizer.token(97) is None, "a label is not worth an error"
    for _ in range(2):
        with pytest.raises(CheckpointError, match="it has failed 3 times"):
            tokenizer.encode("ab")


def test_what_takes_too_long_is_reported_as_such(tmp_path: Path) -> None:
    tokenizer = need_tokenizer(find_tokenizer(write_tokenizer(tmp_path)), tmp_path)
    os.kill(_process(tokenizer)._process.pid, signal.SIGXCPU)  # as the system does
    with pytest.raises(CheckpointError, match=f"takes more than {SECONDS} s; "):
        tokenizer.encode("ab")


def test_one_process_for_those_who_ask_for_the_same_files_and_none_when_nobody_does(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path, eos_token="a")
    first, second = find_tokenizer(directory), find_tokenizer(directory)
    assert first is second is not None
    (directory / "tokenizer_config.json").write_text('{"eos_token": "another"}')
    third = find_tokenizer(directory)
    assert third is not None
    assert (first.special, third.special) == ({"eos_token": "a"}, {"eos_token": "another"})
    processes = [_process(first)._process, _process(third)._process]
    assert all(one.poll() is None for one in processes)
    del first, second, third
    gc.collect()
    assert all(one.poll() is not None for one in processes)


def test_it_ends_with_whoever_started_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from lockstep.workbench.models.tokenizer import find_tokenizer\n"
        "kept = find_tokenizer(Path(sys.argv[1])); print(kept._backend._process.pid, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with starter:
        assert starter.stdout is not None
        child = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
    deadline = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_its_starter_loads_no_tokenizers(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    code = (
        "import sys; from pathlib import Path; from lockstep.workbench.models.tokenizer import find_tokenizer\n"
        "assert find_tokenizer(Path(sys.argv[1])).encode('a'); sys.exit(2 * ('tokenizers' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=False).returncode == 0
