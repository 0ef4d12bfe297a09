"""`lockstep tui`: what is asked for on the command line is what the host is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.engine.run.sampling import Sampling
from lockstep.workbench.cli import screens, tui
from lockstep.workbench.debugger.host.options import Launch, parse_options, target_of
from lockstep.workbench.paths import sessions_directory
from lockstep.workbench.references.request import REFERENCES
from lockstep.workbench.settings import SettingsError
from lockstep.workbench.tui import launch, settings


def test_the_reference_of_the_settings_is_that_of_gguf_files(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('reference = "llama.cpp"')
    words = settings.load(file).host_words
    for model, expected in (("demo-q8_0", "llama.cpp"), ("demo", "transformers")):
        launched = parse_options(["--socket", "s", model, *words]).launch
        assert launched is not None
        assert target_of(launched).reference == expected
    for known in REFERENCES:
        file.write_text(f'reference = "{known}"')
        assert settings.load(file).reference == known
    file.write_text('reference = "vllm"')
    with pytest.raises(
        SettingsError, match=r"reference = 'vllm': must be one of 'transformers', 'llama\.cpp'"
    ):
        settings.load(file)


@pytest.mark.parametrize(
    ("words", "opened"),
    [
        (["tui", "kept"], ["kept.session"]),
        (["tui", "kept.session"], ["kept.session"]),
        ([], ["home"]),
        (["tui"], ["home"]),
        (["tui", "demo"], None),
        (["tui", "--help"], None),
        (["tui", "kept", "--tp", "2"], None),
        (["replay", "kept"], None),
    ],
)
def test_a_session_and_nothing_else_is_opened_straight(
    words: list[str], opened: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(tmp_path))
    (sessions_directory() / "kept.session").touch()
    monkeypatch.setattr(launch, "run_home", lambda: shown.append("home") or 0)
    monkeypatch.setattr(launch, "run_session", lambda path: shown.append(path.name) or 0)
    monkeypatch.setattr(screens, "no_screens", lambda: "not a terminal")
    assert screens.straight(words) is None
    monkeypatch.setattr(screens, "no_screens", lambda: "")
    assert screens.straight(words) == (None if opened is None else 0)
    assert shown == (opened or [])


def test_every_option_reaches_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(tui, "no_screens", lambda: "")
    monkeypatch.setattr(launch.routes, "running", lambda words, name: reported.extend(words))
    monkeypatch.setattr(launch, "_run", lambda route: 0)
    words = [
        "m.gguf", "--prompt", "a b", "--ids", "1,2", "--chat", "--tp", "2", "--device", "cuda", "--dtype", "bfloat16",
        "--weights", "quantised", "--fault", "mask=additive", "--listen", "h:1", "--seed", "7", "--capture", "full",
        "--timeout", "9", "--start-timeout", "8",
    ]  # fmt: skip
    result = CliRunner().invoke(tui.app, words)
    assert result.exit_code == 0, result.output
    assert parse_options(["--socket", "s", *reported]).launch == Launch(
        "m.gguf", ["a b"], ["1,2"], True, 2, "cuda", "bfloat16", ["mask=additive"], ["full"], Sampling(seed=7), 9.0,
        listen="h:1", start_timeout=8.0, catch=[], weights="quantised",
    )  # fmt: skip
