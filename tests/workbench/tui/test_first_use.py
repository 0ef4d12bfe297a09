"""What somebody who opens the screens for the first time stumbles over: each line read off the screen."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from textual import events

from lockstep.sessions import STATISTICS, SequenceStep, StepRecord, Tap
from lockstep.sessions.meta import PASS_STATISTICS, ROW_HASHES, ROW_STATISTICS
from lockstep.workbench.export.pooling import pool
from lockstep.workbench.paths import find_session
from lockstep.workbench.tui.drivers.port import CommandStage
from lockstep.workbench.tui.widgets.sparkline import sparkline
from lockstep.workbench.views.where import Where
from lockstep.workbench.words.numbers import chance
from tests.sessions.samples import create
from tests.workbench.tui.conftest import Bench, press, settle, text_of

pytestmark = pytest.mark.sampled_file(2)

MASK, BIASES = find_session("gallery/mask-additive"), find_session("gallery/load_bias-false")


@pytest.fixture
def attached(tmp_path: Path) -> Path:
    """A recording that keeps what it knows of rows beside its taps."""
    names = ["embed", *(f"layers.0.attn_norm{end}" for end in ("", ROW_HASHES, ROW_STATISTICS)),
             *(f"layers.0.attn.q_proj{end}" for end in ("", ROW_HASHES, PASS_STATISTICS)), "logits"]  # fmt: skip
    taps = tuple(Tap(i, name, "replicate") for i, name in enumerate(names))
    path = tmp_path / "attached.session"
    stats = np.ones((len(taps), 1, len(STATISTICS)), np.float32)
    step = StepRecord(0, "prefill", [SequenceStep(0, [1, 2], range(2), [[2]], [0])], 0.1, stats=stats)
    with create(path, taps, ranks=1) as writer:
        writer.step(0, step)
    return path


@pytest.mark.parametrize("pane", ["1", "7"])
async def test_rows_beside_a_tap_are_no_operations(pane: str, attached: Path, bench: Bench) -> None:
    async with bench(path=attached) as pilot:
        await press(pilot, pane)
        shown = "\n".join(text_of(pilot))
        assert "row_hash" not in shown
        assert "statistics" not in shown.replace("t statistic", "")
        await press(pilot, "1", "down", "down", "down")
        assert "q_proj" in "\n".join(text_of(pilot))


async def test_the_alarm_of_a_later_step_does_not_claim_to_be_the_first(bench: Bench) -> None:
    async with bench(path=MASK) as pilot:
        header = text_of(pilot)[1]
        assert "● NaN in step 11, from layers.0.attn.scores on" in header
        assert "first at" not in header
        await press(pilot, "6")
        assert any("NaN   first at step 0" in line for line in text_of(pilot))


async def test_of_a_row_that_is_not_finite_no_strongest_key_is_shown(bench: Bench) -> None:
    async with bench(size=(130, 40), path=MASK) as pilot:
        await press(pilot, "2")
        shown = "\n".join(text_of(pilot))
        assert "entropy NaN" in shown
        assert "99 % in" not in shown
        assert "strongest" not in shown


async def test_faults_are_named_on_a_screen_of_24_lines(bench: Bench) -> None:
    async with bench(size=(80, 24), path=BIASES) as pilot:
        assert "faults  load_bias=false" in "\n".join(text_of(pilot)[:3])


async def test_what_is_wrong_is_named_on_a_screen_of_24_lines_without_a_fault(bench: Bench) -> None:
    async with bench(size=(80, 24)) as pilot:
        for step, seen in ((5, False), (6, True)):
            await press(pilot, "colon")
            pilot.app.post_message(events.Paste(f"goto {step}"))
            await press(pilot, "enter")
            await settle(pilot)
            assert (
                any("NaN in step 6, from layers.0.attn.scores" in line for line in text_of(pilot)[:3]) == seen
            )


def test_few_elements_of_a_heatmap_are_whole_cells() -> None:
    for few in (1, 2, 3):
        across = np.bincount(pool(np.zeros((40, few), np.float32), 91, 61).columns, minlength=few)
        down = np.bincount(pool(np.zeros((few, 40), np.float32), 91, 61).rows, minlength=few)
        assert len(set(across.tolist())) == len(set(down.tolist())) == 1
        assert down[0] % 2 == 0  # two pixels are a cell


def test_a_constant_is_a_flat_line() -> None:
    assert set(sparkline([1.0, 1.02, 0.99, 1.04])) <= set("▁▂▃▄▅")
    assert sparkline([0.0, 1.0]) == "▁█"


async def test_the_heatmap_of_a_weight_has_axes_and_a_scale(bench: Bench) -> None:
    async with bench(path=BIASES) as pilot:
        await press(pilot, "4")
        shown = "\n".join(text_of(pilot))
        assert "row↓ column→" in shown
        assert "2003 × 256" in shown


async def test_the_heatmap_of_a_weight_has_axes_and_a_scale_on_80_by_24(bench: Bench) -> None:
    async with bench(size=(80, 24), path=BIASES) as pilot:
        await press(pilot, "4")
        shown = "\n".join(text_of(pilot))
        assert "row↓ column→" in shown
        assert "2003 × 256" in shown
        await press(pilot, *["down"] * 5)  # k_proj.bias, of which some values stand out
        shown = "\n".join(text_of(pilot))
        assert "head↓ channel→" in shown
        assert "2 × 32" in shown
        assert "-33.00  head 0, channel 0  rank 0" in shown


async def test_probabilities_have_one_unit(bench: Bench) -> None:
    async with bench(path=BIASES) as pilot:
        await press(pilot, "5")
        shown = "\n".join(text_of(pilot))
        assert "1 in " not in shown
        assert " %" not in shown
        assert "0.0161" in shown
        assert "1.3e-4" in shown
    assert [chance(p) for p in (1.0, 0.5, 0.0123, 4e-7, 0.0, None)] == [
        "1.0000", "0.5000", "0.0123", "4.0e-7", "0", chance(None),
    ]  # fmt: skip


async def test_a_lens_that_a_replay_lacks_is_not_promised(bench: Bench) -> None:
    async with bench(size=(80, 24), path=BIASES) as pilot:
        await press(pilot, "5", "l")
        assert "not recorded" in [line.strip() for line in text_of(pilot)]
        assert not any("l looks" in line for line in text_of(pilot))


async def test_the_cache_in_words(bench: Bench) -> None:
    async with bench(path=BIASES) as pilot:
        await press(pilot, "3")
        shown = "\n".join(text_of(pilot))
        assert "growth ▁" in shown
        assert "20 → 31 rows  of sequence 0, steps 0–11  every layer and rank alike" in shown
        assert "block 1    15/16" in shown
        assert "the kettle" in next(line for line in text_of(pilot) if "block 1 " in line)
        assert "a full block of sequence 0" in shown


async def test_the_tokens_of_each_block_are_whole_on_80_by_24(bench: Bench) -> None:
    async with bench(size=(80, 24), path=BIASES) as pilot:
        await press(pilot, "3")
        shown = " ".join("\n".join(text_of(pilot)).split())
        assert (
            "block 0 16/16 ‹|im_start|›user⏎Write a haiku about rain with the word zorblat‹|im_end|›" in shown
        )
        assert "the spade rests the sill⏎ growth" in shown
        assert "of sequence 0, steps 0–11 every layer and rank alike" in shown
        assert "--capture 'layers.*.attn.k_cache' keeps it in a run" in shown


async def test_the_header_knows_of_the_steps_that_were_compared(bench: Bench) -> None:
    for size in ((80, 24), (120, 40)):
        async with bench(size=size, path=BIASES) as pilot:
            assert "golden: ✗ step 0, layers.0.attn.q_proj" in text_of(pilot)[1]
            await press(pilot, "8", "down", "enter")  # the branch without the fault
            assert "golden: ✓ match" in "\n".join(text_of(pilot)[:2]) or size == (80, 24)


async def test_on_80_by_24_the_alarm_leaves_the_fault_its_room(bench: Bench) -> None:
    async with bench(size=(80, 24), path=MASK) as pilot:
        header = text_of(pilot)[1]
        assert header.startswith(" faults  mask=additive")
        assert header.endswith("● NaN in step 11, from layers.0.attn.scores on")


async def test_commands_of_a_replay_act_where_the_screen_looks(bench: Bench) -> None:
    async with bench(path=BIASES) as pilot:
        await press(pilot, "7")
        assert "step 0/11" in text_of(pilot)[0], "Golden opens at the first wrong operation"
        await press(pilot, "colon")
        pilot.app.post_message(events.Paste("topk 1"))
        await press(pilot, "enter")
        assert any("dawn" in line and "0.2241" in line for line in text_of(pilot))
        await press(pilot, "escape", "n")
        assert "step 1/11" in text_of(pilot)[0]


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_reason_of_a_verdict_is_not_cut(bench: Bench, size: tuple[int, int]) -> None:
    async with bench(size=size, path=find_session("gallery/cache_reuse-false")) as pilot:
        await press(pilot, "7")
        beside = pilot.app.screen.query_one("#detail").region
        lines = [line[beside.x : beside.right] for line in text_of(pilot)[beside.y : beside.bottom]]
        words = re.sub("[▁-█]", " ", " ".join(lines)).split()  # without the scrollbar
        assert "reason shape [1, 2, 32] instead of [21, 2, 32]" in " ".join(words)


async def test_a_tensor_that_a_replay_lacks_names_those_that_it_has(bench: Bench) -> None:
    async with bench(path=BIASES) as pilot:
        await press(pilot, "enter")
        shown = " ".join("\n".join(text_of(pilot)).split())
        assert "embed was not captured at step 11." in shown
        assert "This step has attn.probs of layers 0–3." in shown
        assert "--capture 'embed' keeps it in a run" in shown


async def test_both_ends_of_a_parameter_s_name_are_seen(bench: Bench) -> None:
    async with bench(size=(80, 24), path=BIASES) as pilot:
        await press(pilot, "4")
        shown = text_of(pilot)
        assert any(re.match(r"= layers\.0\..*…ayernorm\.weight ", line) for line in shown)
        assert any(line.endswith("  NaN 0") for line in shown), "nothing is cut where nothing follows"


async def test_a_window_that_grows_shows_the_model_at_once(bench: Bench) -> None:
    async with bench(size=(80, 24), path=BIASES) as pilot:
        await pilot.resize_terminal(120, 40)
        await settle(pilot)
        assert any(line.split()[:2] == ["▸", "layers.3"] for line in text_of(pilot))


async def test_help_of_a_command_wraps_at_80_columns(bench: Bench) -> None:
    async with bench(size=(80, 30), path=BIASES) as pilot:
        await press(pilot, "colon")
        pilot.app.post_message(events.Paste("help toggle"))
        await press(pilot, "enter")
        shown = " ".join(re.sub(r".*?│  (.*)│.*", r"\1", line) for line in text_of(pilot))
        assert "so that the KV cache is consistent; --keep-cache leaves it as it is." in " ".join(
            shown.split()
        )


async def test_after_a_comparison_the_cursor_is_on_the_first_wrong_operation(bench: Bench) -> None:
    async with bench(path=BIASES) as pilot:
        await press(pilot, "7")
        pilot.app.screen.look(Where(step=0))  # type: ignore[attr-defined]
        await settle(pilot)
        assert any("embed   right" in line for line in text_of(pilot))
        pane = pilot.app.screen.front  # type: ignore[attr-defined]
        pane.progress([CommandStage("golden reference", 1, 2, 0.1)])
        pane.progress([])
        await settle(pilot)
        assert any("layers.0.attn.q_proj   wrong" in line for line in text_of(pilot))


async def test_theme_in_the_palette_finds_themes_alone(bench: Bench) -> None:
    async with bench(path=BIASES) as pilot:
        await press(pilot, "ctrl+p", *"theme")
        shown = text_of(pilot)
        assert any("Theme: lockstep-light" in line for line in shown)
        assert not any("Toggle:" in line for line in shown)


async def test_a_finding_is_no_error_in_the_journal(bench: Bench) -> None:
    async with bench(path=BIASES) as pilot:
        for line in ("golden", "brek logits"):
            await press(pilot, "colon")
            pilot.app.post_message(events.Paste(line))
            await press(pilot, "enter")
        await press(pilot, "8")
        found = [line for line in text_of(pilot) if " finding " in line]
        assert len(found) == 1
        assert "cause: layers.*.attn.{q,k,v}_proj" in found[0]
        assert any(" error " in line and "did you mean break" in line for line in text_of(pilot))


async def test_ctrl_z_stops_the_whole_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, int] | str] = []
    async with bench(path=BIASES) as pilot:
        driver = type(pilot.app._driver)
        monkeypatch.setattr(driver, "can_suspend", property(lambda self: True))
        monkeypatch.setattr(driver, "suspend_application_mode", lambda self: done.append("terminal left"))
        monkeypatch.setattr(os, "killpg", lambda group, number: done.append((group, number)))
        pilot.app.action_suspend_process()
    assert done == ["terminal left", (os.getpgrp(), signal.SIGSTOP)]
