"""The search for variants goes on where one of its banks fails, and reports that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.engine.folders import state_directory
from lockstep.sessions import Session
from lockstep.workbench.diagnosis import banks
from lockstep.workbench.diagnosis.diagnose import diagnose
from lockstep.workbench.diagnosis.hypotheses.rowwise import row_edits
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.injection import reproduction
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.site import Site
from tests.workbench.diagnosis.synthetic import Case, synthetic

TAP = "final_norm"


@pytest.fixture
def twice(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A run of which the last norm has rows twice as large as they should be; failures are left to the net."""
    monkeypatch.delenv("LOCKSTEP_DEBUG")
    monkeypatch.setenv("LOCKSTEP_STATE_DIR", str(tmp_path / "state"))
    with synthetic(
        tmp_path / "run.session", case.floor, spoil=dict.fromkeys((TAP, "logits"), lambda x, at: x * 2)
    ) as run:
        yield run


def _use(monkeypatch: pytest.MonkeyPatch, *of_norms: banks.Bank) -> None:
    monkeypatch.setattr(banks, "BANKS", {**banks.BANKS, "norm": of_norms})


def broken(site: Site) -> Iterator[Variant]:
    raise KeyError(site.tap)


def test_what_other_banks_find_stands(twice: Session, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, broken, row_edits)
    found = diagnose(twice, Facts.of(case.model_dir, "float32"), golden=case.golden)
    assert [cause.place for cause in found.causes] == [TAP]
    assert "multiplied by 2" in found.causes[0].text
    assert found.untried == (TAP,)
    (note,) = (note for note in found.notes if "not all hypotheses were tried" in note)
    assert f"at {TAP}: broken: KeyError: '{TAP}' (a defect of lockstep" in note
    assert "in broken" in (state_directory() / "errors.log").read_text()


def test_an_operation_of_which_all_banks_fail_is_still_reported(
    twice: Session, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("BANKS", "LAST", "PAIRS", "UNKNOWN"):
        monkeypatch.setattr(banks, kind, {**getattr(banks, kind), "norm": (broken,)})
    monkeypatch.setattr(banks, "EVERYWHERE", ())
    found = diagnose(twice, Facts.of(case.model_dir, "float32"), golden=case.golden)
    (cause,) = found.causes
    assert (cause.name, cause.place) == ("unnamed", TAP)


def test_with_debug_it_is_raised(twice: Session, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_DEBUG", "1")
    _use(monkeypatch, broken)
    with pytest.raises(KeyError):
        diagnose(twice, Facts.of(case.model_dir, "float32"), golden=case.golden)


def test_causes_stand_where_their_proof_fails(
    twice: Session, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such axis")

    monkeypatch.setattr(reproduction, "_compared", fails)
    found = diagnose(twice, Facts.of(case.model_dir, "float32"), golden=case.golden, reproducing=True)
    assert [cause.place for cause in found.causes] == [TAP]
    proof = found.causes[0].reproduction
    assert proof is not None
    assert proof.outcome == "not tried"
    assert proof.why.startswith("RuntimeError: no such axis (a defect of lockstep")
