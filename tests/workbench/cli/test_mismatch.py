"""`lockstep mismatch` as a user runs it: what it prints, its exit codes, its files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions.keeping import keeping
from lockstep.workbench.cli.main import run
from lockstep.workbench.exit_codes import Exit
from tests.workbench.diagnosis.synthetic import Case, synthetic, tiny_case


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return tiny_case(tmp_path_factory.mktemp("case"))


@pytest.fixture
def files(case: Case, tmp_path: Path) -> tuple[str, str]:
    paths = tmp_path / "rollout.session", tmp_path / "trainer.session"
    with keeping(synthetic(paths[0], case.floor), synthetic(paths[1], case.floor)):
        return str(paths[0]), str(paths[1])


@pytest.mark.slow
def test_equal_sides(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mismatch", *files]) == Exit.OK
    printed = capsys.readouterr().out
    assert "verdict  equal" in printed
    assert "mean Δ log p +0" in printed


def test_figures_of_another_temperature(
    files: tuple[str, str], case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the rows whose logits were recorded, null for the others."""
    rows = {}
    for seq in (0, 1):
        steps = [one for k in case.floor.steps() for one in case.floor.step(k).sequences if one.seq == seq]
        figures: list[float | None] = [None] * (sum(len(one.ids) for one in steps))
        for k, one in enumerate(steps):
            logits = case.floor.rebuilt("logits", step=k, seq=seq).array
            assert logits is not None
            assert one.emitted is not None
            row = logits[-1].astype(float) / 0.5
            figures[one.positions[-1]] = float(row[one.emitted] - np.logaddexp.reduce(row))
        rows[str(seq)] = figures
    reported = tmp_path / "figures.json"
    reported.write_text(json.dumps(rows))
    plot = tmp_path / "gaps.svg"
    code = run(["mismatch", *files, "--rollout-logprobs", str(reported), "--plot", str(plot), "--json"])
    assert code == Exit.DIVERGED
    printed = json.loads(capsys.readouterr().out)
    assert (printed["verdict"], printed["answer"]) == ("differs", "logprob")
    assert "a temperature of 0.5" in printed["levels"][2]["text"]
    assert len(printed["tokens"]) == 6
    assert ">trainer</text>" in plot.read_text()


@pytest.mark.slow
def test_shares_of_operations_are_printed_drawn_and_reported(
    files: tuple[str, str], case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, plot = tmp_path / "other.session", tmp_path / "gaps.svg"
    with keeping(synthetic(trainer, case.floor, spoil={"logits": lambda x, at: 1.5 * x})):
        model = ["--model", str(case.model_dir)]
        assert run(["mismatch", files[0], str(trainer), *model, "--plot", str(plot)]) == Exit.DIVERGED
        printed = capsys.readouterr().out
        assert run(["mismatch", files[0], str(trainer), *model, "--json"]) == Exit.DIVERGED
    (line,) = [line for line in printed.splitlines() if line.startswith("logits")]
    assert line.count("100.0 %") == 4
    assert ">logits</text>" in plot.read_text()
    shares = json.loads(capsys.readouterr().out)["shares"]
    assert shares["shares"] == [
        {"tap": "logits", "rollout": {"gap": 1.0, "kl": 1.0}, "trainer": {"gap": 1.0, "kl": 1.0}}
    ]


@pytest.mark.parametrize("content", ["{", '{"a": [1]}', "[[1, true]]", '[["x"]]', "[" * 100_000, "3"])
def test_a_file_of_something_else_is_one_line(
    files: tuple[str, str], tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reported = tmp_path / "figures.json"
    reported.write_text(content)
    assert run(["mismatch", *files, "--rollout-logprobs", str(reported)]) == Exit.USAGE
    printed = capsys.readouterr().err
    assert "figures.json" in printed
    assert len(printed.splitlines()) == 1


def test_what_is_not_there_is_reported(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mismatch", files[0], "nothing.session"]) == Exit.CANNOT_LOAD
    assert "nothing.session" in capsys.readouterr().err
    assert run(["mismatch", *files, "--trainer-logprobs", "nothing.json"]) == Exit.USAGE
    assert "nothing.json" in capsys.readouterr().err
