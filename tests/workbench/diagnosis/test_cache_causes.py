"""Causes that the integers of the cache show come first where attention is wrong, and are notes where it is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from lockstep.sessions import Session
from lockstep.workbench.diagnosis.cache_causes import unknown_rows, with_cache_causes
from lockstep.workbench.diagnosis.findings import WrongOperation
from lockstep.workbench.judgements.cause import UNNAMED, Cause
from lockstep.workbench.judgements.golden_event import Divergence
from tests.workbench.foreign.test_cache import imported, run
from tests.workbench.views.provenance.paged import with_rows

CONTEXT = "layers.0.attn.context"
UNEXPLAINED = Cause(
    name="unknown", kind=UNNAMED, tap=CONTEXT, text="attention is off, and no known cause fits"
)
OTHER = Cause(name="theta", kind="rope", tap="layers.0.attn.q_rope", text="another theta")


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """In decode the keys and values of sequence 1 go one slot too far."""
    made = run(
        lambda one: (
            one if one.number == 0 else with_rows(one, lambda row: replace(row, slots=(row.slots[0] + 1,)))
        )
    )
    return imported(tmp_path_factory.mktemp("shifted"), made.passes)


def attention(steps: tuple[int, ...], seqs: tuple[int, ...]) -> WrongOperation:
    return WrongOperation(
        CONTEXT, "attention", 0, 5, (0,), 1e5, 1e5, 0.1, 0.1, steps, seqs, (), (), True, "", (), ()
    )  # fmt: skip


def test_a_wrong_slot_is_the_cause_where_attention_is_wrong(shifted: Session) -> None:
    causes, notes = with_cache_causes([OTHER, UNEXPLAINED], [attention((1, 2), (1,))], None, shifted)
    first, *rest = causes
    assert (first.name, first.kind, first.tap) == ("cache_misplaced", "cache", CONTEXT)
    assert first.place == "layers.0.attn.context, steps 1, 2, sequences 1"
    assert first.text == (
        "keys and values are written 1 slot too far: slot 18 instead of 17 (sequence 1, position 5, pass 1); "
        "slot 17, which attention reads, was never written"
    )
    assert UNEXPLAINED.text in first.evidence
    assert (rest, notes) == ([OTHER], ())


def test_where_the_run_leaves_the_reference_is_enough(shifted: Session) -> None:
    """Attention that was not judged on its own inputs, as of statistics."""
    causes, _ = with_cache_causes([], [], Divergence(CONTEXT, 0, step=1, seq=1), shifted)
    assert [one.name for one in causes] == ["cache_misplaced"]


def test_another_cause_of_attention_is_an_alternative(shifted: Session) -> None:
    mask = Cause(name="window", kind="mask", tap=CONTEXT, text="the window is wider")
    causes, _ = with_cache_causes([mask], [attention((1,), (1,))], None, shifted)
    assert [(one.name, one.alternative) for one in causes] == [("cache_misplaced", False), ("window", True)]


@pytest.mark.parametrize("wrong", [[], [attention((0,), (0,))]])
def test_what_shows_in_no_operation_accuses_nobody(shifted: Session, wrong: list[WrongOperation]) -> None:
    causes, notes = with_cache_causes([OTHER], wrong, None, shifted)
    assert causes == [OTHER]
    (note,) = notes
    assert note.startswith(
        "of the cache, without an effect on what was judged: keys and values are written 1 slot"
    )


def test_a_clean_cache_is_said_to_be_one(tmp_path: Path) -> None:
    with imported(tmp_path, run().passes) as session:
        causes, notes = with_cache_causes([UNEXPLAINED], [attention((1,), (1,))], None, session)
    assert causes == [UNEXPLAINED]
    assert notes == (
        "each row of the cache that was read is of the same tokens (13 rows written in 3 passes)",
    )


def test_rows_that_are_not_there_were_not_judged(tmp_path: Path) -> None:
    made = run()
    with imported(tmp_path, made.passes) as session:
        assert not list(unknown_rows(session))
        foreign = msgspec.structs.replace(session.meta.foreign, unknown=3)  # type: ignore[type-var]
        stranger = SimpleNamespace(meta=msgspec.structs.replace(session.meta, foreign=foreign))
        (one,) = unknown_rows(stranger)  # type: ignore[arg-type]
    assert one.reason == "3 rows of the prefix cache were computed for other tokens"
