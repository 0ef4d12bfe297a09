"""What lies between a tap of the stream and all its readers is named where the tap is, not as an epsilon of a norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.checking.recorded_run import diagnose_recording
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.recording import Recordings

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("reads"), steps=1)


def diagnosed(
    recordings: Recordings, name: str, patch: Callable[[Patched], None], model: str = "llama"
) -> CheckResult:
    recorded = recordings.of(Bug(name, "", (), "", Place(()), patch, model))
    with Session.open(recorded.engine, UNLIMITED) as ours:
        return diagnose_recording(ours, recorded.checkpoint, golden=recorded.golden, floor=recorded.floor)


def entering(p: Patched, layer: int, change: Callable[[Tensor], Tensor]) -> None:
    """Changes what a layer reads, behind the tap of what was written."""
    p.wrap(
        p.decoder.layers[layer], lambda forward, hidden_states, **more: forward(change(hidden_states), **more)
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("factor", "words"), [(8.0, "8"), (1 / 3, "0.333333"), (11.314, "11.314")]
)  # a power of two, by which no product is rounded, and others
def test_an_embedding_that_is_multiplied_behind_its_module_is_named_there(
    factor: float, words: str, recordings: Recordings
) -> None:
    found = diagnosed(recordings, f"embed_{factor}", lambda p: entering(p, 0, lambda x: x * factor))
    assert found.event.verdict == "diverged"
    (cause,) = found.causes
    assert cause.tap == "embed"
    assert cause.text.startswith(f"the embedding is {words} times what it should be")
    assert any("layers.0.{attn_norm,attn_residual} read" in note for note in found.event.notes)


@pytest.mark.slow
def test_an_embedding_that_the_model_multiplies_is_multiplied_once_more(recordings: Recordings) -> None:
    found = diagnosed(recordings, "twice", lambda p: entering(p, 0, lambda x: x * 8.0), "gemma3")
    (cause,) = found.causes
    assert (cause.tap, cause.name) == ("embed", "embedding_scaled")
    assert cause.text == "the embedding is 8 times what it should be, sqrt(hidden_size)"


def test_a_stream_that_is_multiplied_between_two_layers(recordings: Recordings) -> None:
    found = diagnosed(recordings, "between", lambda p: entering(p, 1, lambda x: x * 0.25))
    (cause,) = found.causes
    assert (cause.tap, cause.text) == ("layers.0.mlp_residual", "the result is multiplied by 1/4")


def test_an_epsilon_of_its_own_stays_one(recordings: Recordings) -> None:
    """A norm with another epsilon beside a sum with a factor: the norm does not read what the sum does."""

    def both(p: Patched) -> None:
        p.decoder.layers[0].input_layernorm.variance_epsilon = 1e-3
        p.residuals(0, attn=lambda x, y: 8 * x + y)

    found = diagnosed(recordings, "both", both)
    first = [cause.tap for cause in found.causes if not cause.alternative]
    assert first == ["layers.0.attn_norm", "layers.0.attn_residual"]
