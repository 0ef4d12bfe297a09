"""A residual stream whose channels stand in another order throughout accuses nobody; one of which a part does not is a
cause."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.checking.recorded_run import diagnose_recording
from lockstep.workbench.diagnosis.stream_order import matched
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.recording import Recordings

#: Exchanges neighbours, with the rest where it is.
ORDER = torch.arange(64).unflatten(0, (-1, 2)).flip(1).flatten()


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("orders"), steps=1)


def ordered(p: Patched, *, last_down: bool = True, norms: bool = True) -> None:
    count = len(list(p.layers()))
    p.weight(p.decoder.embed_tokens, lambda w: w[:, ORDER])
    p.weight(p.model.lm_head, lambda w: w[:, ORDER])
    for i, layer in p.layers():
        attention, mlp = layer.self_attn, layer.mlp
        for side in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            p.weight(side, lambda w: w[:, ORDER])
        p.weight(attention.o_proj, lambda w: w[ORDER])
        if last_down or i < count - 1:
            p.weight(mlp.down_proj, lambda w: w[ORDER])
        for norm in (layer.input_layernorm, layer.post_attention_layernorm) if norms else ():
            p.weight(norm, lambda w: w[ORDER])
    p.weight(p.decoder.norm, lambda w: w[ORDER])


def diagnosed(
    recordings: Recordings, name: str, patch: Callable[[Patched], None], tp: int = 1, dtype: str = "float32"
) -> CheckResult:
    bug = Bug(name, "", (), "", Place(()), patch, "llama", tp=tp, dtype=dtype)  # type: ignore[arg-type]
    recorded = recordings.of(bug)
    with Session.open(recorded.engine, UNLIMITED) as ours:
        return diagnose_recording(ours, recorded.checkpoint, golden=recorded.golden, floor=recorded.floor)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_channels_in_another_order_throughout_are_a_note(tp: int, dtype: str, recordings: Recordings) -> None:
    found = diagnosed(recordings, f"ordered_{tp}", ordered, tp, dtype)
    assert (found.event.verdict, found.causes) == ("match", ())
    assert any("64 of 64 channels of the whole residual stream" in note for note in found.event.notes)


@pytest.mark.slow
def test_a_matrix_that_was_not_ordered_along_is_a_cause(recordings: Recordings) -> None:
    found = diagnosed(recordings, "down", lambda p: ordered(p, last_down=False))
    assert found.event.verdict == "diverged"
    assert {cause.tap for cause in found.causes} == {"layers.2.mlp.down"}


@pytest.mark.slow
def test_norms_that_were_not_ordered_along_are_a_cause(recordings: Recordings) -> None:
    found = diagnosed(recordings, "norms", lambda p: ordered(p, norms=False))
    assert found.event.verdict == "diverged"
    assert found.causes[0].tap == "layers.0.attn_norm"


def test_an_embedding_alone_is_a_cause(recordings: Recordings) -> None:
    found = diagnosed(
        recordings, "embedding", lambda p: p.weight(p.decoder.embed_tokens, lambda w: w[:, ORDER])
    )
    assert found.event.verdict == "diverged"
    assert found.causes[0].tap == "embed"


def test_columns_are_matched_whatever_their_order() -> None:
    draw = np.random.default_rng(0)
    right = draw.normal(size=(5, 40))
    right[:, 7] = right[:, 31] = 0.0  # which of two alike is which makes no difference
    order = draw.permutation(40)
    noise = np.full(right.shape, 1e-3)
    seen = right[:, order] + draw.uniform(-1e-3, 1e-3, right.shape)
    found = matched(seen, right, noise)
    assert found is not None
    assert sorted(found) == list(range(40))
    assert np.abs(seen[:, found] - right).max() <= 1e-3
    seen[0, 3] += 0.1
    assert matched(seen, right, noise) is None
