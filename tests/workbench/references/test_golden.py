"""The torch-free front: subprocess, cache, failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file, save_file

from lockstep.engine import scratch
from lockstep.engine.errors import CheckpointError
from lockstep.sessions import Session
from lockstep.workbench.references import cache, golden, recorder_process
from lockstep.workbench.references.golden import forced_onto, record_golden, record_pair
from lockstep.workbench.references.recorder_process import StandbyRecorder
from lockstep.workbench.references.request import GoldenRequest, GoldenSequence, ReferenceFailure, model_path
from tests.checkpoints import tiny_variant
from tests.gguf_twins import gguf_twin
from tests.running import children_with

pytestmark = pytest.mark.sampled_file(2)

PROMPT = GoldenSequence((3, 4, 5))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_variant(tmp_path_factory.mktemp("model"), "qwen2-tied")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever records in this test fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a recorder was started")

    monkeypatch.setattr(recorder_process, "start_python", refuse)


def fill(key: str, text: str = "") -> Path:
    with cache.folder() as folder:
        path = folder.path / "recorded.session"
        path.write_text(text)
        return cache.keep(key, path)


@pytest.mark.slow
def test_both_references_come_from_one_process_and_then_from_the_cache(
    model_dir: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[tuple[int, int]] = []
    golden_path, floor_path = record_pair(
        model_dir, [PROMPT, GoldenSequence((9,))], 2, "float32", threads=1, timeout=120,
        progress=lambda done, of: reported.append((done, of)),
    )  # fmt: skip
    assert reported == [(n, 6) for n in range(7)]
    assert golden_path.parent == own_cache / "golden"
    with Session.open(golden_path) as truth, Session.open(floor_path) as floor:
        assert (truth.meta.config.dtype, floor.meta.config.dtype) == ("float64", "float32")
        for step in floor.steps():
            ours, theirs = floor.step(step).sequences, truth.step(step).sequences
            assert [s.ids for s in ours] == [s.ids for s in theirs]
            assert [s.emitted for s in ours] == [s.emitted for s in theirs]
        a, b = (s.rebuilt("logits", step=2).array for s in (truth, floor))
        assert a is not None
        assert b is not None
        assert 0 < np.abs(a - b).max() < 1e-4
    assert sorted(own_cache.rglob("*.*")) == sorted([golden_path, floor_path])  # nothing half-done is left
    warned: list[str] = []

    def again() -> tuple[Path, Path]:
        return record_pair(
            model_dir, [PROMPT, GoldenSequence((9,))], 2, "float32", threads=1, warn=warned.append
        )

    with monkeypatch.context() as patch:
        patch.setattr(recorder_process, "start_python", None)  # would fail if called
        assert again() == (golden_path, floor_path)
        assert record_golden(model_dir, forced_onto(golden_path), 2, "float32", threads=1) == floor_path
    # A damaged entry is recorded again, alone: here one of its tensors has changed, and nothing else.
    with sqlite3.connect(floor_path) as changed:
        changed.execute(
            "UPDATE blobs SET hash = zeroblob(length(hash)) WHERE id = (SELECT max(id) FROM blobs)"
        )
    changed.close()
    assert warned == []
    golden_again, floor_again = again()
    assert golden_again == golden_path
    (stated,) = warned
    assert stated.startswith(f"the cached golden reference {floor_path.name} is damaged (")
    assert stated.endswith(f"): it is kept as {floor_path.stem}.damaged beside it, and recorded again")
    with Session.open(floor_again) as session:
        np.testing.assert_array_equal(session.rebuilt("logits", step=2).array, b)


def test_a_sequence_that_ends_early_does_so_in_both_references(model_dir: Path) -> None:
    """As requests of a recorded server do: each has its own number of tokens."""
    sequences = [GoldenSequence((3, 4), (5, 6)), GoldenSequence((7,), (8, 9, 10)), GoldenSequence((11,), ())]
    truth, floor = record_pair(model_dir, sequences, 3, "float32")
    for path in (truth, floor):
        with Session.open(path) as session:
            read = [[(one.seq, *one.ids) for one in session.step(step).sequences] for step in session.steps()]
        assert read == [[(0, 3, 4), (1, 7), (2, 11)], [(0, 5), (1, 8)], [(0, 6), (1, 9)], [(1, 10)]]


@pytest.mark.usefixtures("no_recorder")
def test_an_unusable_checkpoint_needs_no_recorder(tmp_path: Path) -> None:
    with pytest.raises(ReferenceFailure, match=r"no config\.json there"):
        record_golden(tmp_path, [PROMPT], 1, "float32")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises((CheckpointError, ValueError)):
        record_golden(tmp_path, [PROMPT], 1, "float32")


def test_the_recorders_refusal_arrives_with_its_exit_code(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """… from a recorder that is not taken in by a stranger's torch.py in the working directory."""
    (tmp_path / "torch.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReferenceFailure, match="token id 999 is outside the vocabulary of 131") as refused:
        record_golden(model_dir, [GoldenSequence((999,))], 1, "float32", threads=1)
    assert refused.value.exit_code == 2


def test_too_slow_is_a_timeout(model_dir: Path, own_cache: Path) -> None:
    with pytest.raises(ReferenceFailure, match="no golden reference within") as refused:
        record_golden(model_dir, [PROMPT], 1, "float32", threads=1, timeout=0.05)
    assert refused.value.exit_code == 4
    assert [path for path in own_cache.rglob("*") if path.is_file()] == []


@pytest.mark.usefixtures("fresh_processes")
def test_whoever_waits_can_give_up_and_nothing_stays(model_dir: Path, own_cache: Path) -> None:
    counted: list[tuple[int, int]] = []

    def give_up() -> None:
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        record_pair(
            model_dir, [PROMPT], 3, "float32", threads=1, waiting=give_up,
            progress=lambda done, of: counted.append((done, of)),
        )  # fmt: skip
    assert counted == [(0, 8)], "of a prefill and three steps, twice; the recorder was ended before the first"
    assert [path for path in own_cache.rglob("*") if path.is_file()] == []
    assert not children_with("lockstep.workbench.references.record")


@pytest.mark.usefixtures("fresh_processes")
def test_a_killed_recorder_is_reported_as_such(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suicide = [
        sys.executable,
        "-c",
        "import os; print('near the end', file=__import__('sys').stderr, flush=True); os.abort()",
    ]
    popen = subprocess.Popen
    monkeypatch.setattr(
        recorder_process.subprocess, "Popen", lambda command, **options: popen(suicide, **options)
    )
    with pytest.raises(ReferenceFailure, match=r"ended by SIGABRT; .*near the end"):
        record_golden(model_dir, [PROMPT], 1, "float32", threads=1)


@pytest.mark.slow
def test_a_recorder_that_stands_by_serves_once(model_dir: Path) -> None:
    standby = StandbyRecorder(model_dir, 1)
    first = record_golden(model_dir, [PROMPT], 1, "float32", threads=1, standby=standby)
    assert standby.taken
    second = record_golden(model_dir, [PROMPT], 2, "float32", threads=1, standby=standby)
    standby.close()
    with Session.open(first) as one, Session.open(second) as other:
        for tap in one.taps:
            if tap.name not in one.meta.absent:
                mine, theirs = (s.rebuilt(tap.name, step=1, seq=0).array for s in (one, other))
                np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_processes")
def test_one_that_stands_by_in_vain_is_replaced_or_ended(model_dir: Path, tmp_path: Path) -> None:
    for checkpoint, threads in ((model_dir, 2), (tmp_path / "none", 1)):
        standby = StandbyRecorder(checkpoint, threads)
        if threads == 1:
            psutil.Process(standby.pid).kill()
            psutil.wait_procs([psutil.Process(standby.pid)], 60)
        record_golden(model_dir, [PROMPT], threads, "float32", threads=1, standby=standby)
        assert not standby.taken
        standby.close()
        assert not psutil.pid_exists(standby.pid)


def test_the_front_stays_light() -> None:
    """Asking for a reference imports neither torch nor transformers."""
    code = (
        "import sys, lockstep.workbench.references.golden, lockstep.workbench.diagnosis.verdict\n"
        "import lockstep.workbench.diagnosis.naming, lockstep.workbench.diagnosis.operations.weights\n"
        "sys.exit(', '.join({'torch', 'transformers', 'textual'} & set(sys.modules)) or None)"
    )
    root = str(Path(golden.__file__).parents[3])
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": root})


def test_the_key_reports_questions_apart(model_dir: Path) -> None:
    base = GoldenRequest("/a", (PROMPT,), 2, "float32")
    stamps = [(10, 20)]
    keys = {
        cache.cache_key(request, digest, mtimes)
        for request, digest, mtimes in [
            (base, "d", stamps),
            (GoldenRequest("/a", (PROMPT,), 3, "float32"), "d", stamps),
            (GoldenRequest("/a", (PROMPT,), 2, "float64"), "d", stamps),
            (GoldenRequest("/a", (PROMPT, PROMPT), 2, "float32"), "d", stamps),
            (GoldenRequest("/a", (GoldenSequence((3, 4, 5), (7,)),), 2, "float32"), "d", stamps),
            (base, "e", stamps),
            (base, "d", [(10, 21)]),
        ]
    }
    assert len(keys) == 7
    moved = GoldenRequest("/elsewhere", (PROMPT,), 2, "float32")
    assert cache.cache_key(moved, "d", stamps) in keys  # where it lies does not matter


def test_changed_weights_are_another_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one bit in the middle of a tensor too large to be in the digest whole."""
    model_dir = tiny_variant(tmp_path, "llama")
    asked: list[str] = []
    monkeypatch.setattr(cache, "find", lambda key, warn: asked.append(key) or Path("found"))
    record_golden(model_dir, [PROMPT], 1, "float32", threads=1)
    file = model_dir / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][70, 30] += 1
    save_file(weights, file, {"format": "pt"})
    record_golden(model_dir, [PROMPT], 1, "float32", threads=1)
    assert asked[0] != asked[1]


def test_the_cache_forgets_what_was_used_longest_ago() -> None:
    paths = [fill(f"key{n}", "x" * 100) for n in range(4)]
    for age, path in enumerate(paths):
        os.utime(path, (1000 + age, 1000 + age))
    cache.prune(paths[0].parent, keep=paths[0], limit=250)
    assert [path.exists() for path in paths] == [True, False, False, True]


def test_what_the_user_keeps_in_the_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_GOLDEN_DIR", str(tmp_path))
    own, cached = (
        tmp_path / "own.session",
        [tmp_path / f"{'-'.join(hashes)}.session" for hashes in (["0" * 32], ["0" * 32, "a" * 32])],
    )
    for path in (own, *cached):
        path.touch()
        os.truncate(path, cache.LIMIT_BYTES + 1)  # of zeros, which take no space
        os.utime(path, (1000, 1000))
    assert fill("1" * 32).exists()
    assert [path.exists() for path in (own, *cached)] == [True, False, False]


def test_no_session_under_that_name_is_no_hit_and_set_aside() -> None:
    """The newest few, that is."""
    warned: list[str] = []
    paths = [fill(name, "recorded") for name in "abcde"]
    for age, (name, path) in enumerate(zip("abcde", paths, strict=True)):
        path.write_text("not a session")
        assert cache.find(name, warned.append) is None
        assert not path.exists()
        os.utime(path.with_suffix(".damaged"), (1000 + age, 1000 + age))
    assert cache.find("a", warned.append) is None
    assert [stated.split()[4] for stated in warned] == [path.name for path in paths]
    assert sorted(path.parent.iterdir()) == [path.with_suffix(".damaged") for path in paths[2:]]


def test_a_file_that_is_not_what_was_recorded_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However whole it is: another session under its name, or one that somebody has written to."""
    monkeypatch.setattr(cache, "verify", lambda path, limits: [])
    warned: list[str] = []
    changed, written = fill("a", "recorded"), fill("b", "recorded")
    assert [cache.find(key, warned.append) for key in "ab"] == [changed, written]
    assert warned == []
    changed.write_text("Recorded")
    written.with_name(f"{written.name}-wal").touch()
    assert [cache.find(key, warned.append) for key in "ab"] == [None, None]
    assert [stated.partition("(")[2].partition(")")[0] for stated in warned] == [
        "it is not what was recorded",
        "somebody has written to it",
    ]


_STARTER = """
import sys
from lockstep.workbench.references.golden import record_golden
from lockstep.workbench.references.request import GoldenSequence
record_golden(sys.argv[1], [GoldenSequence((3, 4, 5))], 1, "float32", threads=1)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("both", [False, True])
def test_a_recorder_ends_with_its_starter_and_nothing_half_made_stays(
    both: bool, model_dir: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder removes it, or, where both were killed, who records next."""
    root = str(Path(golden.__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(model_dir)], env=os.environ | {"PYTHONPATH": root}
    ) as starter:
        while not (recorders := psutil.Process(starter.pid).children()):
            assert starter.poll() is None
            time.sleep(0.01)
        (folder,) = (own_cache / "golden").iterdir()
        (folder / "0.session").write_text("half made")
        recorders[0].suspend()
        starter.kill()
    assert folder.exists()
    recorders[0].send_signal(signal.SIGKILL if both else signal.SIGCONT)
    recorders[0].wait(60)
    if both:
        assert folder.exists()
        monkeypatch.setattr(scratch, "_swept", set())
        cache.folder().close()
    assert [*(own_cache / "golden").iterdir()] == []


def test_a_file_of_the_hubs_cache_is_asked_for_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it is a link to a blob, whose name is a hash and has no suffix."""
    link, asked = tmp_path / "tiny.gguf", []
    shutil.move(gguf_twin(tiny_variant(tmp_path, "llama"), tmp_path / "written.gguf"), tmp_path / "0a1b2c")
    link.symlink_to("0a1b2c")

    def run(requests: Sequence[GoldenRequest], *rest: object) -> list[Path]:
        asked.extend(requests)
        raise ReferenceFailure("enough")

    monkeypatch.setattr(golden, "run_recorder", run)
    with pytest.raises(ReferenceFailure, match="enough"):
        record_golden(link, [PROMPT], 1, "float32", threads=1)
    assert [model_path(request.model) for request in asked] == [link]
