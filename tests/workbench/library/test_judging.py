"""`lockstep.check` and `lockstep.diagnose`: verdicts as values; what the command prints is made of the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lockstep
from lockstep.engine.errors import CheckpointError, ConfigError, RequestError
from lockstep.workbench.cli.main import run
from lockstep.workbench.judgements.cause import Cause
from lockstep.workbench.judgements.golden_event import Faulty
from lockstep.workbench.library.judging import ids_of, words_of
from tests.checkpoints import tiny_checkpoint
from tests.workbench.library.safe_html import Shown

pytestmark = pytest.mark.sampled_file(2)

FOUND = "what is wrong first"
FIRST = "layers.0.attn.q_proj: model.layers.0.self_attn.q_proj.bias is not added"
HOSTILE = "<script>alert(1)</script>\x1b[2J"


class Heard(lockstep.Listener):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.wrong: list[str] = []

    def report(self, text: str) -> None:
        self.lines.append(text)

    def count(self, what: str, done: int, of: int) -> None:
        self.lines.append(what)

    def found(self, text: str) -> None:
        self.wrong.append(text)
        self.lines.append(FOUND)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("judging"), "qwen2", num_hidden_layers=2)


@pytest.fixture(scope="module")
def heard() -> Heard:
    return Heard()


@pytest.fixture(scope="module")
def wrong(model: Path, heard: Heard, tmp_path_factory: pytest.TempPathFactory) -> lockstep.Verdict:
    """The verdict on an engine that does not add the q/k/v biases."""
    saved = tmp_path_factory.mktemp("saved") / "run.session"
    return lockstep.check(
        model, ids=[5, 6, 7], steps=1, faults={"load_bias": "false"}, save=saved, progress=heard
    )


def test_a_wrong_run_is_false_and_reports_where_and_why(wrong: lockstep.Verdict) -> None:
    assert not wrong
    assert (wrong.verdict, wrong.matches) == ("diverged", False)
    assert wrong.first_divergence is not None
    assert wrong.first_divergence.tap == "layers.0.attn.q_proj"
    assert wrong.causes[0].fault == "load_bias=false"
    assert {one.tap for one in wrong.ledger} == {
        f"layers.{i}.attn.{name}_proj" for i in range(2) for name in "qkv"
    }
    assert {one.verdict for one in wrong.taps} >= {"pass", "fail"}
    assert wrong.coverage is None
    assert wrong.golden is not None
    with lockstep.open(wrong.session) as recorded:
        assert recorded.judgement == wrong.event


def test_its_text_is_the_report(wrong: lockstep.Verdict) -> None:
    lines = str(wrong).splitlines()
    assert lines[0].endswith("tp=1, float32: 3 prompt tokens, 1 decode steps")
    assert "first wrong layers.0.attn.q_proj, layer 0, prefill (step 0), rank 0" in lines
    assert [line.partition(" ")[0] for line in lines if line.startswith(("cause", "fix", "ledger", "verdict"))] == [
        "cause", "fix", "ledger", "verdict",
    ]  # fmt: skip
    assert lines[-1] == "verdict     diverged"


def test_a_failed_assertion_names_the_operation_and_the_fix(wrong: lockstep.Verdict) -> None:
    shown = repr(wrong)  # a test runner keeps its ends
    assert "\n" not in shown
    assert "first wrong: layers.0.attn.q_proj, layer 0" in shown[:110]
    assert "fix: create the module with a bias and load it" in shown[-110:]


def test_the_command_prints_the_same(wrong: lockstep.Verdict, model: Path, capsys: Any) -> None:
    words = ["check", str(model), "--ids", "5,6,7", "--steps", "1", "--fault", "load_bias=false"]
    assert run([*words, "--save", str(wrong.session), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(wrong.to_json()))


def test_progress_is_heard_and_nothing_is_printed(
    heard: Heard, wrong: lockstep.Verdict, model: Path, capfd: Any
) -> None:
    assert {"starting 1 rank", "golden reference", "judging every tap"} <= set(heard.lines)
    assert heard.wrong == [FIRST]
    assert heard.lines.index(FOUND) < heard.lines.index("engine on golden inputs, float32, tp=1"), "at once"
    found = lockstep.check(model, ids=[[5, 6, 7]], steps=1)
    assert found, str(found)
    assert found.ledger == ()
    assert capfd.readouterr() == ("", "")
    assert found.session is not None
    assert found.session.is_file(), "it is kept among the user's sessions"


def test_a_recording_is_diagnosed(wrong: lockstep.Verdict, model: Path, tmp_path: Path, capsys: Any) -> None:
    heard = Heard()
    for found in (
        lockstep.diagnose(wrong.session, model=model, golden=wrong.golden, progress=heard),
        lockstep.check(wrong.session, model=model, golden=wrong.golden, save=tmp_path / "judged.session"),
    ):
        assert not found
        assert found.causes[0].fault == "load_bias=false"
        assert found.session == wrong.session
    assert heard.lines == [
        "reading run.session", "judging each operation on its own inputs, and naming causes", FOUND,
        "comparing with the reference",
    ], "no part of it is silent"  # fmt: skip
    assert heard.wrong == [FIRST]
    with lockstep.open(tmp_path / "judged.session") as judged:
        assert judged.judgement == found.event
    words = ["diagnose", str(wrong.session), "--model", str(model), "--golden", str(wrong.golden), "--json"]
    assert run(words) == 1
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_json()))


@pytest.mark.parametrize(
    ("call", "error", "printed"),
    [
        (
            lambda model, run: lockstep.check(run, prompt="x"),
            lockstep.UsageError,
            "a recording is read as it is",
        ),
        (lambda model, run: lockstep.check(run, tp=2), lockstep.UsageError, "a recording is read as it is"),
        (
            lambda model, run: lockstep.diagnose(run, ids=[1]),
            lockstep.UsageError,
            "a recording is read as it is",
        ),
        (lambda model, run: lockstep.check(model, golden=run), lockstep.UsageError, "are for a recording"),
        (
            lambda model, run: lockstep.diagnose(model, model=model),
            lockstep.UsageError,
            "are for a recording",
        ),
        (
            lambda model, run: lockstep.check(model, floor="low"),
            lockstep.UsageError,
            "floor is auto or fixed",
        ),
        (
            lambda model, run: lockstep.check(model, reference="x"),
            lockstep.UsageError,
            "reference is transformers",
        ),
        (lambda model, run: lockstep.check(model, faults={"mask": "x"}), ConfigError, "mask"),
        (lambda model, run: lockstep.check(model, ids=[5000]), RequestError, "5000"),
        (lambda model, run: lockstep.check(model, ids=[5], tp=3), ConfigError, "3"),
        (lambda model, run: lockstep.check(model.parent / "no"), CheckpointError, "no"),
        (
            lambda model, run: lockstep.check(model, ids=[5], save=model / "config.json"),
            FileExistsError,
            "exists",
        ),
        (lambda model, run: lockstep.diagnose(run, model=model.parent / "no"), lockstep.EngineError, "no"),
        (lambda model, run: lockstep.diagnose(model / "a.session"), lockstep.SessionError, "a.session"),
    ],
)
def test_what_cannot_be_done_is_a_documented_exception(
    call: Any, error: type[Exception], printed: str, model: Path, wrong: lockstep.Verdict, capfd: Any
) -> None:
    with pytest.raises(error, match=printed):
        call(model, wrong.session)
    assert capfd.readouterr() == ("", "")


def test_a_notebook_shows_causes_and_ledger_as_tables(wrong: lockstep.Verdict) -> None:
    shown = Shown(wrong._repr_html_())
    assert {"verdict: diverged", "layers.1.attn.k_proj", "confidence", "over noise"} <= set(shown.texts)
    assert "create the module with a bias and load it" in shown.text


def test_a_strangers_words_make_no_element(wrong: lockstep.Verdict) -> None:
    event = msgspec.structs.replace(
        wrong.event, causes=(Cause(name=HOSTILE, text=HOSTILE, tap=HOSTILE, place=HOSTILE),), ledger=HOSTILE,
        notes=(HOSTILE,), faulty=(Faulty(HOSTILE),),
        first_divergence=msgspec.structs.replace(wrong.event.first_divergence, tap=HOSTILE, reason=HOSTILE),
    )  # fmt: skip
    found = replace(wrong, result=replace(wrong.result, event=event), subject=HOSTILE, warnings=(HOSTILE,))
    assert Shown(found._repr_html_()).text.count("<script>alert(1)</script>") >= 6
    assert "\x1b" not in Shown(found._repr_html_()).text + str(found) + repr(found)


def test_words_and_values_mean_the_same() -> None:
    assert ids_of([1, 2]) == ids_of([[1, 2]]) == ids_of(["1,2"]) == ["1,2"]
    assert ids_of([[1], [2, 3]]) == ["1", "2,3"]
    assert ids_of([]) is ids_of(None) is None
    assert words_of({"mask": "additive"}) == words_of(["mask=additive"]) == ["mask=additive"]
