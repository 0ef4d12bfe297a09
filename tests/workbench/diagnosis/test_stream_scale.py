"""A residual stream at another size that every norm divides out accuses nobody; one of which only a part is so does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.checking.recorded_run import diagnose_recording
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.recording import Recordings

pytestmark = pytest.mark.sampled_file(2)

FACTOR = 1 / 3


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("streams"), steps=1)


def scaled(p: Patched, size: Callable[[int], float], *, epsilon: bool = True, last_down: bool = True) -> None:
    """The stream at `size(layer)` times its own before each layer, of which the norms know by their `epsilon`."""
    count = len(list(p.layers()))

    def enlarge(norm: object, by: float) -> None:
        if epsilon:
            norm.variance_epsilon *= by**2  # type: ignore[attr-defined]

    p.weight(p.decoder.embed_tokens, lambda w: w * size(0))
    for i, layer in p.layers():
        p.weight(layer.self_attn.o_proj, lambda w, i=i: w * size(i))
        if last_down or i < count - 1:
            p.weight(layer.mlp.down_proj, lambda w, i=i: w * size(i))
        enlarge(layer.input_layernorm, size(i))
        enlarge(layer.post_attention_layernorm, size(i))
        change = size(i + 1) / size(i)
        if change != 1:
            p.residuals(i, mlp=lambda x, y, by=change: (x + y) * by)
    enlarge(p.decoder.norm, size(count))


def diagnosed(
    recordings: Recordings, name: str, patch: Callable[[Patched], None], tp: int = 1
) -> CheckResult:
    recorded = recordings.of(Bug(name, "", (), "", Place(()), patch, "llama", tp=tp))
    with Session.open(recorded.engine, UNLIMITED) as ours:
        return diagnose_recording(ours, recorded.checkpoint, golden=recorded.golden, floor=recorded.floor)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stream_at_another_size_throughout_is_a_note(tp: int, recordings: Recordings) -> None:
    found = diagnosed(recordings, f"third_{tp}", lambda p: scaled(p, lambda layer: FACTOR), tp)
    assert (found.event.verdict, found.causes) == ("match", ())
    assert any(
        "the whole residual stream is 1/3 times what it should be" in note for note in found.event.notes
    )


def test_a_stream_that_is_halved_layer_by_layer_is_a_note(recordings: Recordings) -> None:
    found = diagnosed(recordings, "halved", lambda p: scaled(p, lambda layer: 0.5**layer))
    assert (found.event.verdict, found.causes) == ("match", ())


def test_one_that_was_not_scaled_along_is_a_cause(recordings: Recordings) -> None:
    found = diagnosed(recordings, "down", lambda p: scaled(p, lambda layer: 4.0, last_down=False))
    assert found.event.verdict == "diverged"
    assert [(cause.tap, cause.layers) for cause in found.causes] == [("layers.2.mlp.down", (2,))]


def test_an_epsilon_that_was_left_as_it_was_is_a_cause(recordings: Recordings) -> None:
    found = diagnosed(recordings, "epsilon", lambda p: scaled(p, lambda layer: 1 / 4, epsilon=False))
    assert found.event.verdict == "diverged"
    assert [cause.name for cause in found.causes] == ["norm_number"]


def test_an_embedding_alone_is_a_cause(recordings: Recordings) -> None:
    found = diagnosed(
        recordings, "embedding", lambda p: p.weight(p.decoder.embed_tokens, lambda w: w * FACTOR)
    )
    assert found.event.verdict == "diverged"
    assert found.causes[0].tap == "embed"


def test_next_to_nothing_is_no_size(recordings: Recordings) -> None:
    """A factor that rounds to zero ends no diagnosis."""

    def emptied(p: Patched) -> None:
        p.weight(p.decoder.embed_tokens, lambda w: w * 1e-9)

    found = diagnosed(recordings, "emptied", emptied)
    assert found.event.verdict == "diverged"
    assert found.causes[0].tap == "embed"
