"""`lockstep import`: a dump becomes a session, and nothing where it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.sessions import Session
from lockstep.workbench.attach.inside.lockstep_tap import Tape
from lockstep.workbench.cli.main import run
from tests.checkpoints import tiny_checkpoint

pytestmark = pytest.mark.sampled_file(2)

IDS = [[5, 6, 7, 8], [9], [10]]


def dump(folder: Path, *, ranks: int = 1, capture: str = "full", name: str = "layers.0.attn.q_proj") -> Path:
    """Three passes of one request; what is tapped is as good as any."""
    for rank in range(ranks):
        tape = Tape(folder, rank, ranks, engine="mine 1", capture=capture)
        at, torch_seed = 0, torch.Generator().manual_seed(rank)
        for ids in IDS:
            tape.step(ids, list(range(at, at + len(ids))), "a")
            tape.tap("embed", torch.tensor(ids).float()[:, None].repeat(1, 8), "replicate")
            tape.tap(name, torch.randn(len(ids), 4, generator=torch_seed), "shard(1)")
            tape.tap("router.weights", torch.ones(len(ids), 3))
            at += len(ids)
        tape.close()
    return folder


def imported(capsys: Any, *words: object, code: int = 0) -> tuple[str, str]:
    assert run(["import", *map(str, words)]) == code
    reported = capsys.readouterr()
    return reported.out, reported.err


def test_a_dump_becomes_a_session_with_what_it_rests_on(tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "run.session"
    out, err = imported(capsys, "lockstep", dump(tmp_path / "dump", ranks=2), "-o", target)
    assert out == "6 rows · 1 of 21 taps × 1 layer · 2/2 ranks · recorded eager\n"
    assert "layouts inferred, not recorded: router.weights replicate" in err
    with Session.open(target) as session:
        assert [list(step.sequences[0].ids) for step in map(session.step, session.steps())] == IDS
        assert session.tap("layers.0.attn.q_proj").layout == "shard(1)"
        assert session.rebuilt("layers.0.attn.q_proj", step=0).array.shape == (4, 8)  # type: ignore[union-attr]
        assert session.meta.source == "mine 1"


def test_a_map_gives_names_and_layouts(tmp_path: Path, capsys: Any) -> None:
    folder = dump(tmp_path / "dump", ranks=2, name="decoder.3.attention.query")
    names = tmp_path / "names.toml"
    names.write_text(
        '[taps]\n"decoder.*.attention.query" = "layers.*.attn.q_proj"\n"router.*" = ""\n'
        '[layouts]\n"layers.*.attn.q_proj" = "partial"\n'
    )
    imported(capsys, "lockstep", folder, "-o", tmp_path / "run.session", "--map", names)
    with Session.open(tmp_path / "run.session") as session:
        assert [(tap.name, tap.layout) for tap in session.taps] == [
            ("embed", "replicate"),
            ("layers.3.attn.q_proj", "partial"),
        ]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ('[taps]\n"a.*" = "layers.*.b.*"', "may not have more of them"),
        ('[layouts]\n"a" = "sharded"', "is no layout"),
        ("[names]\n", "tables [taps] and [layouts]"),
        ("not toml", "tables [taps] and [layouts]"),
    ],
)
def test_a_bad_map_is_one_clear_error(tmp_path: Path, capsys: Any, text: str, printed: str) -> None:
    names = tmp_path / "names.toml"
    names.write_text(text)
    words = ("lockstep", dump(tmp_path / "dump"), "-o", tmp_path / "run.session", "--map", names)
    _, err = imported(capsys, *words, code=3)
    assert printed in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run.session").exists()


def test_what_cannot_be_imported_leaves_what_was_there(tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "run.session"
    imported(capsys, "lockstep", dump(tmp_path / "good"), "-o", target)
    before = target.read_bytes()
    bad = dump(tmp_path / "bad", ranks=2)
    lines = (bad / "rank1" / "passes.jsonl").read_text().replace("[10]", "[11]")
    (bad / "rank1" / "passes.jsonl").write_text(lines)
    _, err = imported(capsys, "lockstep", bad, "-o", target, code=3)
    assert "rank 1, pass 2: read other ids" in err
    assert target.read_bytes() == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bad", "good", "run.session"]


def test_a_file_that_is_no_session_is_not_replaced(tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"weights")
    _, err = imported(capsys, "lockstep", dump(tmp_path / "dump"), "-o", target, code=2)
    assert "is not a session" in err
    assert target.read_bytes() == b"weights"


def test_a_format_left_out_is_recognised_or_the_formats_are_listed(tmp_path: Path, capsys: Any) -> None:
    folder = dump(tmp_path / "dump")
    _, err = imported(capsys, folder, "-o", tmp_path / "run.session")
    assert f"format lockstep, by the names of the files in {folder}" in err
    (folder / "TP0_PP0_Rank0_pid7").mkdir()
    several = imported(capsys, folder, code=2)[1]
    assert "has files of lockstep and sglang" in several
    (tmp_path / "other").mkdir()
    for words in ([], [folder / "nowhere"], [tmp_path / "other"]):
        _, err = imported(capsys, *words, code=2)
        assert "lockstep import FORMAT DIR, where FORMAT is one of lockstep, sglang, " in err


@pytest.mark.parametrize("words", [("tensorflow", "."), ("lockstep", "nowhere")])
def test_what_is_no_format_and_no_dump_is_reported(
    tmp_path: Path, capsys: Any, words: tuple[str, str]
) -> None:
    code = 2 if words[0] == "tensorflow" else 3
    _, err = imported(capsys, words[0], tmp_path / words[1], code=code)
    assert "lockstep" in err


def test_statistics_alone_are_kept_row_by_row(tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "run.session"
    out, _ = imported(capsys, "lockstep", dump(tmp_path / "dump", ranks=2, capture="stats"), "-o", target)
    assert out.endswith("recorded eager · statistics only\n")
    with Session.open(target) as session:
        assert session.meta.foreign is not None
        assert session.meta.foreign.statistics_only
        stats = session.stats(0)
        assert stats is not None
        assert stats[session.tap("embed").index, 0, :2].tolist() == [5.0, 8.0]
        rows = session.rebuilt("embed.row_statistics", step=0).array
        assert rows is not None
        assert rows[:, 0].tolist() == [5.0, 6.0, 7.0, 8.0]
        assert session.rebuilt("layers.0.attn.q_proj.row_hashes", step=0).array.shape == (4, 2)  # type: ignore[union-attr]
        assert session.tensor("embed", step=0, rank=0) is None


def test_the_model_gives_shapes_and_json_reports_all(tmp_path: Path, capsys: Any) -> None:
    model = tiny_checkpoint(tmp_path / "model", "qwen2")
    words = ("lockstep", dump(tmp_path / "dump"), "-o", tmp_path / "run.session", "--model", model, "--json")
    reported = json.loads(imported(capsys, *words)[0])
    assert reported["coverage"]["rows"] == 6
    assert reported["foreign"]["format"] == "lockstep"
    with Session.open(tmp_path / "run.session") as session:
        assert session.meta.model.num_layers == 3
        assert session.meta.model.path == str(model)


def test_names_that_no_operation_has_are_reported(tmp_path: Path, capsys: Any) -> None:
    folder = dump(tmp_path / "dump", name="layers.0.q_projection")
    _, err = imported(capsys, "lockstep", folder, "-o", tmp_path / "run.session")
    assert "kept and not judged: layers.0.q_projection, router.weights (docs/tap-format.md" in err
    with Session.open(tmp_path / "run.session") as session:
        assert session.captured_taps(0) >= {"layers.0.q_projection"}


@pytest.mark.parametrize("words", [["check"], ["diagnose"], ["inspect"]])
@pytest.mark.parametrize("model", [[], ["--model", "demo"]])
def test_a_dump_in_place_of_a_session_is_given_its_next_step(
    tmp_path: Path, capsys: Any, words: list[str], model: list[str]
) -> None:
    folder = dump(tmp_path / "dump")
    assert run([*words, str(folder), *(model if words != ["inspect"] else [])]) == 2
    assert f"`lockstep import lockstep {folder} -o run.session`" in capsys.readouterr().err


def test_taps_before_any_step_are_reported(tmp_path: Path, capsys: Any) -> None:
    tape = Tape(tmp_path / "dump")
    tape.tap("layers.0.attn.q_proj", torch.ones(2, 4))
    tape.close()
    assert (
        "layers.0.attn.q_proj was tapped, but no pass was begun by tape.step(ids" in capsys.readouterr().err
    )
    _, err = imported(capsys, "lockstep", tmp_path / "dump", code=3)
    assert "begins with tape.step(ids, positions)" in err
