"""`lockstep check`: report, schema, exit codes, files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from lockstep.engine.graph import LAYER
from lockstep.sessions import Session, SessionWriteError, SessionWriter
from lockstep.sessions.format import database
from lockstep.workbench.cli.main import run
from lockstep.workbench.export.check_text import HEADS, render
from lockstep.workbench.judgements.golden_event import Divergence, GoldenEvent
from tests.checkpoints import tiny_checkpoint

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("check"), "llama", num_hidden_layers=2)


def words(model: Path, *more: str) -> list[str]:
    return ["check", str(model), "--ids", "5,6,7", "--steps", "2", *more]


def strictly(text: str) -> dict[str, Any]:
    """Parse JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return dict(json.loads(text, parse_constant=refuse))


def test_a_match_as_json(model: Path, capsys: Any, tmp_path: Path) -> None:
    saved = tmp_path / "a.session"
    assert run(words(model, "--json", "--save", str(saved))) == 0
    reported = strictly(capsys.readouterr().out)
    assert reported["verdict"] == "match"
    assert reported["max_abs_logits"] <= 1e-4
    assert (reported["tokens_identical"], reported["first_divergence"], reported["tp"]) == (True, None, 1)
    assert reported["engine_session"] == str(saved)
    for path in (reported["engine_session"], reported["golden_session"]):
        with Session.open(Path(path)) as session:
            assert len(session.steps()) == 3
    assert {(one["tap"], one["step"]) for one in reported["taps"]} >= {
        ("embed", 0),
        ("layers.1.mlp.act", 2),
        ("logits", 1),
    }
    for one in reported["taps"]:
        assert {"tap", "step", "max_abs", "rel_l2", "cosine", "verdict"} <= one.keys()
        assert one["verdict"] in ("pass", "suspect", "absent")


def test_a_divergence_in_every_form(model: Path, capsys: Any, tmp_path: Path) -> None:
    junit, table = tmp_path / "report.xml", tmp_path / "report.csv"
    fault = ["--fault", "mask=additive", "--tp", "2"]
    assert run(words(model, *fault, "--json", "--junit", str(junit), "--csv", str(table))) == 1
    reported = strictly(capsys.readouterr().out)  # NaN everywhere, and still JSON
    first = reported["first_divergence"]
    assert (first["tap"], first["layer"], first["step"], first["rank"]) == (
        "layers.0.attn.scores",
        0,
        0,
        None,
    )
    assert reported["verdict"] == "diverged"
    assert reported["rules"] == {"mask": "additive"}
    assert "0 * -inf" in reported["causes"][0]["text"]
    # NaN has no distance from a number: these have no figures.
    assert reported["faulty"] == [
        {"tap": f"layers.{i}.attn.scores", "step": 0, "seq": 0, "injected": None, "ratio": None}
        for i in (0, 1)
    ]
    suites = ElementTree.parse(junit).getroot()
    failed = [case for case in suites.iter("testcase") if case.find("failure") is not None]
    assert int(suites.get("failures", "0")) == len(failed) > 0
    assert [case.get("name") for case in failed[:2]] == ["matches transformers", "attn.scores"]
    reported_first = failed[0].find("failure")
    assert reported_first is not None
    assert "layers.0.attn.scores, layer 0, prefill (step 0), both ranks" in str(reported_first.get("message"))
    assert "0 * -inf" in str(reported_first.text)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(reported["taps"])
    assert next(row for row in rows if row["verdict"] == "fail")["tap"] == "layers.0.attn.scores"


