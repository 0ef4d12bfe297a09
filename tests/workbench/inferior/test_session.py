"""What a signal leaves of a recording that it meets while it is begun."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.sessions import Tap
from lockstep.sessions.format import log_owner
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.verify import verify
from lockstep.workbench.inferior import session


@pytest.mark.parametrize("at", ["renew", "number"])
def test_what_is_cut_short_while_it_is_made_is_a_whole_session_or_none(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its header asks for a log, which SQLite removes with the connection; and before it is in its place."""
    path = tmp_path / "kept.session"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "_WRITERS", {})
    monkeypatch.setattr(session, "taps_of", lambda specs: [Tap(0, "embed", "replicate")])
    monkeypatch.setattr(session, "session_meta", lambda inferior, known: SessionMeta())
    inferior: Any = SimpleNamespace(specs=(), config=SimpleNamespace(tp=1))
    with monkeypatch.context() as patched:
        patched.setattr(log_owner, at, interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.create_session(inferior, path)
    there = [path] if at == "renew" else []
    assert session.fold_recordings() == [(one, -1) for one in there]
    assert list(tmp_path.iterdir()) == there
    assert [verify(one) for one in there] == [[] for _ in there]
