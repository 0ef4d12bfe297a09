"""The verdict on a foreign run: what it rests on, and that it is refused where that does not carry it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import load_file

from lockstep.sessions import Session, SessionWriter
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.checking.recorded_run import diagnose_recording
from lockstep.workbench.export.check_text import verdict
from lockstep.workbench.foreign.session import write_session
from lockstep.workbench.judgements.coverage import coverage
from lockstep.workbench.judgements.golden_event import plain
from tests.workbench.diagnosis.synthetic import Case, tiny_case
from tests.workbench.foreign.packed import PackedRun, Rows, packed

pytestmark = pytest.mark.sampled_file(2)

Q = "layers.0.attn.q_proj"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return tiny_case(tmp_path_factory.mktemp("verdict"), num_hidden_layers=1)


@pytest.fixture
def run(case: Case) -> PackedRun:
    rows = Rows.of(case.floor)
    return packed(rows, rows.decoding(), tp=2)


def edited(
    run: PackedRun, tap: str, edit: Callable[[Any], Any], ranks: tuple[int, ...] = (0, 1)
) -> PackedRun:
    for rank in ranks:
        run.by_rank[rank] = [
            replace(
                one, tensors=[replace(x, array=edit(x.array)) if x.tap == tap else x for x in one.tensors]
            )
            for one in run.by_rank[rank]
        ]
    return run


def judged(run: PackedRun, case: Case, path: Path) -> CheckResult:
    write_session(run, path, form="test")
    with Session.open(path) as session:
        return diagnose_recording(
            session, case.model_dir, golden=case.golden.path, floor=case.floor.path, record=False
        )


def test_a_faultless_run_matches_and_reports_what_that_rests_on(
    run: PackedRun, case: Case, tmp_path: Path
) -> None:
    found = judged(run, case, tmp_path / "a.session")
    assert found.event.verdict == "match"
    rests = found.event.coverage
    assert rests is not None
    # No partial sums, and what a fused attention has not.
    assert rests.in_words() == "aligned 21/21 rows · 15 of 21 taps × 1 layer · 2/2 ranks · recorded eager"
    assert rests.absent == (
        "attn.k_cache", "attn.v_cache", "attn.scores", "attn.probs", "attn.o_proj.partial", "mlp.down.partial"
    )  # fmt: skip
    assert plain(found.event)["coverage"]["aligned"] == 21


def test_a_match_reports_the_rows_that_are_not_in_the_recording(case: Case, tmp_path: Path) -> None:
    rows = Rows.of(case.floor)
    passes = rows.decoding()
    found = judged(packed(rows, [[*passes[0], None, None], *passes[1:]]), case, tmp_path / "a.session")
    assert found.event.verdict == "match"
    assert "not compared, as it is not in the recording: dropped 2 padding" in " ".join(found.event.notes)


def test_a_match_reports_what_a_step_had_no_room_for(run: PackedRun, case: Case, tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    write_session(run, path, form="test")
    with SessionWriter.reopen(path) as writer:
        writer.tensors(0, 1, [], dropped=["layers.0.attn.probs of sequence 0 left out (9 bytes)"])
    with Session.open(path) as session:
        found = diagnose_recording(session, case.model_dir, golden=case.golden.path, floor=case.floor.path)
    assert found.event.verdict == "match"
    assert "step 1: layers.0.attn.probs of sequence 0 left out" in " ".join(found.event.notes)


def test_an_operation_that_is_wrong_is_named(run: PackedRun, case: Case, tmp_path: Path) -> None:
    found = judged(edited(run, "logits", lambda x: x[:, ::-1].copy()), case, tmp_path / "a.session")
    assert found.event.verdict == "diverged"
    assert found.event.first_divergence is not None
    assert found.event.first_divergence.tap == "logits"
    assert found.event.coverage is not None
    assert found.event.coverage.aligned == 21


@pytest.mark.parametrize(
    ("edit", "printed"),
    [
        (lambda x: np.roll(x, 1, axis=0), "embedding of another token, so rows are misplaced"),
        (lambda x: x + np.float32(1), "no token's"),
    ],
)
def test_rows_that_are_not_proved_the_same_get_no_verdict(
    run: PackedRun, case: Case, tmp_path: Path, edit: Callable[[Any], Any], printed: str
) -> None:
    run = edited(edited(run, "embed", edit), Q, lambda x: 2 * x)  # a difference, reported otherwise
    found = judged(run, case, tmp_path / "a.session")
    assert found.event.verdict == "inconclusive"
    assert found.event.first_divergence is None
    assert not found.event.causes
    assert plain(found.event)["tokens_identical"] is None
    assert plain(found.event)["max_abs_logits"] is None
    assert found.event.coverage is not None
    assert printed in found.event.coverage.misplaced


def test_an_embedding_that_is_scaled_is_reported(run: PackedRun, case: Case, tmp_path: Path) -> None:
    write_session(edited(run, "embed", lambda x: x * np.float32(8)), tmp_path / "a.session", form="test")
    with Session.open(tmp_path / "a.session") as session:
        rests = coverage(session, case.golden)
    assert rests.in_words().startswith("aligned 21/21 rows (embedding times 8) · ")
    assert not rests.misplaced


def test_an_embedding_is_the_token_s_within_the_rounding_of_a_factor(
    run: PackedRun, case: Case, tmp_path: Path
) -> None:
    """A model that multiplies its embedding by the root of its width rounds that root and the product."""
    edited(run, "embed", lambda x: np.nextafter(x, np.float32(np.inf)))
    write_session(run, tmp_path / "a.session", form="test")
    with Session.open(tmp_path / "a.session") as session:
        assert coverage(session, case.golden).in_words().startswith("aligned 21/21 rows · ")


def test_without_an_embedding_nothing_is_proved(run: PackedRun, case: Case, tmp_path: Path) -> None:
    for rank, passes in run.by_rank.items():
        run.by_rank[rank] = [
            replace(one, tensors=[x for x in one.tensors if x.tap != "embed"]) for one in passes
        ]
    found = judged(run, case, tmp_path / "a.session")
    assert found.event.verdict == "inconclusive"
    assert found.event.coverage is not None
    assert "`embed` is not in both recordings" in found.event.coverage.misplaced
    with Session.open(tmp_path / "a.session") as session:
        alone = diagnose_recording(session, case.model_dir, record=False)
    assert alone.event.verdict == "inconclusive"
    assert "nothing proves whose rows these are" in " ".join(alone.event.notes)


def test_a_rank_that_is_missing_leaves_nothing_green(run: PackedRun, case: Case, tmp_path: Path) -> None:
    del run.by_rank[1]
    found = judged(run, case, tmp_path / "a.session")
    assert found.event.verdict == "inconclusive"
    assert found.event.coverage is not None
    assert found.event.coverage.lacking == "rank 1 left no pass"
    assert " · 1/2 ranks · " in found.event.coverage.in_words()


def test_what_the_other_ranks_show_to_be_wrong_is_wrong(run: PackedRun, case: Case, tmp_path: Path) -> None:
    del run.by_rank[1]
    found = judged(edited(run, "layers.0.mlp_norm", lambda x: 2 * x, (0,)), case, tmp_path / "a.session")
    assert found.event.verdict == "diverged"
    assert found.event.first_divergence is not None
    assert found.event.first_divergence.tap == "layers.0.mlp_norm"


def test_statistics_alone_are_never_green(run: PackedRun, case: Case, tmp_path: Path) -> None:
    def measured(x: Any) -> Any:
        flat = x.array.reshape(len(x.array), -1)
        rows = [flat.min(1), flat.max(1), flat.mean(1), np.sqrt((flat**2).mean(1)), np.abs(flat).max(1)]
        return np.stack([*rows, *3 * [0 * flat.min(1)]], 1).astype(np.float32)

    for rank, passes in run.by_rank.items():
        run.by_rank[rank] = [
            replace(one, tensors=[replace(x, array=None, statistics=measured(x)) for x in one.tensors])
            for one in passes
        ]
    found = judged(run, case, tmp_path / "a.session")
    assert found.event.verdict == "inconclusive"
    assert found.event.coverage is not None
    assert found.event.coverage.in_words().endswith("recorded eager · statistics only")
    assert found.event.coverage.aligned == 21  # by the extremes of each row


def test_logits_on_one_rank_alone_are_judged(run: PackedRun, case: Case, tmp_path: Path) -> None:
    run.by_rank[1] = [
        replace(one, tensors=[x for x in one.tensors if x.tap != "logits"]) for one in run.by_rank[1]
    ]
    found = judged(run, case, tmp_path / "a.session")
    assert found.event.verdict == "match"
    assert {one.verdict for one in found.judgement.taps if one.tap == "logits"} == {"pass"}
    assert found.event.tokens_identical is True


@pytest.mark.parametrize(
    ("steps", "printed"),
    [(1, "tokens      not compared"), (2, "tokens      the same where they could be compared")],
)
def test_tokens_that_were_not_compared_are_not_reported_as_identical(
    run: PackedRun, case: Case, tmp_path: Path, steps: int, printed: str
) -> None:
    """Of all steps, and of all but the first: what chose the tokens of the others is not known."""
    for rank, passes in run.by_rank.items():
        run.by_rank[rank] = [
            replace(one, tensors=[x for x in one.tensors if x.tap != "logits"])
            if number >= steps - 1
            else one
            for number, one in enumerate(passes)
        ]
    found = judged(run, case, tmp_path / "a.session")
    assert plain(found.event)["tokens_identical"] is None
    console = Console(file=StringIO())
    verdict(found.event, found.judgement.taps, console)
    assert printed in console.file.getvalue()
    assert "identical" not in console.file.getvalue()
    with Session.open(tmp_path / "a.session") as session:
        alone = diagnose_recording(session, case.model_dir, record=False)
    assert plain(alone.event)["tokens_identical"] is None


def test_norms_that_write_into_the_stream_are_one_cause(run: PackedRun, case: Case, tmp_path: Path) -> None:
    """As in nano-vllm in float32: what the norms read is, as recorded, their own output."""
    readers = {"layers.0.attn_residual": "layers.0.mlp_norm", "layers.0.mlp_residual": "final_norm"}
    for rank, passes in run.by_rank.items():
        for number, one in enumerate(passes):
            held = {x.tap: x.array for x in one.tensors}
            run.by_rank[rank][number] = replace(
                one, tensors=[replace(x, array=held[readers.get(x.tap, x.tap)]) for x in one.tensors]
            )
    found = judged(run, case, tmp_path / "a.session")
    (cause,) = found.event.causes
    assert cause.in_words() == (
        "layers.0.{attn,mlp}_residual: the output of the norm that reads the sum goes on in place of the sum"
    )
    assert [one.split(":")[0] for one in cause.follows] == ["layers.0.mlp_norm, final_norm"]


@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
def test_logits_of_ranks_that_differ_are_right_by_what_each_rank_held(
    run: PackedRun, case: Case, tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    """Each rank gives its part of the vocabulary, which is then gathered, by all or by one: what is wrong on one rank
    is one cause."""
    weights = load_file(case.model_dir / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).double().numpy()
    cut = len(head) // 2 + 3  # padded, as by vLLM
    run = edited(run, "final_norm", lambda x: 2 * x, (1,))
    for number, (first, second) in enumerate(zip(run.by_rank[0], run.by_rank[1], strict=True)):
        held = {x.tap: x for x in second.tensors}
        hidden = [
            {x.tap: x.array for x in one.tensors}["final_norm"].astype(np.float64) for one in (first, second)
        ]
        rows = held["logits"].rows
        hidden = [x if rows is None else x[list(rows)] for x in hidden]
        given = np.concatenate([hidden[0] @ head[:cut].T, hidden[1] @ head[cut:].T], 1).astype(np.float32)
        for rank, one in enumerate((first, second)):
            logits = [replace(held["logits"], layout="replicate", array=given)] if rank in ranks else []
            run.by_rank[rank][number] = replace(
                one, tensors=[*(x for x in one.tensors if x.tap != "logits"), *logits]
            )
    (cause,) = judged(run, case, tmp_path / "a.session").event.causes
    assert (cause.tap, cause.ranks) == ("final_norm", (1,))
