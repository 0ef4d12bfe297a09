"""Every pane on a session made by hand, driven by the keys."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from textual.widgets import Input, Static

from lockstep.sessions import SessionWriter
from lockstep.sessions.meta import WeightShare
from lockstep.workbench.tui import settings
from lockstep.workbench.tui.panes import pane_classes
from lockstep.workbench.tui.panes.sentinels import history_cells
from lockstep.workbench.tui.panes.titles import digit
from lockstep.workbench.tui.screens.export_sheet import ExportScreen
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.tui.widgets.command_line import CommandLine
from lockstep.workbench.tui.widgets.grid import Grid
from lockstep.workbench.tui.widgets.token_strip import TokenStrip
from tests.workbench.tui.conftest import Bench, enter, press, settle, text_of
from tests.workbench.tui.synthetic import HOSTILE, build

pytestmark = pytest.mark.sampled_file(3)

RECORDED = Path(__file__).parents[3] / "sessions" / "recorded"


def _screen(pilot) -> WorkbenchScreen:
    screen = pilot.app.screen
    assert isinstance(screen, WorkbenchScreen)
    return screen


async def test_opens_at_the_last_step_and_steps_back_and_on(bench: Bench) -> None:
    async with bench() as pilot:
        assert _screen(pilot).where.step == 11
        await press(pilot, "N", "N")
        assert "step 9/11" in text_of(pilot)[0]
        await press(pilot, "n", "n", "n")
        assert _screen(pilot).where.step == 11, "there is no step after the last one in a replay"
        await press(pilot, "[", "[", "]")
        assert _screen(pilot).where.step == 10


async def test_operations_name_the_first_nan_and_count_it(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "[", "[", "[", "[", "[")
        lines = text_of(pilot)
        assert "● NaN in step 6, from layers.0.attn.scores on, rank 0 1" in lines[1]
        scores = next(line for line in lines[2:] if "attn.scores" in line and "●" in line)
        assert scores.count("NaN 820") == 2
        assert "✗ 0.80" in scores
        assert any("layers.0.attn.scores is the first to hold NaN" in line for line in lines)


async def test_operations_filter_and_statistic(bench: Bench) -> None:
    async with bench() as pilot:
        await enter(pilot, "slash", "q_proj")
        grid = _screen(pilot).query_one("#operations", Grid)
        assert grid.count == 4
        await press(pilot, "t")
        assert any("rank 0 absmax" in line for line in text_of(pilot))
        await press(pilot, "escape")
        assert grid.count > 80


async def test_rows_stay_in_place_from_step_to_step(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "i", "i", "i")
        before = [i for i, line in enumerate(text_of(pilot)) if "▸" in line and "attn" in line]
        await press(pilot, "[", "[", "[")
        after = [i for i, line in enumerate(text_of(pilot)) if "▸" in line and "attn" in line]
        assert before == after


async def test_missing_scores_are_reported_as_missing(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "2", "v")
        assert any("were not captured" in line for line in text_of(pilot))


async def test_cache_lengths_agree(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "3")
        line = next(line for line in text_of(pilot) if "sequence 0" in line)
        assert line.count("19") == 3


async def test_logits_order_and_rank_moves(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "5")
        lines = text_of(pilot)
        top = next(line for line in lines if "▸" in line and " 1 " in line)
        assert "drip" in top
        assert any("margin" in line and "entropy" in line for line in lines)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_candidate_is_followed_over_the_steps(bench: Bench, size: tuple[int, int]) -> None:
    async with bench(size=size) as pilot:
        await press(pilot, "5", "enter")
        lines = text_of(pilot)
        head = next(line for line in lines if "“ drip”" in line)
        assert "in the top 8 at" in head
        assert "of 12 steps" in head
        assert "best: rank 1, " in head
        steps = next(
            line for line in lines if "   11" in line and line.split()[-4:] == ["8", "9", "10", "11"]
        )
        ranks = next(line for line in lines if line.rstrip().endswith("1 ▸"))
        assert steps
        assert ranks.count("▸") >= 3, "the last three tokens were drips"
        await press(pilot, "N")
        assert any("▲ step 10" in line for line in text_of(pilot)), "it stays followed"
        await press(pilot, "escape")
        assert any("margin  " in line for line in text_of(pilot))


async def test_sentinels_show_what_was_raised_before_what_is_clear(bench: Bench) -> None:
    async with bench((80, 24), RECORDED / "cache_heads-repeated.session") as pilot:
        await press(pilot, "6")
        assert any("golden divergence   first at step 0, at 2 steps" in line for line in text_of(pilot))
        await press(pilot, "home")
        assert any("NaN   clear" in line for line in text_of(pilot))
        await press(pilot, "left_square_bracket")
        assert any("NaN   clear" in line for line in text_of(pilot)), "the cursor stays where it was put"


async def test_sentinels_jump_to_the_first_nan(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "6")
        row = next(line for line in text_of(pilot)[2:] if "NaN" in line and "●" in line)
        assert "layers.0.attn.scores" in row
        await press(pilot, "enter")
        assert _screen(pilot).where.step == 6


async def test_what_was_reported_goes_with_the_pane(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "2", "m")
        assert any("alone" in line for line in text_of(pilot)[-3:])
        await press(pilot, "6")
        assert not any("alone" in line for line in text_of(pilot)[-3:])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40), (160, 40), (200, 60)])
async def test_names_of_operations_are_whole(bench: Bench, size: tuple[int, int]) -> None:
    async with bench(size, RECORDED / "qkv_shard_dim-1.session") as pilot:
        await press(pilot, "s")
        lines = text_of(pilot)
        assert any(re.search(r"  attn\.o_proj\.partial +\d", line) for line in lines)
        in_tree = any(line.strip().startswith("attn.o_proj.partial ") for line in lines)
        assert in_tree or size[0] < 100
        assert "over steps" in "".join(lines) or size[0] == 100
        assert ("layout" in "".join(lines)) == (size[0] in (120, 200))


async def test_operations_after_a_resize_are_those_of_a_window_of_that_size(bench: Bench) -> None:
    shown = []
    for first in ((80, 24), (120, 40)):
        async with bench(first, RECORDED / "qkv_shard_dim-1.session") as pilot:
            await pilot.resize_terminal(120, 40)
            await settle(pilot)
            shown.append([line[:119] for line in text_of(pilot)[9:30]])
    assert shown[0] == shown[1]


async def test_journal_shows_how_the_texts_of_branches_end(bench: Bench) -> None:
    async with bench((120, 40), RECORDED / "lm_head-missing.session") as pilot:
        await press(pilot, "8")
        lines = text_of(pilot)
        assert any(re.search(r"lm_head=missing +….*ime", line) for line in lines), (
            "the end, and that it is one"
        )


async def test_journal_goes_to_a_branch(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "8", "down", "enter")
        assert _screen(pilot).where.branch == 1
        lines = text_of(pilot)
        assert any("faults  load_bias=false" in line for line in lines)
        assert any("[bold]really[/bold]" in line for line in lines), "markup in a note is text"


async def test_journal_goes_to_the_operation_of_a_stop(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "8")
        _screen(pilot).query_one("#events", Grid).focus()
        await press(pilot, "end", "up", "enter")
        where, overview = _screen(pilot).where, _screen(pilot).overview
        assert overview is not None
        assert (where.step, overview.taps[where.tap]) == (6, "layers.0.attn.scores")


async def test_the_logits_history_has_the_room_that_the_candidates_leave(bench: Bench) -> None:
    async with bench((200, 60)) as pilot:
        await press(pilot, "5")
        pane = _screen(pilot).front
        assert pane is not None
        block, grid = pane.query_one("#history"), pane.query_one("#candidates", Grid)
        reported = [line for line in text_of(pilot) if "≤ " in line]
        assert len(reported) == 3, "margin, entropy and p, each with the greatest of its bars"
        assert block.size.height == 20
        await press(pilot, "enter")
        assert any("in the top" in line for line in text_of(pilot))
        assert block.size.height >= 15
        assert grid.size.height > grid.count, "all candidates are in view"
        await pilot.resize_terminal(120, 30)
        await settle(pilot)
        assert grid.size.height > grid.count, "it takes no room from them"


async def test_stops_are_found_and_end(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "{")
        assert _screen(pilot).where.step == 6
        await press(pilot, "{")
        assert any("no stop before" in line for line in text_of(pilot))


async def test_origin_goes_to_the_first_wrong_operation(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "{", "o")
        screen = _screen(pilot)
        assert screen.overview is not None
        assert screen.overview.taps[screen.where.tap] == "layers.0.attn.scores"


async def test_engine_only_keys_report_why_they_do_nothing(bench: Bench) -> None:
    async with bench() as pilot:
        await enter(pilot, "colon", "toggle mask additive")
        assert any("this is a replay" in line for line in text_of(pilot))
        await press(pilot, "2", "v", "a")
        assert any("this is a replay" in line for line in text_of(pilot)), "a capture needs the model"
        assert _screen(pilot).keymap.why_not("a")
        assert not _screen(pilot).keymap.why_not("n")
        await press(pilot, "x")
        lines = text_of(pilot)
        assert any("load_bias=false" in line for line in lines), "the catalogue can be read in a replay"
        assert any("cannot act" in line and "replay" in line for line in lines)


async def test_command_line_moves_completes_and_explains(bench: Bench) -> None:
    async with bench() as pilot:
        await enter(pilot, "colon", "goto 4")
        assert _screen(pilot).where.step == 4
        await pilot.press("colon", *"bran", "tab")
        assert pilot.app.screen.query_one(CommandLine).value == "branch"
        await press(pilot, "escape")
        await enter(pilot, "colon", "frobnicate")
        assert any("there is no command 'frobnicate'" in line for line in text_of(pilot))


@pytest.mark.slow
async def test_the_debuggers_commands_work_on_a_recording(bench: Bench) -> None:
    async with bench() as pilot:
        screen = _screen(pilot)
        await enter(pilot, "colon", "goto 2")
        await enter(pilot, "colon", "break layers.1.attn.q_proj if step >= 4")
        await press(pilot, "c")
        assert (screen.where.step, screen.overview.taps[screen.where.tap]) == (4, "layers.1.attn.q_proj")
        await press(pilot, "i")
        await enter(pilot, "colon", "reverse-stepi 2")
        assert screen.overview.taps[screen.where.tap] == "layers.1.attn_norm"
        await enter(pilot, "colon", "delete")
        await enter(pilot, "colon", "catch nan")
        await press(pilot, "c")
        assert (screen.where.step, screen.overview.taps[screen.where.tap]) == (6, "layers.0.attn.scores")
        assert any("✗" in line and "nan" in line for line in text_of(pilot))
        await enter(pilot, "colon", "expect step == 6")
        assert any("ok: expect step == 6" in line for line in text_of(pilot))
        await enter(pilot, "colon", "expect step == 7")
        assert any("✗" in line and "FAILED" in line for line in text_of(pilot))
        await enter(pilot, "colon", "diff main load_bias=false")
        assert any("taps differ" in line for line in text_of(pilot)), "a table opens a sheet"
        await press(pilot, "escape")
        await enter(pilot, "colon", "branch load_bias=false")
        assert screen.where.branch == 1
        assert screen.commands.complete("print layers.3.mlp.g") == ["print layers.3.mlp.gate"]
        assert screen.commands.complete("toggle load_bias f") == ["toggle load_bias false"]
        assert "catch nan" in screen.commands.complete("catch ")


async def test_layers_operations_and_ranks(bench: Bench) -> None:
    async with bench() as pilot:
        screen = _screen(pilot)
        assert screen.overview is not None
        await press(pilot, "s", "i", "full_stop")
        assert screen.overview.taps[screen.where.tap] == "layers.1.attn.q_proj"
        await press(pilot, "f")
        assert screen.overview.taps[screen.where.tap] == "layers.1.mlp_residual"
        await press(pilot, "R")
        assert screen.where.rank == 0
        await press(pilot, "R", "R")
        assert screen.where.rank is None


async def test_tensor_that_was_not_captured_reports_how(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "enter")
        assert any("embed was not captured at step 11" in line for line in text_of(pilot))
        assert any("This is a replay" in line for line in text_of(pilot))


async def test_help_lists_every_key(bench: Bench) -> None:
    async with bench(size=(120, 60)) as pilot:
        await press(pilot, "question_mark")
        text = "\n".join(text_of(pilot))
        assert "Every tap of the present step" in text
        assert "continue to the next stop" in text


@pytest.mark.slow
async def test_every_pane_exports(bench: Bench, tmp_path: Path) -> None:
    endings = ("csv", "json", "html", "svg", "txt", "png")
    async with bench() as pilot:
        await press(pilot, "{")
        for number, pane in enumerate(pane_classes(), 1):
            await press(pilot, digit(number))
            for ending in endings:
                file = tmp_path / f"{number}.{ending}"
                _screen(pilot).actions.exporter.write(str(file))
                await settle(pilot)
                # The checkpoint is not on this machine, the model is dense: there is only the picture that states it.
                empty = pane.TITLE in ("Weights", "Tensor", "Experts") and ending in ("csv", "json", "txt")
                assert file.exists() is not empty, pane.TITLE
                stated = "no data in this pane" if empty else f"wrote {file}"[:60]
                assert any(stated in line for line in text_of(pilot))


@pytest.mark.slow
async def test_the_sheet_of_formats_writes_and_never_replaces(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with bench() as pilot:
        await press(pilot, "5", "e")
        assert any("logits-step11.svg" in line for line in text_of(pilot)), "the default is offered"
        await press(pilot, "down", "enter", "e", "enter", "e", "c")
        assert not list(tmp_path.glob("*.csv")), "a letter chooses, enter writes"
        assert any("logits-step11.csv" in line for line in text_of(pilot))
        await press(pilot, "enter", "e", "escape")
        names = {path.name for path in tmp_path.iterdir() if path.is_file()}
        assert names == {"logits-step11.png", "logits-step11-2.png", "logits-step11.csv"}
        await press(pilot, "2")
        await enter(pilot, "colon", "print layers.2.attn.probs")
        await press(pilot, "e", "j", "enter")
        reported = json.loads((tmp_path / "layers-2-attn-probs-step11.json").read_text())
        assert reported["columns"][:2] == ["row", "0 write"]
        assert len(reported["rows"][0]) == 1 + 19


async def test_a_picture_of_a_table_reports_how_many_rows_it_left(bench: Bench, tmp_path: Path) -> None:
    for height, left in ((24, True), (200, False)):
        async with bench(size=(120, height)) as pilot:
            await press(pilot, "1")
            grid = pilot.app.screen.query_one("#operations", Grid)
            file = tmp_path / f"{height}.svg"
            await _screen(pilot).commands.enter(f"export {file}")
            await settle(pilot)
            stated = re.search(
                r"… (\d+) more rows are not in this picture", file.read_text().replace("\xa0", " ")
            )
            assert (stated is not None) is left
            assert stated is None or int(stated[1]) == grid.unseen > 1


async def test_hostile_tokens_are_shown_as_text(bench: Bench, tmp_path: Path) -> None:
    path = build(tmp_path / "hostile.session", emitted=HOSTILE, nan_from=None, fork=False)
    async with bench(path=path, size=(200, 40)) as pilot:
        for number in range(1, 9):
            await press(pilot, str(number))
            text = "\n".join(text_of(pilot))
            assert "\x1b" not in text
            assert "\u202e" not in text
        strip = text_of(pilot)[2]
        assert "␛[31mred" in strip
        assert "[bold]markup[/bold]" in strip
        assert "‹|im_end|›" in strip
        assert "雨の音" in strip
        assert "◌́" in strip
        assert "···" in strip


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (160, 45), (200, 60), (40, 12)])
async def test_every_pane_at_every_size(bench: Bench, size: tuple[int, int]) -> None:
    async with bench(size=size) as pilot:
        await press(pilot, "{")
        for number in range(1, 9):
            await press(pilot, str(number))
            lines = text_of(pilot)
            assert len(lines) == size[1]
            assert lines[0].startswith(" Demo-3.5M")


async def test_resizing_keeps_the_place(bench: Bench) -> None:
    async with bench(size=(200, 60)) as pilot:
        await press(pilot, "N", "i", "i", "i")
        where = _screen(pilot).where
        await pilot.resize_terminal(80, 24)
        await settle(pilot)
        assert _screen(pilot).where == where
        assert len(text_of(pilot)) == 24


async def test_the_lens_shows_each_layer_and_where_golden_differs(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "5", "l")
        assert any("needs" in line or "replay" in line for line in text_of(pilot)), (
            "nobody took it at this step"
        )
        await press(pilot, *"[" * 5)
        lines = text_of(pilot)
        assert any("first from layer 2 on" in line for line in lines)
        assert sum(1 for line in lines if " layer " in line) >= 4
        await press(pilot, "l")
        assert any("margin" in line and "entropy" in line for line in text_of(pilot))


async def test_what_the_ranks_held_is_shown_without_the_checkpoint(bench: Bench, tmp_path: Path) -> None:
    path = build(tmp_path / "held.session", fork=False)
    name = "layers.0.k_proj.bias"
    shares = (
        WeightShare(name, 0, (32,), "float32", (0.0,) * 7 + (32.0,), "0" * 16, "different"),
        WeightShare(name, 1, (32,), "float32", (0.0,) * 8, "a" * 16, "equal"),
    )
    with SessionWriter.reopen(path) as writer:
        writer.set_meta(weights={0: shares})
    async with bench(path=path) as pilot:
        await press(pilot, "4")
        lines = text_of(pilot)
        assert any("1 of 2 shares are not what the checkpoint has" in line for line in lines)
        assert any("≠ 32" in line and "= 32" in line for line in lines)


async def test_tokens_are_coloured_by_what_is_chosen_and_that_is_remembered(bench: Bench) -> None:
    async with bench(size=(200, 60)) as pilot:
        strip = pilot.app.screen.query_one("#tokens", TokenStrip)
        assert strip.colour == "probability"
        shades = [cell.shade("entropy") for cell in strip.lines[0].tokens.cells if cell.step is not None]
        assert all(shade is not None and 0 < shade < 1 for shade in shades)
        await press(pilot, "T")
        assert strip.colour == "entropy"
        assert any(line.startswith(" entropy") for line in text_of(pilot)), "the timeline follows"
        assert settings.load().token_colour == "entropy"
        await press(pilot, "T")
        assert [cell.shade("divergence") for cell in strip.lines[0].tokens.cells][-1] is None, (
            "main is held against nothing"
        )
        await enter(pilot, "colon", "branch load_bias=false")
        assert strip.lines[0].tokens.cells[-1].shade("divergence") is not None


async def test_sentinels_show_every_step_every_rank_and_all_of_what_was_found(bench: Bench) -> None:
    async with bench(size=(80, 24)) as pilot:
        await press(pilot, "6")
        lines = text_of(pilot)
        assert any("NaN" in line and "·   " * 6 + "███ " * 5 in line for line in lines), "NaN from step 6 on"
        assert any(line.rstrip().endswith("0 1") for line in lines), "every rank it touched"
        assert any("820): 0 × -inf in the mask" in line for line in lines), "what was found, uncut"


def test_many_steps_share_a_cell_of_the_history() -> None:
    assert history_cells(bytes([0, 0, 0, 1, 0, 0]), 4, 2) == [("·", "faint"), ("█", "wrong"), (" ", "faint")]


@pytest.mark.parametrize(("size", "wide", "high"), [((80, 24), 4, 1), ((120, 40), 5, 2), ((200, 60), 6, 3)])
async def test_the_histories_of_sentinels_fill_their_room(
    bench: Bench, size: tuple[int, int], wide: int, high: int
) -> None:
    async with bench(size=size) as pilot:
        await press(pilot, "6")
        lines = text_of(pilot)
        label = next(i for i, line in enumerate(lines) if " NaN   " in line and "█ " in line)
        drawn = lines[label][lines[label].index(" NaN   ") :].split()
        assert drawn.count("█" * (wide - 1)) == 6, "from step 6 to 11"
        assert "Inf" in lines[label + high]
        if high > 2:
            assert "█" * (wide - 1) in lines[label + 1]
        arrow = next(line for line in lines if "▼ step 11" in line)
        assert lines[label][arrow.index("▼")] == "█", "the mark stands over the present step"


async def test_empty_panes_of_a_replay_offer_no_key_that_needs_a_model(bench: Bench) -> None:
    """Attention scores and weights: neither is in the session, and nothing here could bring it."""
    async with bench() as pilot:
        for keys, fills in (
            (("2", "v"), "a  captures them (:capture layers.0.attn.scores)"),
            (("4",), "a  keeps"),
        ):
            await press(pilot, *keys)
            pane = _screen(pilot).front
            assert pane is not None
            assert pane.has_class("-empty")
            reported = str(pane.query_one(".empty", Static).render())
            assert "This is a replay" in reported
            assert fills not in reported
            pane.live = True
            pane.again()
            await settle(pilot)
            assert fills in str(pane.query_one(".empty", Static).render())


async def test_the_keys_of_an_empty_pane_are_those_that_act_there(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "2")
        assert " m view  v scores  , . layer  d golden diff" in text_of(pilot)[-1]
        await press(pilot, "v")
        assert text_of(pilot)[-1].startswith(" v scores  , . layer  n next"), "scores were not captured"
        await press(pilot, "v")
        assert " m view  v scores  , . layer  d golden diff" in text_of(pilot)[-1]
        await press(pilot, "[", "[", "7")
        pane = _screen(pilot).front
        assert pane is not None
        assert pane.has_class("-empty")
        assert text_of(pilot)[-1].startswith(" o first  n next"), "nothing can be compared in a replay"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60), (40, 12)])
async def test_no_size_hides_the_alarm(bench: Bench, size: tuple[int, int]) -> None:
    """In the first line, in the colour of warnings; with the place and the cause where there is a second one."""
    async with bench(size=size) as pilot:
        assert "● NaN" in text_of(pilot)[0]
        strip = pilot.app.screen._compositor.render_strips()[0]
        styles = {segment.style.bgcolor for segment in strip if "● NaN" in segment.text}
        assert styles == {_screen(pilot).frame.status.paint.alarm.bgcolor}
        reported = "● NaN in step 11, from layers.0.attn.scores on, rank 0 1: 0 × -inf in the mask"
        assert (reported in text_of(pilot)[1]) is (size[0] >= 120)
        await press(pilot, *"[" * 6)
        assert _screen(pilot).where.step == 5
        assert "NaN" not in text_of(pilot)[0]


async def test_a_sheet_is_answered_once(bench: Bench, tmp_path: Path) -> None:
    """On a busy machine a second Enter comes before the sheet is gone: it took away the screens below."""
    async with bench() as pilot:
        await press(pilot, "e")
        sheet = pilot.app.screen
        assert isinstance(sheet, ExportScreen)
        sheet.query_one(Input).value = str(tmp_path / "a.svg")
        for _ in range(2):
            sheet._write()
        await settle(pilot)
        assert isinstance(pilot.app.screen, WorkbenchScreen)
        assert [one.name for one in tmp_path.glob("*.svg")] == ["a.svg"]
