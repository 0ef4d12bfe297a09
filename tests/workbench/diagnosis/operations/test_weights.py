"""Weights as numpy reads them are those that the engine loads, of every family and however they are stacked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.parallel import shards
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.weights import CheckpointWeights, StoredMatrix
from tests.checkpoints import EVERY_VARIANT, mxfp4_checkpoint, tiny_variant


@pytest.mark.parametrize("name", [*EVERY_VARIANT, "mxfp4"])
@pytest.mark.sampled(3)
def test_every_parameter_is_read_as_the_engine_reads_it(name: str, tmp_path: Path) -> None:
    path = mxfp4_checkpoint(tmp_path) if name == "mxfp4" else tiny_variant(tmp_path, name)
    model, source = open_checkpoint(path)
    read, facts = CheckpointWeights(path), Facts.of(path, "float32")
    for parameter in shards.parameters(model):
        found = read(parameter)
        assert found is not None, parameter
        np.testing.assert_array_equal(found, source.read(parameter).float().numpy())
        if found.ndim == 2:
            ids = [len(found) - 1, 0, 0]
            np.testing.assert_array_equal(facts.rows(parameter, ids), found[ids])
            np.testing.assert_array_equal(facts.rows(parameter, []), found[:0])
            with pytest.raises(IndexError):
                facts.rows(parameter, [len(found)])
            _assert_parts_are(facts, parameter, found)
    assert read("model.layers.0.no_such.weight") is None
    assert isinstance(Facts.of(path, "float32").matrix("model.embed_tokens.weight"), StoredMatrix)
    assert facts.rows("model.layers.0.no_such.weight", [0]) is None


def _assert_parts_are(facts: Facts, parameter: str, whole: NDArray[np.float32]) -> None:
    """Some of the last rows and columns, three rows at a time, as an engine of bfloat16 holds them too."""
    rows, columns = slice(len(whole) // 3, len(whole)), slice(1, whole.shape[1] // 2 + 1)
    for held in (facts, facts.at("bfloat16")):
        matrix = held.matrix(parameter)
        if isinstance(matrix, StoredMatrix):
            part, kept = matrix.part(rows, columns), held.weight(parameter)
            assert kept is not None
            assert part.shape == kept[rows, columns].shape
            np.testing.assert_array_equal(np.concatenate(list(part.chunks(3))), kept[rows, columns])
            assert not isinstance(held.matrix(parameter), StoredMatrix), "what is kept is not read again"
