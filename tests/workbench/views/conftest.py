"""Views stop reading when their time is over, and go on at the next call: on a busy machine that may be anywhere."""

from __future__ import annotations

import pytest

from lockstep.workbench.views import candidate_history, sentinel_watch, token_line


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views read to the end in one call."""
    for module in (candidate_history, sentinel_watch, token_line):
        monkeypatch.setattr(module, "_BUDGET", 600.0)
