"""Parameters as numbers: figures, histogram, what stands out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.meta import ModelMeta, SessionMeta
from lockstep.sessions.records import Tap
from lockstep.workbench.demo import GGUF_DIR
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.tensor import tensor_figures
from lockstep.workbench.views.weight_tensor import weight_tensor
from lockstep.workbench.views.weight_values import _standing_out, parameter_values
from lockstep.workbench.views.weights import weights
from lockstep.workbench.views.where import Where

BIAS = "model.layers.0.self_attn.q_proj.bias"


def test_a_bias_of_the_demo_model_is_a_strip_of_heads(tmp_path: Path) -> None:
    path, meta = tmp_path / "demo.session", SessionMeta(model=ModelMeta(path="demo"))
    with SessionWriter.create(path, taps=[Tap(0, "embed", "replicate")], ranks=2, meta=meta):
        pass
    with Session.open(path) as session:
        found = parameter_values(SessionSource(session), BIAS)
        assert found is not None
        assert found.is_strip
        assert found.figures.count == found.matrix.size
        assert found.figures.minimum == found.matrix.min()
        assert sum(found.figures.counts) == found.matrix.size
        assert parameter_values(SessionSource(session), "nothing") is None


def test_a_quantised_matrix_is_shown_dequantised(tmp_path: Path) -> None:
    file = GGUF_DIR / "demo-q4_k_m.gguf"
    path, meta = tmp_path / "gguf.session", SessionMeta(model=ModelMeta(path=str(file)))
    with SessionWriter.create(path, taps=[Tap(0, "embed", "replicate")], ranks=2, meta=meta):
        pass
    name = "model.layers.0.mlp.gate_proj.weight"
    expected = open_checkpoint(file)[1].read(name)
    with Session.open(path) as session:
        source = SessionSource(session)
        found = parameter_values(source, name)
        assert found is not None
        assert np.array_equal(found.matrix, expected.numpy())
        listed = {one.name: one for one in weights(source, Where()).parameters}
        assert (listed[name].dtype, listed[name].shape) == ("Q4_K", (768, 256))
        assert weight_tensor(source, Where(), name, "checkpoint", {}).dtype == "Q4_K"


def test_what_is_not_finite_is_counted_and_hides_nothing() -> None:
    values = np.cos(np.arange(64, dtype=np.float32))
    values[3], values[4], values[9] = np.nan, np.inf, 500
    found = tensor_figures(values, bins=10)
    assert (found.nan, found.inf, found.maximum, len(found.counts)) == (1, 1, 500, 10)
    assert [index for index, _ in _standing_out(values)] == [9]
    assert _standing_out(np.full(8, np.nan, np.float32)) == []
