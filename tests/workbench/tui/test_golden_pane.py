"""The Golden pane: the map of verdicts, the error over depth, a comparison that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.workbench.judgements.reproduction import Reproduction
from lockstep.workbench.tui.drivers.port import CommandStage
from lockstep.workbench.tui.panes.golden_text import verdict_lines
from lockstep.workbench.views.step_verdicts import GoldenTap, JudgedStep
from lockstep.workbench.views.verdicts import Judged
from tests.workbench.tui.conftest import Bench, enter, press, text_of, until

pytestmark = pytest.mark.sampled_file(2)

RECORDED = Path(__file__).parents[3] / "sessions" / "recorded"


async def test_golden_map_reports_injected_from_inherited(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "{", "7")
        lines = text_of(pilot)
        assert any("first wrong: layers.0.attn.scores" in line for line in lines)
        assert any("attn.scores █" in line for line in lines)
        assert any("attn.probs ▒" in line for line in lines)
        row = next(line for line in lines if "◆" in line)
        await press(pilot, "down")
        assert next(line for line in text_of(pilot) if "◆" in line) != row, "the cursor is seen on every mark"
        legend = next(line for line in lines if "▫ suspect" in line)
        assert "▪ right   ▫ suspect   █ wrong   ▒ wrong input   · not compared" in legend
        reported = next(line for line in lines if "first wrong: layers.0.attn.scores" in line)
        assert re.search(r"\d+ right  \d+ wrong", reported)


async def test_a_recording_that_diverges_opens_at_its_first_wrong_operation(bench: Bench) -> None:
    async with bench() as pilot:
        assert pilot.app.screen.place.step == 11
        await press(pilot, "7")
        assert any("first wrong: layers.0.attn.scores" in line for line in text_of(pilot))
        overview = pilot.app.screen.overview
        place = pilot.app.screen.place
        assert (place.step, overview.taps[place.tap]) == (6, "layers.0.attn.scores")


async def test_golden_stays_where_one_has_gone(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "1", "down", "down", "7")
        assert pilot.app.screen.place.step == 11
        assert any("Step 11 was not compared" in line for line in text_of(pilot))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_the_error_over_depth_is_a_curve_with_its_noise_floor(
    bench: Bench, size: tuple[int, int]
) -> None:
    async with bench(size, RECORDED / "load_bias-false.session") as pilot:
        await enter(pilot, "colon", "goto 0")
        await press(pilot, "7")
        lines = text_of(pilot)
        head = next(i for i, line in enumerate(lines) if "error of each tap" in line)
        assert "noise floor" in lines[head]
        drawn = "".join(lines[head + 1 : head + 13])
        assert set("⠉⠒⠤⣀") & set(drawn)
        assert set("⠁⠂⠄⡀") & set(drawn), "the floor under it"


async def test_how_many_times_the_noise_floor_is_reported_once(bench: Bench) -> None:
    async with bench((120, 40), RECORDED / "load_bias-false.session") as pilot:
        await enter(pilot, "colon", "goto 0")
        await press(pilot, "7", "o")
        lines = text_of(pilot)
        assert not any("times the noise" in line for line in lines)
        (reported,) = (line for line in lines if "error ÷ noise floor" in line)
        assert re.search(r"error ÷ noise floor +\d{1,3}(,\d{3})*\b", reported), reported
        assert "e+" not in "".join(lines)


async def test_a_golden_pane_without_verdicts_reports_it(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "1", "down", "down", "7")
        assert any("was not compared with a golden reference" in line for line in text_of(pilot))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_a_comparison_that_runs_shows_how_far_it_has_come(bench: Bench, size: tuple[int, int]) -> None:
    async with bench(size) as pilot:
        await press(pilot, "1", "down", "down", "7")
        driver = pilot.app.screen.driver
        for going, shown in ((3, "━━━━────────"), (6, "━━━━━━━━────")):
            driver.stages = [
                CommandStage("golden reference", 18, 18, 12.4),
                CommandStage("engine on golden inputs, float32, tp=2", going, 9, 1.7),
            ]
            await until(lambda shown=shown: any(shown in line for line in text_of(pilot)), pilot)
            lines = [" ".join(line.split()) for line in text_of(pilot)]
            for reported in (
                "comparing with the golden reference 14 s",
                "✓ golden reference 18 of 18 12 s",
                f"▶ engine on golden inputs, float32, tp=2 {going} of 9 2 s",
            ):
                assert any(reported in line for line in lines)
            assert not any("g compares it" in line for line in lines)
        driver.stages = ()
        await until(lambda: any("was not compared" in line for line in text_of(pilot)), pilot)
        assert not any("comparing with" in line for line in text_of(pilot))


async def test_an_older_judgement_stays_under_a_comparison_that_runs(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "{", "7")
        pilot.app.screen.driver.stages = [CommandStage("judging every tap", 0, 0, 1.0)]
        await until(lambda: any("▶ judging every tap" in line for line in text_of(pilot)), pilot)
        assert any("first wrong: layers.0.attn.scores" in line for line in text_of(pilot))


@pytest.mark.parametrize(("size", "more"), [((120, 40), True), ((200, 60), False)])
async def test_the_operations_that_err_by_themselves_are_listed_as_far_as_there_is_room(
    bench: Bench, size: tuple[int, int], more: bool
) -> None:
    async with bench(size, RECORDED / "load_bias-false.session") as pilot:
        await enter(pilot, "colon", "goto 0")
        await press(pilot, "7")
        lines = text_of(pilot)
        head = next(i for i, line in enumerate(lines) if "12 operations err by themselves" in line)
        listed = [line for line in lines[head + 1 :] if re.search(r"layers\.\d\.attn\.[qkv]_proj +\d", line)]
        stated = [int(found[1]) for line in lines if (found := re.search(r"and (\d+) more", line))]
        assert len(listed) + sum(stated) == 12, "what is not listed is counted"
        assert bool(stated) == more
        assert any("▪ right   ▫ suspect" in line for line in lines), "the legend stays in view"


def test_what_came_of_the_cause_in_the_reference_stands_below_it() -> None:
    came = Reproduction("reproduced", "", "logits", 0.21, 3e-7, 1e-6, 40, 40, "", 12, 3, 12)
    judged = JudgedStep(0, {}, None, (0,), ("eps is 1e-05",), ("aligned",), proof=came.in_words())
    lines = ["".join(text for text, _ in line) for line in verdict_lines(judged, 1)]
    assert lines[1:] == [
        "cause  eps is 1e-05",
        "proof  reproduced: put into the reference, it gives the run's logits within rounding (rel 3.0e-7; without it "
        "0.210), 12 of 12 tokens",
        "note   aligned",
    ]


def test_notes_beyond_the_window_are_counted_and_wrong_input_is_not_called_wrong() -> None:
    inherited = Judged(
        0, 1, "layers.1.attn.k_cache", 1, "k_cache", "inherited", 0.1, 8.5, 0.9, 5e-7, 3e5, "", ()
    )
    first = GoldenTap(0, inherited.tap, inherited, ())
    judged = JudgedStep(1, {0: first}, first, (1,), notes=("a", "b", "c", "d", "e"))

    def lines_of(most: int) -> list[str]:
        return ["".join(text for text, _ in line) for line in verdict_lines(judged, 1, most)]

    assert lines_of(3) == [
        "✗ first with wrong input: layers.1.attn.k_cache   1 wrong input",
        "note   a", "note   b", "note   c",
        "       and 2 more notes: a taller window shows them",
    ]  # fmt: skip
    assert [line for line in lines_of(8) if "note " in line][-1] == "note   e"
