"""What a session states of itself: how it was captured."""

from __future__ import annotations

from pathlib import Path

from lockstep.sessions import Session, Tap
from lockstep.sessions.meta import CaptureMeta
from lockstep.workbench.views.identity import identify
from lockstep.workbench.views.trail import follow
from tests.sessions.samples import create

PROBS, CHOSEN = "layers.*.attn.probs", "layers.*.attn.*_chosen"


def capture_of(path: Path, *names: str) -> str:
    """What is shown of the usual capture of a model with these taps."""
    taps = tuple(Tap(i, name, "replicate") for i, name in enumerate(names))
    create(path, taps, ranks=1, capture=CaptureMeta(last=(PROBS, CHOSEN))).close()
    with Session.open(path) as session:
        return dict(identify(session, follow(session, [0]), ()).facts)["capture"]


def test_the_capture_names_only_taps_that_the_model_has(tmp_path: Path) -> None:
    plain = capture_of(tmp_path / "a.session", "embed", "layers.0.attn.probs", "logits")
    assert plain == f"statistics · last {PROBS}"
    indexed = capture_of(tmp_path / "b.session", "layers.0.attn.probs", "layers.0.attn.index_chosen")
    assert indexed == f"statistics · last {PROBS} {CHOSEN}"
    assert capture_of(tmp_path / "c.session", "embed") == "statistics"
