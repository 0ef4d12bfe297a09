"""A fresh run against a baseline: what differs, what is no more than rounding, and what cannot be stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from lockstep.sessions import Session
from lockstep.sessions.records import SequenceStep
from lockstep.workbench.checking.regression import Regression, regression
from lockstep.workbench.export.regression import junit_of, sarif_of
from tests.workbench.diagnosis.synthetic import Case, Place, synthetic, tiny_case
from tests.workbench.export.sarif_schema import valid_sarif

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return tiny_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def baseline(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Session:
    return synthetic(tmp_path_factory.mktemp("baseline") / "good.session", case.floor)


def scaled(by: float) -> Any:
    def spoil(x: np.ndarray, at: Place) -> np.ndarray:
        return x * by

    return spoil


def fresh(case: Case, path: Path, spoil: dict[str, Any], **options: Any) -> Session:
    return synthetic(path / "new.session", case.floor, spoil=spoil, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("by", "bitwise", "verdict"),
    [
        (1.0, True, "match"),
        (1 + 1e-6, True, "diverged"),
        (1 + 1e-6, False, "match"),
        (1 + 1e-3, False, "diverged"),
    ],
)
def test_rounding_counts_only_bit_by_bit(
    by: float, bitwise: bool, verdict: str, case: Case, baseline: Session, tmp_path: Path
) -> None:
    with fresh(case, tmp_path, {"layers.1.mlp.up": scaled(by)}, tp=2) as run:
        found = regression(run, baseline, bitwise=bitwise)
    assert found.verdict == verdict
    culprits = [one.tap for one in found.culprits]
    assert culprits == ([] if verdict == "match" else ["layers.1.mlp.up"])


def test_what_is_not_computed_again_is_not_called_right(
    case: Case, baseline: Session, tmp_path: Path
) -> None:
    def shorter(one: SequenceStep) -> SequenceStep:
        return SequenceStep(one.seq, [3], [200], kv_lens=[]) if one.positions[0] else one

    with fresh(case, tmp_path, {}, change=shorter) as run:
        found = regression(run, baseline)
    assert found.verdict == "inconclusive"
    assert "only 17 of the baseline's 21 rows were computed again" in found.why


def test_other_tokens_are_no_comparison(case: Case, baseline: Session, tmp_path: Path) -> None:
    def others(one: SequenceStep) -> SequenceStep:
        return SequenceStep(one.seq, [token + 1 for token in one.ids], one.positions, kv_lens=[])

    with fresh(case, tmp_path, {}, change=others) as run:
        found = regression(run, baseline)
    assert (found.verdict, found.comparison.rows) == ("inconclusive", 0)
    assert "no sequence reads the tokens of the baseline" in found.why


def test_another_embedding_is_not_judged(case: Case, baseline: Session, tmp_path: Path) -> None:
    """Rows are not proved to be the same then."""
    with fresh(case, tmp_path, {"embed": lambda x, at: x[::-1]}) as run:
        found = regression(run, baseline)
    assert found.verdict == "inconclusive"
    assert "have the embedding of their token" in found.why


@pytest.fixture
def diverged(case: Case, baseline: Session, tmp_path: Path) -> Regression:
    with fresh(case, tmp_path, {"layers.1.mlp.up": scaled(2.0), "layers.1.mlp.act": scaled(3.0)}) as run:
        return regression(run, baseline)


def test_junit_fails_where_an_operation_differs_by_itself(diverged: Regression) -> None:
    root = ElementTree.fromstring(junit_of(diverged).split("?>", 1)[1])
    failed = {case.get("name") for case in root.iter("testcase") if case.find("failure") is not None}
    assert failed == {"computes what the baseline does", "layers.1.mlp.up"}
    (shown,) = (
        case.find("failure") for case in root.iter("testcase") if case.get("name") == "layers.1.mlp.up"
    )
    assert shown is not None
    assert "its inputs are equal and its output is not in 21 of 21 rows" in str(shown.get("message"))


def test_sarif_is_valid_and_names_the_operation(diverged: Regression) -> None:
    document = valid_sarif(sarif_of(diverged, "new run.session"))
    (result,) = document["runs"][0]["results"]
    (location,) = result["locations"]
    assert location["logicalLocations"][0]["fullyQualifiedName"] == "layers.1.mlp.up"
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "new%20run.session"
    assert result["properties"]["byItself"] == 21


def test_sarif_of_a_run_without_a_verdict_reports_it(case: Case, baseline: Session, tmp_path: Path) -> None:
    with fresh(case, tmp_path, {"embed": lambda x, at: x[::-1]}) as run:
        document = valid_sarif(sarif_of(regression(run, baseline), "a.session"))
    (one,) = document["runs"]
    assert (one["results"], one["invocations"][0]["executionSuccessful"]) == ([], False)
