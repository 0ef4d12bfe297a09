"""`lockstep bench`: figures, files, what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lockstep.workbench.bench.measure import Plan
from lockstep.workbench.cli import bench
from lockstep.workbench.cli.main import run
from lockstep.workbench.references.request import ReferenceFailure
from tests.checkpoints import tiny_checkpoint


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr(bench, "QUICK", Plan(batches=(2,), lengths=(16,), steps=1, rounds=1))
    return str(tiny_checkpoint(tmp_path, "qwen2"))


@pytest.mark.slow
def test_figures_as_json_and_a_plot(small: str, capsys: Any, tmp_path: Path) -> None:
    plot = tmp_path / "a.svg"
    assert run(["bench", small, "--quick", "--threads", "1", "--json", "--plot", str(plot)]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["baseline"], reported["missing"], reported["threads"]) == ("transformers", [], 1)
    assert [(row["what"], row["size"]) for row in reported["rows"]] == [
        ("load", 0),
        ("decode", 2),
        ("prefill", 16),
    ]
    for row in reported["rows"]:
        names = [one["contender"] for one in row["figures"]]
        assert names == ["lockstep", "lockstep, statistics", "transformers"]
        for one in row["figures"]:
            assert 0 < one["least"] <= one["seconds"]
            assert one["ratio"] == pytest.approx(row["figures"][2]["seconds"] / one["seconds"])
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_a_library_that_is_missing_is_one_line_and_its_code(
    small: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, reference: str) -> None:
        raise ReferenceFailure(f"{reference} is not here")

    monkeypatch.setattr(bench, "need_readable", refuse)
    assert run(["bench", small, "--quick", "--threads", "1", "--against", "llama.cpp"]) == 3
    out, err = capsys.readouterr()
    assert err.splitlines() == ["lockstep: error: llama.cpp is not here"]
    assert "prefill 16" in out  # ours is measured all the same
    assert "statistics" in out


def test_words_that_name_no_library_are_refused(small: str, capsys: Any) -> None:
    assert run(["bench", small, "--against", "vllm"]) == 2
    assert "transformers, llama.cpp" in capsys.readouterr().err
