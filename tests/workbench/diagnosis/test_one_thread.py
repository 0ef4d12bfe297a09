"""Judging on one thread: what others have set is there again, whatever happens."""

from __future__ import annotations

import pytest
from threadpoolctl import ThreadpoolController

from lockstep.workbench.diagnosis import verdict
from lockstep.workbench.diagnosis.one_thread import one_thread

OPENBLAS = ThreadpoolController().select(internal_api="openblas")


def threads() -> list[int]:
    return [one["num_threads"] for one in OPENBLAS.info()]


def test_inside_numpy_has_one_thread_and_afterwards_as_many_as_before() -> None:
    with OPENBLAS.limit(limits=2):
        before = threads()
        with one_thread():
            assert set(threads()) <= {1}  # none where numpy has another library
            with one_thread():
                assert set(threads()) <= {1}
            assert set(threads()) <= {1}
        assert threads() == before


def test_an_error_leaves_them_as_they_were() -> None:
    with OPENBLAS.limit(limits=2):
        before = threads()
        with pytest.raises(ValueError, match="wrong"), one_thread():
            raise ValueError("wrong")
        assert threads() == before


def test_a_judge_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def measured(sides: object) -> None:
        seen.append(threads())
        raise LookupError

    monkeypatch.setattr(verdict, "measure", measured)
    with OPENBLAS.limit(limits=2), pytest.raises(LookupError):
        verdict.judge(None)  # type: ignore[arg-type]
    assert [set(one) <= {1} for one in seen] == [True]
