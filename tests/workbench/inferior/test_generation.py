"""Running to the end, and what ends a sequence before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import RankError
from lockstep.engine.run.sampling import Sampling
from lockstep.sessions import Session
from lockstep.workbench.inferior.generation import NonFiniteTap, add_prompts, run_to_end
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.inferior.session import create_session
from lockstep.workbench.models.capture import NOTHING, STATS, Capture
from lockstep.workbench.models.opening import open_model
from tests.checkpoints import put_nan, tiny_checkpoint


@pytest.mark.parametrize("capture", [NOTHING, STATS], ids=["off", "stats"])
def test_nan_ends_a_sequence_and_its_first_tap_is_named(capture: Capture, tmp_path: Path) -> None:
    """Whether statistics are recorded or not; the session holds the pass once, and the policy is as before."""
    path = tiny_checkpoint(tmp_path, "qwen2")
    put_nan(path, "model.layers.2.self_attn.k_proj.weight")
    model, heard = open_model(str(path)), []
    with Inferior(path, model.config, EngineConfig(threads=1), capture=capture) as inferior:
        sequences = add_prompts(inferior, [[1, 2, 3]], Sampling())
        with create_session(inferior, tmp_path / "run.session"):
            run_to_end(inferior, sequences, 8, lambda seq, token, why: heard.append((seq, token, why)))
        assert inferior.capture == capture
        assert not inferior.sequences
    reported = sequences[0]
    assert (reported.ids, reported.finish_reason) == ([], "nan")
    assert reported.first_bad_tap == NonFiniteTap("layers.2.attn.k_proj", 0)
    assert heard == [(0, None, "nan")]
    with Session.open(tmp_path / "run.session") as session:
        assert list(session.steps()) == [0]


def test_a_cache_that_lost_rows_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2")
    model = open_model(str(path))
    with Inferior(path, model.config, EngineConfig(threads=1), capture=NOTHING) as inferior:
        sequences = add_prompts(inferior, [[1, 2, 3]], Sampling())
        collect = inferior.client.collect

        def lose(*arguments: object) -> object:
            reports = collect(*arguments)
            for report in reports:
                report.sequences[0].held[1] = 2
            return reports

        monkeypatch.setattr(inferior.client, "collect", lose)
        with pytest.raises(RankError, match="3 tokens were run, the cache holds 2 rows in layer 1 on rank 0"):
            run_to_end(inferior, sequences, 8)
