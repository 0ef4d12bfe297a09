"""Where a generated text parts from the reference's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.engine.run.sampling import Sampling
from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.texts import compare_texts
from lockstep.workbench.cli.comparison import comparison_text
from lockstep.workbench.inferior.generation import Generated
from lockstep.workbench.references.golden import record_golden
from lockstep.workbench.references.request import GoldenSequence
from tests.checkpoints import tiny_variant

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_variant(tmp_path_factory.mktemp("model"), "qwen2-tied")


@pytest.fixture(scope="module")
def written(model: Path) -> Generated:
    """Four greedy tokens of transformers."""
    with Session.open(
        record_golden(model, [GoldenSequence(tuple(PROMPT))], 3, "float32"), UNLIMITED
    ) as session:
        reported = [session.step(step).sequences[0] for step in session.steps()]
    tops = [tuple(zip(one.topk_ids, one.topk_logits, strict=True)) for one in reported]
    return Generated(list(PROMPT), [one.emitted for one in reported if one.emitted is not None], tops)


@pytest.mark.slow
def test_the_same_text_does_not_part(model: Path, written: Generated) -> None:
    found = compare_texts(model, {4: written}, Sampling(), "transformers", "float32")
    assert (found.tokens, found.partings) == (4, ())
    assert comparison_text(found, None) == "transformers: the same 4 tokens"


def test_the_first_other_token_is_reported_with_both_sides(model: Path, written: Generated) -> None:
    second = written.top[2][1][0]
    other = replace(written, ids=[*written.ids[:2], second, 9])
    found = compare_texts(model, {4: other}, Sampling(), "transformers", "float32")
    (parting,) = found.partings
    assert (parting.seq, parting.step, parting.position) == (4, 2, len(PROMPT) + 2)
    assert (parting.engine_token, parting.reference_token) == (second, written.ids[2])
    assert [token for token, _ in parting.reference_top[:2]] == [written.ids[2], second]
    stated = comparison_text(found, None).splitlines()
    assert stated[0].startswith("sequence 4 parts from transformers at new token 3 (position 6): ")
    assert stated[1].startswith("  lockstep      ")
    assert stated[2].startswith(f"  transformers  {written.ids[2]} ")


def test_sampling_is_keyed_alike(model: Path, written: Generated) -> None:
    """Greedy tokens are not those that this seed draws."""
    found = compare_texts(model, {0: written}, Sampling(temperature=5.0, seed=1), "transformers", "float32")
    assert found.partings
