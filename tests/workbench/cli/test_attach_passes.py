"""`lockstep attach --model`: a run for statistics, then one for the tensors around the place; one without the tap."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen2 import modeling_qwen2

from lockstep.engine.taps.names import layer_of
from lockstep.sessions import Session
from lockstep.sessions.meta import ROW_STATISTICS
from lockstep.workbench.attach.inside.lockstep_tap import Tape
from lockstep.workbench.attach.launch import Attached, AttachError, Remark, TapRequest
from lockstep.workbench.checking import closer_look
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.checking.recorded_run import diagnose_recording
from lockstep.workbench.cli.main import run
from lockstep.workbench.library import attach_passes
from lockstep.workbench.references.golden import forced_onto
from lockstep.workbench.references.request import GoldenRequest
from lockstep.workbench.references.transformers_recorder import record
from tests.checkpoints import tiny_checkpoint
from tests.workbench.checking.test_foreign_verdict import edited
from tests.workbench.diagnosis.synthetic import STEPS, Case, tiny_case
from tests.workbench.foreign.packed import PackedRun, Rows, packed

pytestmark = pytest.mark.sampled_file(2)

LAYERS = 6


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return tiny_case(tmp_path_factory.mktemp("passes"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def bugged(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The run of an engine that takes the fourth layer's up_proj, and the last one's, for something else."""
    folder = tmp_path_factory.mktemp("bugged")
    model = tiny_checkpoint(folder, "qwen2", num_hidden_layers=LAYERS)
    weights = load_file(model / "model.safetensors")
    for layer in (3, LAYERS - 1):
        weights[f"model.layers.{layer}.mlp.up_proj.weight"] *= 1.5
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    forced = forced_onto(case.floor.path)
    record(GoldenRequest(str(model), forced, STEPS, "float32"), folder / "run.session")
    with Session.open(folder / "run.session") as session:
        return Rows.of(session)


