"""The table of planted bugs of caches: that it is whole, and its rows on the paged engine, in this process."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.planted_caches import page
from tests.planted_caches.programs.plants import PLANTS
from tests.planted_caches.rows import HERE, CleanPairs, Results, level, plants
from tests.planted_caches.run import WORDS, looked_for, model_of, on_paged_along

PAGED = [one for one in plants().values() if one.engine == "paged"]
#: Those that are quick tests: what is behind a hit, and a token that no logits chose.
QUICK = ("parent_left_out", "last_token_read_twice")


def test_every_row_is_planted_by_the_function_of_its_name() -> None:
    assert {one.name for one in PAGED} == set(PLANTS)
    plugin = (HERE.parent / "workbench/attach/vllm_plugin/lockstep_planted_caches.py").read_text()
    assert all(f"def {one.name}(" in plugin for one in plants().values() if one.engine == "vllm")
    reported = tomllib.loads((HERE / "plants.toml").read_text())["plant"]
    assert len(reported) == len(plants()) >= 15


def test_the_page_is_of_the_results() -> None:
    assert page.PAGE.read_text() == page.text(Results.load())
    assert set(Results.load().rows) | set(Results.load().first_look) <= set(plants())


def test_no_right_engine_is_accused() -> None:
    found = CleanPairs.load().pairs
    assert {one.engine for one in found} >= {"ours", "paged", "transformers", "vllm"}
    assert len(found) >= 50
    assert {one.verdict for one in found} <= {"equal", "rounding"}


@pytest.mark.parametrize(
    "key",
    [pytest.param(one.key, marks=() if one.name in QUICK else pytest.mark.slow) for one in PAGED],
)
@pytest.mark.slow
def test_a_planted_bug_is_named(key: str, tmp_path: Path) -> None:
    plant = plants()[key]
    reported = looked_for(plant, model_of(plant, tmp_path))
    assert level(plant, reported) == "named", reported


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "windowed", "qwen3_next"])
def test_the_paged_engine_is_right(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bug it rounds at most, on every axis."""
    monkeypatch.setenv("PLANTED", "")
    axes = [axis for axis in WORDS if axis != "speculation" or family != "qwen3_next"]
    plant = next(one for one in PAGED if one.model == family)
    found = on_paged_along(axes, model_of(plant, tmp_path))
    assert {one.verdict for one in found.results} <= {"equal", "rounding"}, str(found)
