"""Folders, files and homes that cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.workbench.references import cache
from tests.workbench.cli.read_only import CASES, Case, carry_out


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.words[:60], marks=() if case.quick else pytest.mark.slow) for case in CASES],
)
def test_it_works_or_is_one_line(case: Case, tmp_path: Path) -> None:
    carry_out(case, tmp_path)


def test_a_cached_reference_of_somebody_else_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it was used cannot be noted."""
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_problem", lambda path: "")
    (tmp_path / "golden").mkdir()
    cached = tmp_path / "golden" / "key-content.session"
    cached.touch()

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refused)
    assert cache.find("key", pytest.fail) == cached
