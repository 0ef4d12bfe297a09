"""A regression for CI: JUnit and SARIF."""

from __future__ import annotations

from lockstep.engine.taps.names import layer_of
from lockstep.workbench.checking.regression import Regression
from lockstep.workbench.debugger.commands.row_diff import in_words
from lockstep.workbench.diagnosis.row_comparison import TapRows
from lockstep.workbench.export.junit import JUnitCase, junit
from lockstep.workbench.export.junit import Result as JUnitResult
from lockstep.workbench.export.sarif import SarifResult, sarif
from lockstep.workbench.inferior.identity import versions


def junit_of(regression: Regression) -> str:
    """A test for the verdict, then one a tap: those fail that differ by themselves."""
    failed = {one.tap for one in regression.culprits}
    words = regression.why or in_words(regression.comparison)
    verdict: dict[str, JUnitResult] = {"match": "pass", "diverged": "fail", "inconclusive": "absent"}
    cases = [
        JUnitCase(
            "regress",
            "verdict",
            "computes what the baseline does",
            verdict[regression.verdict],
            words,
            regression.coverage.in_words(),
        )
    ]
    for one in regression.comparison.taps:
        result: JUnitResult = "fail" if one.tap in failed else "suspect" if one.differing else "pass"
        layer = layer_of(one.tap)
        group = "outside the layers" if layer is None else f"layer {layer}"
        cases.append(JUnitCase("taps", group, one.tap, result, sentence(one) if one.differing else ""))
    gone = [*regression.comparison.only_second, *(tap for tap, _ in regression.comparison.different)]
    cases += [
        JUnitCase("taps not compared", "absent", tap, "absent", "not in both recordings") for tap in gone
    ]
    return junit("lockstep regress", cases)


def sarif_of(regression: Regression, file: str) -> str:
    """A result for each operation that differs by itself."""
    results = [
        SarifResult(one.tap, file, sentence(one), "error", _figures(one))
        for one in (regression.culprits if regression.verdict == "diverged" else ())
    ]
    notes = [regression.coverage.in_words(), *([regression.why] if regression.why else [])]
    version = versions().get("lockstep", "")
    return sarif(results, version=version, notes=notes, well=regression.verdict != "inconclusive")


def sentence(one: TapRows) -> str:
    """What is wrong with one tap."""
    inputs = (
        "its inputs are equal and its output is not" if one.own else "it differs, as something before it does"
    )
    rows = f"in {one.own or one.differing} of {one.rows} rows"
    first = one.first_own or one.first
    where = "" if first is None else f", first at sequence {first[0]}, position {first[1]}"
    by = (
        ""
        if one.metrics is None
        else f"; relative L2 {one.metrics.rel_l2:.3g}, largest {one.metrics.max_abs:.3g}"
    )
    return f"{one.tap}: {inputs} {rows}{where}{by}"


def _figures(one: TapRows) -> dict[str, float | int | str]:
    """Those that are numbers: JSON has neither NaN nor infinity."""
    known: dict[str, float | int | str | None] = {
        "rows": one.rows,
        "differing": one.differing,
        "byItself": one.own,
        "equalBits": one.equal_bits,
        "maxAbs": None if one.metrics is None else one.metrics.max_abs,
        "relativeL2": None if one.metrics is None else one.metrics.rel_l2,
        "maxUlp": None if one.metrics is None else one.metrics.max_ulp,
        "pcc": one.pcc,
        "kl": one.kl,
    }
    return {name: value for name, value in known.items() if value is not None and _finite(value)}


def _finite(value: float | int | str) -> bool:
    return isinstance(value, str) or abs(value) < float("inf")