@pytest.mark.slow
def test_a_dtype_that_does_not_carry_the_model_is_no_fault_of_the_engine(tmp_path: Path, capsys: Any) -> None:
    """Activations in layer 1 pass 65504, the largest number of float16; float32 carries them."""
    path = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    weights = load_file(path / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        weights[f"model.layers.1.mlp.{name}.weight"] *= 3000
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert run(words(path, "--dtype", "float16")) == 6
    lines = capsys.readouterr().out.splitlines()
    reported = {line[:12].strip(): line[12:] for line in lines}
    assert "this dtype does not carry the model: layers.1.mlp.act at step 0: the" in reported["note"]
    assert reported["tokens"] == "not compared: the reference's logits are no numbers either"
    assert reported["logits"] == "not compared with transformers at the same dtype"
    assert lines[-1] == "verdict     inconclusive: use a wider --dtype"
    assert not {"first wrong", "cause", "ledger"} & set(reported), "nothing is called wrong"
    heads = next(line for line in lines if line.startswith("layer"))
    row = next(line for line in lines if line.startswith("1 "))
    act = heads.index(" a ") + 1
    assert row[6:act].replace(" ", "").strip("·") == "", "all before it is right"
    assert row[act : act + 2] == "~~"
    assert run(words(path)) == 0, "in float32 the same engine matches, however large its activations"


def test_an_overflow_in_the_reference_too_reads_as_such(capsys: Any) -> None:
    overflow = Divergence("layers.1.mlp.act", 1, reason="the reference overflows in float16")
    event = GoldenEvent(verdict="inconclusive", overflow=overflow, tokens_identical=True, notes=("so it is",))
    render(event, [], Console(width=80))
    reported = {line[:12].strip(): line[12:] for line in capsys.readouterr().out.splitlines()}
    assert reported["tokens"] == "not compared: the reference's logits are no numbers either"
    assert reported["logits"] == "not compared with transformers at the same dtype"
    assert reported["verdict"] == "inconclusive: use a wider --dtype"


def test_a_divergence_reads_at_80_columns(model: Path, capsys: Any) -> None:
    assert run(words(model, "--fault", "act=swapped")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    reported = {line[:12].strip(): line[12:] for line in lines}
    assert "layers.0.mlp.act, layer 0, prefill (step 0), rank 0" in reported["first wrong"]
    assert "silu(up) * gate" in reported["cause"]
    assert lines[-1] == "verdict     diverged"
    assert reported["ledger"] == "2 operations are wrong by themselves: layers.*.mlp.act"
    row = next(line for line in lines if line.startswith("0 "))
    heads = next(line for line in lines if line.startswith("layer"))
    at = heads.index(" a ") + 1
    assert row[at : at + 2] == "✗✗"
    assert row[6:at].replace(" ", "").strip("·") == ""
    assert row[at + 2 :].replace(" ", "").strip("↓") == ""


@pytest.mark.parametrize(
    ("more", "code", "printed"),
    [
        (["--steps", "300"], 2, "exceed the context of 256"),
        (["--floor", "none"], 2, "auto or fixed"),
        (["--tp", "3"], 2, "tp=3"),
        (["--fault", "load_bias=false"], 2, "no q/k/v biases"),
        (["--steps", "-1"], 2, "--steps"),
    ],
)
def test_mistakes_are_one_line(model: Path, capsys: Any, more: list[str], code: int, printed: str) -> None:
    assert run(words(model, *more)) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert printed in shown.err
    assert shown.err.count("\n") == 1


def test_a_model_without_a_prompt_or_tokenizer_is_checked_all_the_same(model: Path, capsys: Any) -> None:
    assert run(["check", str(model), "--steps", "0", "--floor", "fixed", "--json"]) == 0
    reported = strictly(capsys.readouterr().out)
    assert reported["tolerance"] == "fixed"
    with Session.open(Path(reported["engine_session"])) as session:
        ids = list(session.step(0).sequences[0].ids)
    assert ids[0] == 1  # BOS
    assert ids[-1] == 130  # the last of the vocabulary


class FullDisk:
    """Sessions in `directory` may grow by so many pages and no more: SQLite reports that the disk is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, pages: int) -> None:
        usual = database.connect_writer

        def connect(path: Path) -> Any:
            connection = usual(path)
            if path.parent == directory:
                (used,) = connection.execute("PRAGMA page_count").fetchone()
                connection.execute(f"PRAGMA max_page_count = {used + pages}")
            return connection

        monkeypatch.setattr(database, "connect_writer", connect)


# A run of nothing but NaN compresses to so little that only its verdicts find no room.
@pytest.mark.parametrize(
    ("rules", "code", "lost"),
    [((), 3, "the run from step 0 on"), (("--fault", "mask=additive"), 1, "the verdicts")],
)
def test_a_full_disk_costs_the_recording_not_the_verdict(
    model: Path, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: tuple[str, ...],
    code: int, lost: str,
) -> None:  # fmt: skip
    FullDisk(monkeypatch, tmp_path, 0)
    report, saved = tmp_path / "a.xml", str(tmp_path / "a.session")
    assert run(words(model, "--json", "--save", saved, "--junit", str(report), *rules)) == code
    shown = capsys.readouterr()
    reported = strictly(shown.out)
    assert reported["verdict"] == ("diverged" if code == 1 else "match")
    assert reported["engine_session"] is None
    assert "database or disk is full" in reported["lost"]
    assert f"lockstep: error: {saved} lacks {lost}: cannot write session" in shown.err
    assert report.read_text().count("<testcase") > 10


def test_verdicts_that_find_no_room_are_still_reported(
    model: Path, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = SessionWriter.verdicts

    def full(writer: SessionWriter, verdicts: object) -> None:
        if writer.path.parent == tmp_path / "sessions":
            raise SessionWriteError("cannot write session: disk is full")
        usual(writer, verdicts)

    monkeypatch.setattr(SessionWriter, "verdicts", full)
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(tmp_path))
    assert run(words(model)) == 0  # nobody asked for a recording
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1].startswith("verdict     match")
    assert max(map(len, shown.out.splitlines())) <= 80
    assert ".session lacks the verdicts: cannot write session" in shown.err


@pytest.mark.slow
def test_a_run_in_chunks_is_judged_and_recorded_as_one(model: Path, capsys: Any, tmp_path: Path) -> None:
    saved = tmp_path / "a.session"
    long = ["check", str(model), "--ids", "5,6,7,8,9,10,11", "--ids", "3,4", "--steps", "2", "--chunk", "3"]
    assert run([*long, "--tp", "2", "--json", "--save", str(saved)]) == 0
    reported = strictly(capsys.readouterr().out)
    assert (reported["verdict"], reported["steps"], reported["prefill"]) == ("match", 5, 3)
    with Session.open(saved) as session:
        assert session.meta.config.chunk_tokens == 3
        assert [len(session.step(step).sequences[0].ids) for step in session.steps()] == [3, 3, 1, 1, 1]
    assert run(["check", str(saved), "--model", str(model), "--json"]) == 0  # the same passes as a reference
    assert strictly(capsys.readouterr().out)["verdict"] == "match"
    assert run([*long, "--fault", "positions=stuck"]) == 1
    assert "prefill (step 1)" in capsys.readouterr().out


def test_a_chunk_of_nothing_is_refused(model: Path, capsys: Any) -> None:
    assert run(words(model, "--chunk", "0")) == 2


def test_every_operation_has_a_column_of_its_own() -> None:
    assert set(HEADS) == set(LAYER)
    assert len(set(HEADS.values())) == len(HEADS)
