"""Without the extras: what needs one reports it before it does anything, and the rest works. The real thing, in fresh
environments, is tests/e2e/test_installation.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.engine import extras
from lockstep.workbench.cli.main import run
from lockstep.workbench.models import opening

RECORDED = Path(__file__).resolve().parents[3] / "sessions" / "recorded" / "mask-additive.session"


@pytest.fixture(autouse=True)
def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (extras, opening):
        monkeypatch.setattr(module, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("generate demo --prompt a", "engine"), ("check demo", "engine"), ("invariant demo", "engine"),
        ("diagnose demo", "engine"), ("demo", "engine"), ("run demo --ex next", "engine"), ("inspect demo", "engine"),
        ("inspect demo --no-statistics demo-q8_0", "engine"), (f"replay {RECORDED} --verify demo", "engine"),
        ("attach --model demo -- true", "engine"), (f"check {RECORDED}", "engine"), ("web", "web"), ("mcp", "mcp"),
    ],
)  # fmt: skip
def test_one_line_reports_how_to_install_it(
    line: str, extra: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("lockstep: error: ")
    assert err.endswith(f": pip install 'lockstep-llm[{extra}]'\n")


@pytest.mark.parametrize("model", ["demo", "demo-q8_0"])
def test_a_checkpoint_is_described_without_its_tensors(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", model, "--no-statistics"]) == 0
    assert "model.layers.3.mlp.down_proj.weight" in capsys.readouterr().out


def test_a_model_has_no_tokenizer() -> None:
    opened = opening.open_model("demo")
    assert (opened.tokenizer, opened.config.family) == (None, "qwen2")
