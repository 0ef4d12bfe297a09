"""llama.cpp's tensors in files: those of a callback are what transformers computed, of llama-debug what it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.diagnosis.diagnose import diagnose
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.foreign.importing import FORMATS, import_run
from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.readers.llamacpp import open_llamacpp
from lockstep.workbench.models.dumps import recognised
from lockstep.workbench.references.llamacpp import library
from tests.checkpoints import tiny_checkpoint
from tests.gguf_twins import gguf_twin
from tests.workbench.foreign.readers.activations import Computed, computed
from tests.workbench.foreign.readers.llamacpp_writer import write_callback, write_debug

PROMPT = [5, 17, 101, 3]
EXAMPLE = Path(__file__).parents[4] / "examples/llamacpp_dump.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen2", num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def run(model: Any) -> Computed:
    return computed(model, [PROMPT], steps=2)[0]


def test_every_tap_is_what_was_computed(model: Any, run: Computed, checkpoint: Path, tmp_path: Path) -> None:
    write_callback(tmp_path, model, run)
    assert recognised(tmp_path) == ["llamacpp"]
    found = list(open_llamacpp(tmp_path, checkpoint).passes(0))
    assert [one.ids for one in found] == list(run.ids)
    assert [one.positions for one in found] == [(0, 1, 2, 3), (4,), (5,)]
    for one, taps in zip(found, run.passes, strict=True):
        assert {tensor.tap for tensor in one.tensors} == set(taps) - {"cos", "sin"}
        for tensor in one.tensors:
            assert tensor.array is not None
            expected = taps[tensor.tap].numpy()
            rows = expected[-1:] if tensor.tap == "logits" else expected
            assert np.array_equal(tensor.array.reshape(len(rows), -1), rows), tensor.tap
            assert tensor.rows == ((3,) if tensor.tap == "logits" and len(expected) > 1 else None)


def test_it_becomes_a_session_that_the_checkpoint_judges(
    model: Any, run: Computed, checkpoint: Path, tmp_path: Path
) -> None:
    write_callback(tmp_path / "dump", model, run)
    import_run(
        FORMATS["llamacpp"].open(tmp_path / "dump", checkpoint), tmp_path / "run.session", form="llamacpp"
    )
    with Session.open(tmp_path / "run.session", UNLIMITED) as session:
        assert session.step(0).sequences[0].emitted == run.ids[1][0]
        found = diagnose(session, Facts.of(checkpoint, "float32"))
    assert found.judged
    assert not found.wrong


def test_rows_that_llama_cpp_left_out_are_the_last_ones(
    model: Any, run: Computed, checkpoint: Path, tmp_path: Path
) -> None:
    """Without logits of every token, the last layer goes on with the rows that have any."""
    write_callback(tmp_path, model, run)
    for path in (tmp_path / "pass0").glob("*.npy"):
        if any(f".{name}." in path.name for name in ("ffn_inp-1", "l_out-1", "result_norm", "result_output")):
            np.save(path, np.load(path)[:, :, -1:])
    opened = open_llamacpp(tmp_path, checkpoint)
    first = {one.tap: one for one in next(iter(opened.passes(0))).tensors}
    assert first["layers.1.mlp_residual"].rows == (3,)
    assert first["layers.0.mlp_residual"].rows is None
    assert any("the last row alone" in note for note in opened.facts.notes)


@pytest.mark.parametrize("prefix", ["common_debug_cb_eval", "ggml_debug"])
def test_llama_debug_leaves_logits_and_means(model: Any, run: Computed, tmp_path: Path, prefix: str) -> None:
    write_debug(tmp_path / "dump", model, run, prefix=prefix)
    opened = open_llamacpp(tmp_path / "dump")
    (found,) = opened.passes(0)
    taps = run.passes[0]
    assert found.ids == tuple(PROMPT)
    tensors = {one.tap: one for one in found.tensors}
    logits = tensors.pop("logits")
    assert logits.array is not None
    assert np.array_equal(logits.array, taps["logits"][-1:].numpy())
    assert logits.rows == (3,)
    assert set(tensors) == set(taps) - {"cos", "sin", "logits"}
    for tap, tensor in tensors.items():
        assert tensor.array is None
        assert tensor.statistics is not None
        mean, rms = tensor.statistics[0, 2:4]
        assert mean == pytest.approx(float(taps[tap].mean()), abs=1e-6), tap
        assert rms == pytest.approx(float(taps[tap].square().mean().sqrt()), abs=1e-5) or (
            prefix == "common_debug_cb_eval" and np.isnan(rms)
        )
    assert any("of all rows together" in note for note in opened.facts.notes)


def test_what_cannot_be_read_is_reported(model: Any, run: Computed, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ForeignDumpError, match="--save-logits"):
        open_llamacpp(tmp_path)
    write_callback(tmp_path / "dump", model, run)
    with pytest.raises(ForeignDumpError, match="give --model"):
        open_llamacpp(tmp_path / "dump")
    with pytest.raises(ForeignDumpError):
        open_llamacpp(tmp_path / "dump", tmp_path)
    path = next((tmp_path / "dump" / "pass0").glob("*.ADD.Qcur-0.npy"))
    np.save(path, np.load(path)[..., :-1])
    with pytest.raises(ForeignDumpError, match=r"Qcur-0\.npy: .*n_ubatch"):
        list(open_llamacpp(tmp_path / "dump", checkpoint).passes(0))
    np.save(path, np.zeros((2, 2), np.float64))
    with pytest.raises(ForeignDumpError, match=r"Qcur-0\.npy: float64"):
        list(open_llamacpp(tmp_path / "dump", checkpoint).passes(0))
    write_debug(tmp_path / "debug", model, run)
    (tmp_path / "debug" / "llamacpp-tiny.bin").write_bytes(b"123")
    with pytest.raises(ForeignDumpError, match=r"llamacpp-tiny\.bin: 3 bytes"):
        list(open_llamacpp(tmp_path / "debug").passes(0))
    (tmp_path / "debug" / "llamacpp-tiny.bin").unlink()
    with pytest.raises(ForeignDumpError, match="without --embedding"):
        open_llamacpp(tmp_path / "debug")


@pytest.mark.llamacpp
@pytest.mark.skipif(not library.is_installed(), reason=library.INSTALL)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_llama_cpp_itself_is_right(family: str, tmp_path: Path) -> None:
    """What the example keeps of the library's own passes; llama's rows of q and k are in pairs there."""
    checkpoint = tiny_checkpoint(tmp_path, family, num_hidden_layers=2)
    file = gguf_twin(checkpoint, tmp_path / "tiny.gguf", keys={"tokenizer.ggml.model": "none"})
    home = tmp_path / "dump"
    command = [sys.executable, EXAMPLE, file, home, "2", *PROMPT]
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=120)
    import_run(FORMATS["llamacpp"].open(home, file), tmp_path / "run.session", form="llamacpp")
    with Session.open(tmp_path / "run.session", UNLIMITED) as session:
        names = {tap.name for tap in session.taps}
        assert {"layers.1.attn.q_rope", "layers.1.attn.probs", "layers.0.attn.o_proj", "logits"} <= names
        found = diagnose(session, Facts.of(checkpoint, "float32"))
    assert found.judged
    assert not found.wrong
