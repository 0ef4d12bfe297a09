"""A check of a prompt so long that neither side keeps its attention whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.engine.config import EngineConfig
from lockstep.sessions import Session
from lockstep.workbench.checking.forced_run import check, record_reference
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import OpenedModel, open_model
from lockstep.workbench.models.requests import plan
from tests.checkpoints import tiny_checkpoint

PROMPT = [3 + i % 100 for i in range(1100)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    folder = tmp_path_factory.mktemp("long")
    return open_model(
        str(tiny_checkpoint(folder, "qwen2", num_hidden_layers=1, max_position_embeddings=2048))
    )


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "first"), [({}, None), ({"scale": "one"}, "layers.0.attn.scores")], ids=str)
def test_it_is_judged_by_the_rows_that_both_have(
    rule: dict[str, str], first: str | None, model: OpenedModel, tmp_path: Path
) -> None:
    config = plan(model, EngineConfig(), [PROMPT], 2, FULL)
    reference = record_reference(model.directory, [PROMPT], 1, config.dtype)
    path = tmp_path / "long.session"
    with Inferior(model.path, model.config, config) as inferior:
        result = check(inferior, reference, path, rules=rule)
    found = result.judgement.first_divergence
    assert (found.tap if found else None) == first
    with Session.open(path) as session:
        kept = session.rebuilt("layers.0.attn.probs", step=0)
        assert kept.slice.startswith(":,-")
        assert kept.array is not None
        assert kept.array.shape[1] < len(PROMPT)
