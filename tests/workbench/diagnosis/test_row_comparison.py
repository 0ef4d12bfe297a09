"""Two recordings row by row: which operation differs by itself, and the figures held against torch and numpy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.sessions import SequenceStep, Session, SessionWriter, StepRecord, Tap, TensorRecord
from lockstep.sessions.meta import ROW_HASHES, ROW_STATISTICS, ConfigMeta, SessionMeta
from lockstep.workbench.cli.main import run
from lockstep.workbench.diagnosis.row_comparison import RowComparison, TapRows, compare_rows
from lockstep.workbench.diagnosis.row_sides import RowSide
from tests.workbench.diagnosis.synthetic import Case, Place, synthetic

pytestmark = pytest.mark.sampled_file(2)


def compared(a: Session, b: Session) -> RowComparison:
    return compare_rows(RowSide(a), RowSide(b))


def by_tap(found: RowComparison) -> dict[str, TapRows]:
    return {one.tap: one for one in found.taps}


def after(tap: str, factor: float = 1.001, row: int = 2, step: int = 0) -> dict[str, object]:
    """What is spoilt at one row of the prefill of sequence 0."""

    def spoil(x: np.ndarray, at: Place) -> np.ndarray:
        x = x.copy()
        if (at.step, at.seq) == (step, 0):
            x[row] *= factor
        return x

    return {tap: spoil}


def test_equal_recordings_are_equal_at_any_number_of_ranks(case: Case, tmp_path: Path) -> None:
    one = synthetic(tmp_path / "1.session", case.floor)
    two = synthetic(tmp_path / "2.session", case.floor, tp=2)
    found = compared(one, two)
    assert (found.rows, found.sequences) == (12 + 5 + 2 + 2, 2)
    assert found.differing == ()
    assert len(found.taps) == 3 * 17 + 3  # but the caches, and sums that were not recorded
    assert all(tap.equal_bits == 1.0 for tap in found.taps)


def test_the_operation_is_the_one_whose_inputs_are_equal(case: Case, tmp_path: Path) -> None:
    """Where an error has gone on, taps after it differ too and are not told to differ by themselves."""
    spoil = {**after("layers.1.mlp.act"), **after("layers.1.mlp.down"), **after("layers.1.mlp_residual")}
    one = synthetic(tmp_path / "1.session", case.floor)
    two = synthetic(tmp_path / "2.session", case.floor, tp=2, spoil=spoil)
    found = compared(one, two)
    assert found.first is not None
    assert (found.first.tap, found.first.own, found.first.first_own) == ("layers.1.mlp.act", 1, (0, 2))
    assert [tap.tap for tap in found.taps if tap.own] == ["layers.1.mlp.act"]
    assert {tap.tap for tap in found.differing} == set(spoil)


def test_a_later_row_inherits_what_an_earlier_one_has_written(case: Case, tmp_path: Path) -> None:
    """Attention reads the keys of earlier rows: a context that differs after one of them does not by itself."""
    spoil = {**after("layers.0.attn.k_rope", row=2), **after("layers.0.attn.context", row=5)}
    engine = synthetic(tmp_path / "a.session", case.floor, spoil=spoil)
    found = by_tap(compared(engine, case.floor))
    assert found["layers.0.attn.k_rope"].own == 1
    assert (found["layers.0.attn.context"].differing, found["layers.0.attn.context"].own) == (1, 0)
    alone = synthetic(tmp_path / "b.session", case.floor, spoil=after("layers.0.attn.context", row=5))
    assert by_tap(compared(alone, case.floor))["layers.0.attn.context"].own == 1


def test_rows_are_matched_by_position_whatever_the_passes(tmp_path: Path) -> None:
    """One run in a pass of five rows, the other in chunks of two, two and one; the second under another number."""
    x = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    whole = small(tmp_path / "whole.session", [(0, [7, 8, 9, 10, 11], 0, x)])
    chunks = [(3, [7, 8], 0, x[:2]), (3, [9, 10], 2, x[2:4]), (3, [11], 4, x[4:] * 2)]
    chunked = small(tmp_path / "chunks.session", chunks)
    found = compared(whole, chunked)
    (one,) = found.taps
    assert (found.rows, one.rows, one.differing, one.first) == (5, 5, 1, (0, 4))
    other = small(tmp_path / "other.session", [(0, [7, 8, 99, 10, 11], 0, x)])
    parted = compared(whole, other)
    assert (parted.rows, parted.parted) == (2, ((0, 2),))


def small(
    path: Path, passes: list[tuple[int, list[int], int, np.ndarray]], tap: str = "layers.0.gate_norm[out]"
) -> Session:
    meta = SessionMeta(config=ConfigMeta(dtype="float32"))
    with SessionWriter.create(path, taps=[Tap(0, tap, "replicate")], ranks=1, meta=meta) as writer:
        for step, (seq, ids, start, x) in enumerate(passes):
            reported = SequenceStep(seq, ids, range(start, start + len(ids)), kv_lens=[])
            record = TensorRecord(tap, 0, seq, x, str(x.dtype))
            writer.step(0, StepRecord(step, "prefill", [reported], 0.0, tensors=[record]))
    return Session.open(path)


def test_figures_are_those_of_numpy_and_torch(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    y = random.standard_normal((3, 50)).astype(np.float32)
    x = (y * (1 + 1e-3 * random.standard_normal(y.shape))).astype(np.float32)
    x[0] = y[0]
    a = small(tmp_path / "a.session", [(0, [1, 2, 3], 0, x)], "logits")
    b = small(tmp_path / "b.session", [(0, [1, 2, 3], 0, y)], "logits")
    (one,) = compared(a, b).taps
    assert (one.differing, one.rows, one.first) == (2, 3, (0, 1))
    assert one.equal_bits == pytest.approx((x == y).mean())
    wide, right = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
    assert one.pcc == pytest.approx(np.corrcoef(wide, right)[0, 1], abs=1e-12)
    assert one.nmse == pytest.approx(((wide - right) ** 2).sum() / (right**2).sum())
    p, q = (torch.tensor(side, dtype=torch.float64).log_softmax(-1) for side in (y, x))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert one.kl == pytest.approx(float(kl), abs=1e-12)
    assert one.metrics is not None
    large = np.abs(y) >= np.sqrt((right**2).mean())
    ulp = (np.abs(x - y) / np.spacing(np.abs(y)))[large].max()
    assert one.metrics.max_ulp == pytest.approx(ulp, rel=1e-6)


def test_bits_are_compared_in_the_coarser_type(tmp_path: Path) -> None:
    x = np.random.default_rng(2).standard_normal((2, 64)).astype(np.float32)
    low = (x.view(np.uint32) >> 16).astype(np.uint16)
    with Session.open(case_of(tmp_path / "bf16.session", low, "bfloat16")) as narrow:
        a = small(tmp_path / "a.session", [(0, [1, 2], 0, (low.astype(np.uint32) << 16).view(np.float32))])
        (one,) = compared(a, narrow).taps
        assert one.equal_bits == 1.0


def case_of(path: Path, x: np.ndarray, dtype: str) -> Path:
    meta = SessionMeta(config=ConfigMeta(dtype=dtype))
    tap = "layers.0.gate_norm[out]"
    with SessionWriter.create(path, taps=[Tap(0, tap, "replicate")], ranks=1, meta=meta) as writer:
        reported = SequenceStep(0, [1, 2], [0, 1], kv_lens=[])
        writer.step(0, StepRecord(0, "prefill", [reported], 0.0, tensors=[TensorRecord(tap, 0, 0, x, dtype)]))
    return path


def hashed(path: Path, codes: list[int], statistics: list[list[float]] | None = None) -> Session:
    """Rows of which there are hashes, or statistics alone."""
    names = ["embed", "embed" + ROW_HASHES, "embed" + ROW_STATISTICS]
    taps = [Tap(i, name, "replicate") for i, name in enumerate(names)]
    with SessionWriter.create(path, taps=taps, ranks=1, meta=SessionMeta()) as writer:
        reported = SequenceStep(0, [1, 2], [0, 1], kv_lens=[])
        held = (
            TensorRecord(names[1], 0, 0, np.array(codes, np.uint64).reshape(-1, 1), "uint64")
            if statistics is None
            else TensorRecord(names[2], 0, 0, np.array(statistics, np.float32), "float32")
        )
        writer.step(0, StepRecord(0, "prefill", [reported], 0.0, tensors=[held]))
    return Session.open(path)


def test_hashes_of_rows_stand_for_their_bits(tmp_path: Path) -> None:
    a, b = hashed(tmp_path / "a.session", [5, 6]), hashed(tmp_path / "b.session", [5, 7])
    (one,) = compared(a, b).taps
    assert (one.tap, one.kind, one.differing, one.first, one.metrics) == ("embed", "hashes", 1, (0, 1), None)


def test_equal_statistics_prove_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[float(i)] * 8 for i in range(2)]
    for name in ("a", "b"):
        hashed(tmp_path / f"{name}.session", [], rows).close()
    assert run(["diff", str(tmp_path / "a.session"), str(tmp_path / "b.session")]) == 6
    out = capsys.readouterr().out
    assert "equal by their statistics, which is no proof" in out
    assert "inconclusive: statistics only" in out


def test_the_command_reports_the_operation_first(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic(tmp_path / "a.session", case.floor, tp=2, spoil=after("layers.2.mlp_norm")).close()
    synthetic(tmp_path / "b.session", case.floor).close()
    a, b = str(tmp_path / "a.session"), str(tmp_path / "b.session")
    assert run(["diff", a, b, "--bitwise"]) == 1
    out = capsys.readouterr().out
    first, *_ = out.splitlines()
    assert "21 rows of 2 sequences read the same tokens" in first
    assert "layers.2.mlp_norm, in 1 of 21 rows, first at sequence 0, position 2" in first
    assert "PCC" in out
    assert run(["diff", b, b]) == 0
    assert "54 taps equal bit for bit" in capsys.readouterr().out


def test_taps_without_a_counterpart_are_reported(case: Case, tmp_path: Path) -> None:
    few = synthetic(tmp_path / "a.session", case.floor, skip=lambda tap: tap.endswith("attn.scores"))
    found = compared(few, case.floor)
    assert found.only_second == tuple(f"layers.{i}.attn.scores" for i in range(3))
    assert found.only_first == ()


def test_tokens_that_differ_from_the_first_on_are_no_comparison(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def others(one: SequenceStep) -> SequenceStep:
        return replace(one, ids=[token + 1 for token in one.ids])

    synthetic(tmp_path / "a.session", case.floor, change=others).close()
    synthetic(tmp_path / "b.session", case.floor).close()
    assert run(["diff", str(tmp_path / "a.session"), str(tmp_path / "b.session")]) == 2
    assert "different tokens from the first on" in capsys.readouterr().err
