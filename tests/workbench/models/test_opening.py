"""What MODEL may be: GGUF files by their path, or by a directory that holds one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.engine.errors import CheckpointError
from lockstep.workbench.demo import GGUF_DIR
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.foreign.importing import FORMATS
from lockstep.workbench.models.dumps import SIGNS
from lockstep.workbench.models.identify import identify
from lockstep.workbench.models.opening import open_model

DEMO = "demo-q8_0.gguf"


def test_a_gguf_file_is_a_model_with_its_own_tokenizer() -> None:
    model = open_model(str(GGUF_DIR / DEMO))
    assert (model.name, model.path, model.directory) == ("demo-q8_0", GGUF_DIR / DEMO, GGUF_DIR / DEMO)
    assert model.config.family == "qwen2"
    assert model.tokenizer is not None
    assert model.tokenizer.template is not None
    found = identify(str(GGUF_DIR / DEMO))
    assert (found.kind, found.path, found.tps[:2]) == ("model", GGUF_DIR / DEMO, (1, 2))


def test_a_directory_with_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    shutil.copy(GGUF_DIR / DEMO, tmp_path)
    assert open_model(str(tmp_path)).path == tmp_path / DEMO
    assert identify(str(tmp_path)).path == tmp_path / DEMO
    shutil.copy(GGUF_DIR / DEMO, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files .*: give the path of one"):
        open_model(str(tmp_path))
    found = identify(str(tmp_path))
    assert (found.kind, "2 GGUF files" in found.summary) == ("directory", True)


def test_a_damaged_gguf_file_reports_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / DEMO
    file.write_bytes((GGUF_DIR / DEMO).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated: "):
        open_model(str(file))
    found = identify(str(file))
    assert (found.kind, "truncated" in found.summary) == ("nothing", True)


@pytest.mark.parametrize(
    ("file", "form"),
    [
        ("rank1/tape.json", "lockstep"),
        ("TP0_PP0_Rank0_pid7/Pass00000.pt", "sglang"),
        ("pass0/ids.npy", "llamacpp"),
    ],
)
def test_the_command_that_imports_a_dump_is_named(file: str, form: str, tmp_path: Path) -> None:
    folder = tmp_path / "a dump"
    (folder / file).parent.mkdir(parents=True)
    (folder / file).touch()
    with pytest.raises(UsageError) as caught:
        open_model(str(folder))
    assert f"is a {form} dump, not a model" in str(caught.value)
    assert f"`lockstep import {form} '{folder}' -o run.session`" in str(caught.value)
    (folder / "config.json").write_text("[]")  # a checkpoint with a dump beside it: its own error
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        open_model(str(folder))


def test_every_format_has_a_sign_that_it_is_recognised_by() -> None:
    assert SIGNS.keys() == FORMATS.keys()


def test_a_recording_is_no_model() -> None:
    with pytest.raises(
        UsageError, match="is a recording, not a model: `lockstep replay gallery/mask-additive`"
    ):
        open_model("gallery/mask-additive")
