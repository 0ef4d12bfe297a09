"""The split view: what stands on it of two branches, in each part, at each size, and what cannot be compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from textual.pilot import Pilot

from lockstep.sessions import SequenceStep, SessionWriter, StepRecord, Tap, TensorRecord
from lockstep.sessions.meta import SessionMeta
from lockstep.workbench.tui.screens.side_chooser import SideChooser
from lockstep.workbench.tui.screens.split import SplitScreen
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.tui.split.maps import SideMaps
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.views.sides import GOLDEN
from tests.workbench.tui.conftest import Bench, enter, press, text_of
from tests.workbench.tui.synthetic import build

pytestmark = pytest.mark.sampled_file(2)

RECORDED = Path(__file__).parents[3] / "sessions" / "recorded"


def _row(pilot: Pilot[int], word: str) -> str:
    return next((line for line in text_of(pilot) if word in line), "")


def _screen(pilot: Pilot[int]) -> SplitScreen:
    assert isinstance(pilot.app.screen, SplitScreen)
    return pilot.app.screen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_tokens_under_each_other_and_the_first_row_that_differs(
    bench: Bench, size: tuple[int, int]
) -> None:
    async with bench(size, RECORDED / "load_bias-false.session") as pilot:
        await enter(pilot, "colon", "goto 0")
        await press(pilot, "vertical_line")
        shown = text_of(pilot)
        assert shown[1].startswith(" main ")
        assert "│dawn│" in shown[1]
        assert shown[2].startswith(" load_bias=true ")
        assert "│soft│" in shown[2]
        assert shown[3].index("▲") == shown[1].index("dawn"), (
            "the arrow stands under the first different token"
        )
        assert "step 0: first difference, “dawn” and “soft”" in shown[3]
        assert "85 of 87 operations differ beyond rounding, the first: layers.0.attn.q_proj" in "\n".join(
            shown
        )
        assert _row(pilot, "rounding: 3 × the noise floor golden measured")
        first = next(line for line in shown if line.startswith("●"))
        assert "layers.0.attn.q_proj" in first
        assert "≠ layers.0.attn.k_proj" in shown[shown.index(first) + 1]
        # What is equal stands below all that differs.
        await press(pilot, "end")
        assert _row(pilot, "= layers.0.attn_norm")


async def test_one_key_moves_both_and_reports_where_nothing_can_be_compared(bench: Bench) -> None:
    async with bench((100, 30), RECORDED / "load_bias-false.session") as pilot:
        await enter(pilot, "colon", "goto 0")
        await press(pilot, "vertical_line", "n")
        assert "step 1" in text_of(pilot)[0]
        assert _row(pilot, "different tokens went in from step 1 on: step 0 is the last to compare")
        assert not _row(pilot, "●"), "nothing is accused"
        await press(pilot, "right_square_bracket")
        assert _row(pilot, "load_bias=true ends at step 1")
        await press(pilot, "3")
        assert _row(pilot, "load_bias=true ends at step 1")
        await press(pilot, "o")
        assert "step 0" in text_of(pilot)[0]
        await press(pilot, "N")
        assert _row(pilot, "main has no step -1")
        await press(pilot, "n", "escape")
        assert isinstance(pilot.app.screen, WorkbenchScreen)
        assert pilot.app.screen.where.step == 1, "back at the step that was looked at"


async def test_layers_and_operations_are_stepped_on_both_sides(bench: Bench) -> None:
    async with bench((120, 40), RECORDED / "load_bias-false.session") as pilot:
        await enter(pilot, "colon", "goto 0")
        await press(pilot, "vertical_line")
        screen = _screen(pilot)
        taps = screen.overview.taps
        assert taps[screen.where.tap] == "layers.0.attn.q_proj"
        await press(pilot, "i")
        assert _row(pilot, " at layers.0.attn.k_proj")
        assert taps[screen.operations.chosen.tap] == "layers.0.attn.k_proj", "the row goes with it"
        await press(pilot, "4")
        assert _row(pilot, "no tensor of it in main nor in")
        await press(pilot, "s")
        assert _row(pilot, "layers.1.attn_norm"), "in every part"
        await press(pilot, "S", "I")
        assert _row(pilot, " at embed")
        await press(pilot, "I")
        assert _row(pilot, "no operation before this one in step 0")
        assert screen.where.step == 0
        await press(pilot, "b")
        assert _row(pilot, "b does nothing here: ? shows the keys")


async def test_logits_side_by_side(bench: Bench) -> None:
    async with bench((120, 44), RECORDED / "load_bias-false.session") as pilot:
        await enter(pilot, "colon", "goto 0")
        await press(pilot, "5", "vertical_line")
        assert _screen(pilot).active == 3, "the split view of the pane in front"
        assert _row(pilot, "D(main‖load_bias=true) ≥ 7.4").endswith("9 candidates on both sides")
        assert "↑ 5" in _row(pilot, " soft ")
        assert _row(pilot, "dawn  ").startswith("▸ ")
        assert _row(pilot, " cat ").split()[1:3] == ["-", "3"], "a candidate of theirs alone"
        table = _screen(pilot).front.table()
        assert table is not None
        assert len(table.rows) == 31


async def test_attention_of_both_and_the_difference(bench: Bench) -> None:
    async with bench((120, 40), RECORDED / "load_bias-false.session") as pilot:
        await enter(pilot, "colon", "goto 0")
        await press(pilot, "vertical_line", "2")
        titles = _row(pilot, "max Δ")
        assert [title in titles for title in ("main ", "load_bias=true ", "main − load_bias=true")] == [
            True
        ] * 3
        await press(pilot, "down")
        assert "load_bias=true " in _row(pilot, "   difference ")
        maps = pilot.app.screen.query_one("#attention-maps", SideMaps)
        matrices = [column.query_one("Heatmap").matrix for column in maps.columns]  # type: ignore[attr-defined]
        assert [one.scale for one in matrices] == ["magnitude", "magnitude", "difference"]
        ours, theirs, difference = (one.values for one in matrices)
        assert ours.shape == (20, 20), "the whole prefill"
        assert np.isneginf(difference[0]).tolist() == [False, *[True] * 19], "what both hide"
        np.testing.assert_allclose(difference[-1], ours[-1].astype(np.float64) - theirs[-1], atol=1e-7)
        assert np.abs(difference[-1]).max() > 0.01
        assert matrices[0].top == matrices[1].top, "one scale for both sides"
        await press(pilot, "v")
        assert _row(pilot, "no tensor of it in main nor in load_bias=true") or _row(pilot, "not captured")


async def test_where_it_is_narrow_one_map_stands_alone_and_a_key_switches(bench: Bench) -> None:
    async with bench((80, 24), RECORDED / "load_bias-false.session") as pilot:
        await enter(pilot, "colon", "goto 0")
        await press(pilot, "2", "vertical_line")
        maps = pilot.app.screen.query_one("#attention-maps", SideMaps)
        seen = []
        for _ in range(3):
            seen.append([column.display for column in maps.columns])
            await press(pilot, "d")
        assert seen == [[False, False, True], [True, False, False], [False, True, False]]
        await press(pilot, "z")
        assert [column.display for column in maps.columns] == [True] * 3


async def test_a_tensor_that_is_not_there_reports_on_which_side_and_how_to_have_it(bench: Bench) -> None:
    async with bench((120, 40), RECORDED / "load_bias-false.session") as pilot:
        await enter(pilot, "colon", "goto 0")
        await press(pilot, "vertical_line", "enter")
        assert _screen(pilot).active == 4
        assert _row(pilot, "no tensor of it in main nor in")
        assert _row(pilot, "record the run with --capture")
        await press(pilot, "a")
        assert _row(pilot, "was not captured"), "a replay states why it cannot"


async def test_nan_on_one_side(bench: Bench) -> None:
    async with bench((120, 40), RECORDED / "mask-additive.session") as pilot:
        await enter(pilot, "colon", "goto 0")
        await press(pilot, "vertical_line")
        assert next(line for line in text_of(pilot) if line.startswith("●")).split()[1:4] == [
            "layers.0.attn.scores", "nan", "r0",
        ]  # fmt: skip
        await press(pilot, "3")
        assert _row(pilot, "NaN: the logits of a side are NaN")
        await press(pilot, "2")
        assert any("×" in line for line in text_of(pilot)), "NaN is drawn"


def _masks(path: Path) -> Path:
    """Two branches with the scores of one head; the mask of the second hides nothing."""
    taps = [Tap(0, "layers.0.attn.scores", "shard(0)"), Tap(1, "logits", "replicate")]
    scores = np.arange(9, dtype=np.float32).reshape(1, 3, 3)
    causal = np.where(np.tril(np.ones((3, 3), bool)), scores, -np.inf).astype(np.float32)
    with SessionWriter.create(path, taps=taps, ranks=1, meta=SessionMeta()) as writer:
        for name, held in (("main", causal), ("mask=none", scores + 0.5)):
            branch = 0 if name == "main" else writer.branch(name, parent=0, fork_step=0)
            reported = SequenceStep(0, [1, 2, 3], [0, 1, 2], [[3]], block_table=[0], emitted=5)
            found = [TensorRecord("layers.0.attn.scores", 0, 0, held, "float32")]
            sums = np.array([[1 + branch], [1]], np.uint64)
            writer.step(
                branch, StepRecord(0, "prefill", [reported], 0.1, np.ones((2, 1, 8), np.float32), sums, found)
            )
    return path


async def test_scores_that_one_side_alone_masks(bench: Bench, tmp_path: Path) -> None:
    async with bench((120, 40), _masks(tmp_path / "masks.session")) as pilot:
        await press(pilot, "vertical_line", "2", "v")
        assert _row(pilot, "∞ main alone hides 3 of 9 scores")
        assert any(line.split()[:2] == ["0", "∞"] for line in text_of(pilot)), "the head's largest difference"
        maps = pilot.app.screen.query_one("#attention-maps", SideMaps)
        matrices = [column.query_one(Heatmap).matrix for column in maps.columns]
        assert [one and one.scale for one in matrices] == ["difference"] * 3, "scores have a sign"
        await press(pilot, "tab", "down", "right")
        under = _row(pilot, "difference ")
        assert "main 4.000   mask=none 4.500   difference -0.5000" in under
        await press(pilot, "right")
        assert "main hidden by the mask   mask=none 5.500   difference hidden by main alone" in _row(
            pilot, "difference "
        )
        assert any("∞∞" in line for line in text_of(pilot)), "drawn on the difference"
        # The tensor of the same operation shows the same.
        await press(pilot, "4")
        assert _row(pilot, "∞ main alone hides 3 of 9 scores")


async def test_with_several_branches_it_asks_and_the_strip_s_other_goes_first(
    bench: Bench, tmp_path: Path
) -> None:
    path = build(tmp_path / "three.session")
    with SessionWriter.reopen(path) as writer:
        writer.branch("third", parent=0, fork_step=2, rules={"mask": "none"})
    async with bench(path=path) as pilot:
        await press(pilot, "vertical_line")
        assert isinstance(pilot.app.screen, SideChooser)
        assert _row(pilot, "load_bias=false")
        assert "mask=none" in _row(pilot, "third")
        await press(pilot, "enter")
        assert _screen(pilot).other == 1
        await press(pilot, "w")
        assert _screen(pilot).other == 2
        await press(pilot, "vertical_line", "w", "vertical_line")
        assert _screen(pilot).other == 1, "what stands beside the tokens already"
        await press(pilot, "escape")
        await enter(pilot, "colon", "split nobody")
        assert _row(pilot, "there is no 'nobody' to put beside this branch: there are load_bias=false, third")
        await enter(pilot, "colon", "split third")
        assert _screen(pilot).other == 2


async def test_a_branch_and_its_golden(bench: Bench, tmp_path: Path) -> None:
    """The golden is another session: of one rank, with tensors and without statistics."""
    path = build(tmp_path / "judged.session", fork=False)
    shutil.copy(RECORDED / "load_bias-false.session", tmp_path / "golden.session")
    with SessionWriter.reopen(path) as writer:
        writer.event(0, 6, "golden", "", {"verdict": "diverged", "golden_session": "golden.session"})
    async with bench(path=path) as pilot:
        await press(pilot, "left_curly_bracket", "vertical_line")
        assert _screen(pilot).other == GOLDEN
        assert text_of(pilot)[2].startswith(" golden ")
        await press(pilot, "1")
        assert _row(pilot, "the token ids that go in differ"), "a reference of other tokens is not compared"


def _batch(path: Path) -> Path:
    """Two sequences and two branches, which differ in the second sequence alone."""
    taps = [Tap(0, "embed", "replicate"), Tap(1, "logits", "replicate")]
    with SessionWriter.create(path, taps=taps, ranks=1, meta=SessionMeta()) as writer:
        for name in ("main", "other"):
            branch = 0 if name == "main" else writer.branch(name, parent=0, fork_step=0)
            reported = [
                SequenceStep(seq, [1 + seq], [0], [], emitted=9 if (seq, name) == (1, "other") else 5, topk_ids=[5, 9],
                             topk_logits=[1.0, 0.5], logsumexp=2.0)
                for seq in range(2)
            ]  # fmt: skip
            sums = np.array([[1], [1 + branch]], np.uint64)
            writer.step(branch, StepRecord(0, "prefill", reported, 0.1, np.ones((2, 1, 8), np.float32), sums))
    return path


async def test_the_chosen_sequence_of_a_batch(bench: Bench, tmp_path: Path) -> None:
    async with bench(path=_batch(tmp_path / "batch.session")) as pilot:
        await press(pilot, "vertical_line")
        assert "seq 0 of 2" in text_of(pilot)[0]
        assert "same tokens as far as both go" in text_of(pilot)[3]
        await press(pilot, "right_parenthesis")
        assert "seq 1 of 2" in text_of(pilot)[0]
        assert "step 0: first difference, “‹5›” and “‹9›”" in text_of(pilot)[3]
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, WorkbenchScreen)
        assert pilot.app.screen.where.seq == 1


async def test_nothing_to_put_beside(bench: Bench, tmp_path: Path) -> None:
    async with bench(path=build(tmp_path / "alone.session", fork=False)) as pilot:
        await press(pilot, "vertical_line")
        assert isinstance(pilot.app.screen, WorkbenchScreen)
        assert _row(pilot, "there is nothing to put beside this branch: x forks another, g records a golden")


async def test_help_and_palette_know_it(bench: Bench) -> None:
    async with bench((120, 60), RECORDED / "load_bias-false.session") as pilot:
        assert isinstance(pilot.app.screen, WorkbenchScreen)
        entries = {entry.title: entry.help for entry in pilot.app.screen.palette()}
        assert "Two branches side by side" in entries
        assert "this branch beside another, or beside golden" in entries[":split [OTHER]"]
        assert ":extend NAME [COUNT]" in entries
        await press(pilot, "question_mark")
        assert "two branches side by side" in _row(pilot, "|  two")
        await press(pilot, "escape", "vertical_line", "question_mark")
        assert _row(pilot, "step both sides; live, the engine runs")


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_split_view_opens_where_there_is_something_to_compare(
    bench: Bench, size: tuple[int, int]
) -> None:
    async with bench(size, RECORDED / "load_bias-false.session") as pilot:
        await press(pilot, "vertical_line")
        assert _row(pilot, "load_bias=true ends at step 1: step 0 is the last to compare")
        assert _row(pilot, "layers.0.attn.q_proj")
        await press(pilot, "right_square_bracket", "right_square_bracket")
        assert _row(pilot, "load_bias=true ends at step 1"), "it can be left"
        await press(pilot, "escape")
        assert "step 2/11" in text_of(pilot)[0], (
            "and the workbench follows where one went, not where it opened"
        )