@pytest.fixture
def turned_further(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The run of an engine whose third layer turns each two neighbours of a query a little further."""
    right, calls = modeling_qwen2.apply_rotary_pos_emb, count()

    def rotated(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = right(*args, **kwargs)
        return (torch.from_numpy(turned(q.numpy())) if next(calls) % LAYERS == 2 else q), k

    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", rotated)
    forced = forced_onto(case.floor.path)
    record(GoldenRequest(str(case.model_dir), forced, STEPS, "float32"), tmp_path / "turned.session")
    with Session.open(tmp_path / "turned.session") as session:
        return Rows.of(session)


@dataclass
class Engine:
    """Stands in for the process: each run of the command writes `runs[n]`, the last for all that follow."""

    config: dict[str, Any]
    runs: list[PackedRun] = field(default_factory=list)
    asked: list[TapRequest] = field(default_factory=list)
    changed: tuple[Remark, ...] = ()
    stopped: str = ""
    code: int = 0

    def attach(self, command: Sequence[str], dump: Path, asked: TapRequest, scratch: Path) -> Attached:
        reported = self.runs[min(len(self.asked), len(self.runs) - 1)]
        self.asked.append(asked)
        if not reported.by_rank:
            raise AttachError("no rank wrote a pass")
        for rank, passes in reported.by_rank.items():
            mode = "compiled" if asked.capture == "ids" else "eager"
            tape = Tape(
                dump, rank, reported.facts.ranks, engine="an engine 1.0", config=self.config, mode=mode,
                capture=asked.capture, tensors=asked.tensors,
            )  # fmt: skip
            for one in passes:
                tape.step(torch.tensor(one.ids), torch.tensor(one.positions), one.requests)
                for x in one.tensors:
                    tape.tap(x.tap, torch.from_numpy(x.array.copy()), x.layout, x.rows)
            tape.close()
        return Attached(dump, self.code, tuple(reported.by_rank), self.changed, self.stopped)


@pytest.fixture
def engine(case: Case, monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine(json.loads((case.model_dir / "config.json").read_text()))

    def judged(path: Path, *_: object) -> CheckResult:
        with Session.open(path) as session:
            return diagnose_recording(session, case.model_dir, golden=case.golden.path, floor=case.floor.path)

    monkeypatch.setattr(closer_look, "SMALL", 0)  # unless a test has small ones
    monkeypatch.setattr(attach_passes, "attach", made.attach)
    monkeypatch.setattr(attach_passes, "judged_recording", judged)
    return made


Attach = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def attach(engine: Engine, case: Case, tmp_path: Path, capsys: Any) -> Attach:
    def call(*words: str, code: int = 0) -> tuple[dict[str, Any], str]:
        given = [
            "attach",
            "-o",
            str(tmp_path / "run.session"),
            "--model",
            str(case.model_dir),
            "--json",
            *words,
        ]
        assert run([*given, "--", "an-engine"]) == code
        reported = capsys.readouterr()
        return json.loads(reported.out), reported.err

    return call


def rows(source: Rows, tp: int = 2) -> PackedRun:
    return packed(source, source.decoding(), tp=tp)


def with_another_end(whole: PackedRun) -> PackedRun:
    """The last token of each sequence is another."""
    for passes in whole.by_rank.values():
        passes[-1] = replace(passes[-1], ids=tuple(token + 1 for token in passes[-1].ids))
    return whole


def turned(x: Any, angle: float = 5e-6) -> Any:
    """Each two neighbours rotated a little further."""
    out, cos, sin = x.copy(), np.cos(angle), np.sin(angle)
    out[..., ::2], out[..., 1::2] = (
        cos * x[..., ::2] - sin * x[..., 1::2], sin * x[..., ::2] + cos * x[..., 1::2],
    )  # fmt: skip
    return out.astype(x.dtype)


def tensors(path: Path) -> set[int | None]:
    """The layers of which the session has tensors of MLPs."""
    with Session.open(path) as session:
        return {layer_of(tap) for tap in session.captured_taps() if tap.endswith(".mlp.up")}


@pytest.mark.slow
def test_a_right_run_takes_one_pass_where_its_tensors_would_be_large(
    engine: Engine, attach: Attach, case: Case, tmp_path: Path
) -> None:
    engine.runs = [rows(Rows.of(case.floor))]
    reported, err = attach()
    assert [(one.capture, one.tensors) for one in engine.asked] == [("stats", ("embed", "logits"))]
    assert reported["judged"]["verdict"] == "match"
    assert (reported["coverage"]["layers"], reported["coverage"]["by_statistics"]) == (LAYERS, LAYERS)
    assert reported["passes"] == [
        {
            "kept": "statistics of everything",
            "found": "the logits are right, and no row's statistics leave the reference",
        }
    ]
    assert "pass 1: the logits are right" in err
    assert not tensors(tmp_path / "run.session")


def test_a_right_run_is_held_against_all_its_tensors_where_they_are_small(
    engine: Engine, attach: Attach, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closer_look, "SMALL", 256 << 20)
    engine.runs = [rows(Rows.of(case.floor))]
    reported, _ = attach()
    assert [one.tensors for one in engine.asked] == [("embed", "logits"), ("embed", "logits", "*")]
    assert (reported["judged"]["verdict"], reported["coverage"]["by_statistics"]) == ("match", 0)
    assert reported["passes"][1] == {"kept": "all taps", "found": "nothing is wrong in it"}
    assert tensors(tmp_path / "run.session") == set(range(LAYERS))


@pytest.mark.slow
def test_what_statistics_do_not_show_is_found_where_the_tensors_are_small(
    engine: Engine, attach: Attach, turned_further: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotations keep norms: of angles that are a little off no statistic leaves the reference."""
    monkeypatch.setattr(closer_look, "SMALL", 256 << 20)
    engine.runs = [rows(turned_further)]
    reported, _ = attach(code=1)
    assert reported["passes"][0]["found"].startswith("the logits are right, and no row's statistics leave")
    assert reported["judged"]["first_divergence"]["tap"] == "layers.2.attn.q_rope"


@pytest.mark.slow
def test_an_engine_that_ends_with_1_gives_no_verdict_by_that(
    engine: Engine, attach: Attach, case: Case, bugged: Rows
) -> None:
    engine.code = 1
    engine.runs = [rows(Rows.of(case.floor))]
    reported, _ = attach(code=6)
    assert (reported["judged"]["verdict"], reported["code"]) == ("match", 1)
    engine.runs = [rows(bugged)]
    reported, _ = attach("--once", code=1)
    assert reported["judged"]["verdict"] == "diverged"


def test_the_second_pass_keeps_the_layers_around_and_names_the_cause(
    engine: Engine, attach: Attach, bugged: Rows, tmp_path: Path
) -> None:
    engine.runs = [rows(bugged)]
    reported, err = attach(code=1)
    assert [one.capture for one in engine.asked] == ["stats", "stats"]
    assert tensors(tmp_path / "run.session") == {2, 3, 4}
    judged = reported["judged"]
    assert judged["first_divergence"]["tap"] == "layers.3.mlp.up"
    (cause,) = judged["causes"]  # that the layers after these are wrong as a whole is no other cause
    assert "1.5" in cause["text"]
    assert (judged["coverage"]["layers"], judged["coverage"]["by_statistics"]) == (LAYERS, LAYERS - 3)
    first, second = reported["passes"]
    assert "first leaves the reference at layers.3.mlp.up, step 0" in first["found"]
    assert second["kept"].startswith("layers 2 to 4")
    assert second["found"].startswith("first wrong: layers.3.mlp.up at step 0")
    assert "pass 2 keeps layers 2 to 4" in err
    assert "a server needs the same requests as before" in err
    assert "pass 2: the same tokens in 21 of 21 rows, and the same bits in" in err


@pytest.mark.slow
def test_what_statistics_do_not_show_takes_a_third_pass(engine: Engine, attach: Attach, bugged: Rows) -> None:
    engine.runs = [edited(rows(bugged), "layers.1.mlp_residual", lambda x: x[:, ::-1].copy())]
    reported, _ = attach(code=1)
    assert [one["kept"][:12] for one in reported["passes"]] == [
        "statistics o",
        "layers 2 to ",
        "layers 0 to ",
    ]
    assert "wrong already, by what statistics do not show" in reported["passes"][1]["found"]
    assert reported["judged"]["first_divergence"]["tap"] == "layers.1.mlp_residual"


def test_once_keeps_everything_in_one_run(
    engine: Engine, attach: Attach, bugged: Rows, tmp_path: Path
) -> None:
    engine.runs = [rows(bugged)]
    reported, _ = attach("--once", code=1)
    assert [one.capture for one in engine.asked] == ["full"]
    assert "passes" not in reported
    assert tensors(tmp_path / "run.session") == set(range(LAYERS))


@pytest.mark.parametrize("words", [["--capture", "stats"], ["--only", "layers.3.*"]])
def test_what_is_asked_for_by_name_is_one_run(
    words: list[str], engine: Engine, attach: Attach, bugged: Rows
) -> None:
    engine.runs = [rows(bugged)]
    run_code = 6 if words[0] == "--capture" else 1
    attach(*words, code=run_code)
    assert len(engine.asked) == 1


@pytest.mark.parametrize(("second", "code"), [("diverged", 1), ("match", 6)])
def test_a_last_run_of_other_tokens_is_no_match_but_wrong_where_it_is_wrong(
    engine: Engine, attach: Attach, bugged: Rows, monkeypatch: pytest.MonkeyPatch, second: str, code: int
) -> None:
    found = attach_passes.judged_recording
    verdicts: list[CheckResult] = []

    def judged(path: Path, *_: object) -> CheckResult:
        """Of the second run `second`; the reference at hand is of the first one's tokens."""
        if not verdicts:
            verdicts.append(found(path, "", None, True, 0, "cpu"))
            return verdicts[0]
        event = msgspec.structs.replace(verdicts[0].event, verdict=second)
        return replace(verdicts[0], event=event)

    monkeypatch.setattr(attach_passes, "judged_recording", judged)
    engine.runs = [rows(bugged), with_another_end(rows(bugged))]
    reported, _ = attach(code=code)
    assert reported["judged"]["verdict"] == ("inconclusive" if second == "match" else second)
    assert "the runs of the command read other tokens: sequence 0 goes on" in reported["judged"]["notes"][-1]
    assert "the runs of the command read other tokens" in reported["passes"][1]["found"]


def test_a_second_run_that_leaves_nothing_leaves_the_first(
    engine: Engine, attach: Attach, bugged: Rows, tmp_path: Path
) -> None:
    engine.runs = [rows(bugged), replace(rows(bugged), by_rank={})]
    reported, err = attach(code=1)
    assert "pass 2: no rank wrote a pass; what pass 1 recorded is kept" in err
    assert len(reported["passes"]) == 1
    with Session.open(tmp_path / "run.session") as session:
        assert session.has_tap("layers.3.mlp.up" + ROW_STATISTICS)


def test_who_ends_us_is_not_given_another_run(engine: Engine, attach: Attach, bugged: Rows) -> None:
    engine.runs, engine.stopped = [rows(bugged)], "SIGTERM"
    _, err = attach(code=1)
    assert "the command is not run again: SIGTERM ended it" in err
    assert len(engine.asked) == 1


def test_the_text_without_the_tap_is_compared_first(engine: Engine, attach: Attach, case: Case) -> None:
    engine.runs = [rows(Rows.of(case.floor))]
    reported, err = attach("--compare-text")
    assert [one.capture for one in engine.asked] == ["ids", "stats"]
    assert reported["text"] == "without the tap (compiled) the same tokens in 21 of 21 rows"
    assert err.index("first without the tap") < err.index("pass 1 keeps")


def test_another_text_without_the_tap_leaves_no_match(engine: Engine, attach: Attach, case: Case) -> None:
    """The engine is right as it was recorded; as it is started it goes on with another token."""
    right = Rows.of(case.floor)
    engine.runs, engine.changed = (
        [with_another_end(rows(right)), rows(right)],
        (Remark("changed", "it runs with eager=True"),),
    )
    reported, _ = attach("--compare-text", code=6)
    assert reported["judged"]["verdict"] == "inconclusive"
    assert reported["text"].startswith(
        "without the tap (compiled) the command generates another text: sequence 0 goes on"
    )
    assert reported["text"].endswith("with the tap: it runs with eager=True")


def test_that_the_text_was_not_compared_is_reported(
    engine: Engine, case: Case, tmp_path: Path, capsys: Any
) -> None:
    engine.runs, engine.changed = [rows(Rows.of(case.floor))], (Remark("changed", "it runs with eager=True"),)
    assert run(["attach", "-o", str(tmp_path / "run.session"), "--", "an-engine"]) == 0
    err = capsys.readouterr().err
    assert [one.capture for one in engine.asked] == ["full"]
    assert "one run, not judged: there is no --model to hold it against" in err
    assert "whether the command generates the same without the tap was not tried (--compare-text)" in err
