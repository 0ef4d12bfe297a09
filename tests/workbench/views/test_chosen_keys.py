"""Which keys an indexer left out, against the scores that attention made of what it chose."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.sessions import Session
from lockstep.workbench.references.request import GoldenRequest, GoldenSequence
from lockstep.workbench.references.transformers_recorder import record
from lockstep.workbench.views.attention import attention
from lockstep.workbench.views.cache_rows import cache_rows
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where
from tests.checkpoints import tiny_checkpoint

PROMPT = (3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56)


def test_what_was_left_out_is_what_has_no_score(tmp_path: Path) -> None:
    """In a layer with an indexer and in one that takes its choice; of the prompt's queries and the decode step's."""
    path = tiny_checkpoint(tmp_path, "glm_moe_dsa")
    record(GoldenRequest(str(path), (GoldenSequence(PROMPT),), steps=1), tmp_path / "run.session")
    with Session.open(tmp_path / "run.session") as session:
        source, where = SessionSource(session), Where(0, 1, 0, 0)
        for layer in (0, 1):
            found = attention(source, where, layer, "scores")
            assert found.values is not None
            assert found.left_out is not None
            visible = np.tril(np.ones(found.values.shape[1:], bool))
            np.testing.assert_array_equal(found.left_out, visible & np.isneginf(found.values[0]))
            assert (visible & ~found.left_out).sum(-1).tolist() == [min(i + 1, 8) for i in range(14)]
        rows = cache_rows(source, where, 3, "latent_cache", False)
        np.testing.assert_array_equal(rows.left_out[1], found.left_out[-1])
