"""The environment in which the tests start vLLM."""

from __future__ import annotations

import os

import pytest

from tests import vllm_cpu


@pytest.mark.parametrize(("cores", "words"), [({3}, "3|3"), ({0, 5}, "0|5"), ({1, 2, 4}, "1|2")])
def test_each_rank_has_a_core_however_few_there_are(
    cores: set[int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM ends at once where it is given fewer than it has ranks."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert vllm_cpu.binding(2) == words
