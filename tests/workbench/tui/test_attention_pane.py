"""The attention pane: what can be read from it, at every size."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.records import SequenceStep, StepInFlight
from lockstep.workbench.tui.panes.attention import AttentionPane
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.tui.widgets.multiples import Multiples
from lockstep.workbench.words.numbers import number
from tests.workbench.tui import synthetic
from tests.workbench.tui.conftest import Bench, press, settle, text_of
from tests.workbench.tui.synthetic import PROMPT, TEXTS, build

pytestmark = pytest.mark.sampled_file(2)

SIZES = [(80, 24), (120, 40), (200, 60)]


def _pane(pilot) -> AttentionPane:
    pane = pilot.app.screen.front
    assert isinstance(pane, AttentionPane)
    return pane


def _heatmap(pilot) -> Heatmap:
    return _pane(pilot).query_one(Heatmap)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", SIZES)
async def test_all_heads_stand_under_their_names_on_one_scale(bench: Bench, size: tuple[int, int]) -> None:
    async with bench(size=size) as pilot:
        await press(pilot, "2")
        text = "\n".join(text_of(pilot))
        assert "layer 0 probs   q 0…18 × k 0…18   8 heads" in text
        for head in range(8):
            assert f"{head} r{head // 4} kv{head // 4}" in text
        assert re.search(r"0 +1\.00 ", text), "the scale has both its numbers"
        assert "row sum 1.0000" in text
        assert "attends 19 of 19 positions" in text
        await press(pilot, "right", "right", "down")
        assert _pane(pilot).head == 3
        assert "head 3 rank 0 kv 0" in "\n".join(text_of(pilot))


@pytest.mark.parametrize("size", SIZES)
async def test_a_large_head_has_its_tokens_on_both_axes(bench: Bench, size: tuple[int, int]) -> None:
    async with bench(size=size) as pilot:
        await press(pilot, "2", "m")
        heatmap = _heatmap(pilot)
        lines = [line.text for line in heatmap.render_lines(heatmap.size.region)]
        assert lines[0].startswith("q↓ k→")
        named = re.findall(r"(\d+) +\S+", lines[0])
        assert len(named) >= 5
        assert named == sorted(named, key=int)
        assert "0 write" in lines[0]
        rows = [line.split()[0] for line in lines[1:-1] if line[:1].isdecimal()]
        assert rows[0] == "0"
        assert len(rows) >= min(19, len(lines) - 3)
        scale = [line for line in lines if line.strip()][-1]
        assert scale.startswith("0 ")
        assert "1.00  probability" in scale
        assert "pooled" not in scale


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keys", ["2", "2 m", "2 m m"])
async def test_the_maps_fill_the_pane(bench: Bench, size: tuple[int, int], keys: str) -> None:
    async with bench(size=size) as pilot:
        await press(pilot, *keys.split())
        pane = _pane(pilot)
        shown = list(pane.query("#maps > .-shown"))
        assert sum(widget.outer_size.width for widget in shown) >= pane.size.width - 2
        assert all(widget.outer_size.height >= pane.size.height - 6 for widget in shown)
        heatmap = _heatmap(pilot)
        if heatmap in shown:
            pixels, margin = heatmap._pixels, heatmap._margin
            assert len(pixels.columns) >= 0.8 * (heatmap.size.width - margin.left)
            each = len(pixels.rows) // (pixels.rows[-1] + 1)  # pixels of a row, two to a line
            assert len(pixels.rows) == each * (pixels.rows[-1] + 1)
            assert 2 * (heatmap.size.height - 2) < (each // 2 * 2 + 2) * (pixels.rows[-1] + 1), (
                "no taller ones fit"
            )
        tiles = pane.query_one(Multiples)
        if tiles in shown:
            across, width, height = tiles._layout()
            assert across * (width + 2) >= 0.8 * tiles.size.width
            assert -(-8 // across) * (height + 1) >= 0.8 * tiles.size.height


async def test_the_cursor_names_query_key_value_and_the_figures_of_its_row(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "2", "m", "home", *["up"] * 18, "down", "down", "right")
        heatmap = _heatmap(pilot)
        assert heatmap.matrix is not None
        assert heatmap.matrix.values.shape == (19, 19)
        assert heatmap.cursor == (2, 1)
        row = heatmap.matrix.values[2]
        text = " ".join(" ".join(text_of(pilot)[-4:]).split())
        assert "head 0 rank 0 kv 0 q 2 “ haiku” k 1 “ a”" in text
        assert number(float(row[1]), 4) in text
        share = row[:3].astype(np.float64)
        assert f"entropy {-(share * np.log(share)).sum():.2f}" in text
        assert "attends 3 of 3 positions" in text
        await press(pilot, "right", "right")
        assert "hidden by the mask" in "\n".join(text_of(pilot))


async def test_rows_of_the_newest_query_have_labels_and_sums(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "2", "m", "m")
        lines = text_of(pilot)
        assert any("q 18 “ drip” in all heads" in line for line in lines)
        assert sum(bool(re.search(r"\b1\.0000 \d\.\d\d", line)) for line in lines) == 8
        heatmap = _heatmap(pilot)
        beside = [line.text[:8] for line in heatmap.render_lines(heatmap.size.region)]
        assert [label for label in beside if "kv" in label] == [f"{h} r{h // 4} kv{h // 4}" for h in range(8)]
        assert lines[-2].startswith(" the newest query in every head"), "the key stated what it did"


async def test_enter_on_a_small_head_shows_it_large(bench: Bench) -> None:
    async with bench(size=(80, 24)) as pilot:
        await press(pilot, "2")
        _pane(pilot).query_one(Multiples).focus()
        await press(pilot, "end", "enter")
        assert _pane(pilot).mode == "head"
        assert any("head 7 r1 kv1" in line for line in text_of(pilot))
        assert _heatmap(pilot).has_focus


async def test_the_newest_query_stays_under_the_cursor_while_the_text_grows(bench: Bench) -> None:
    async with bench() as pilot:
        await press(pilot, "2", "m", "left_square_bracket")
        assert _heatmap(pilot).cursor[0] == 17
        await press(pilot, "right_square_bracket")
        assert _heatmap(pilot).cursor[0] == 18


async def test_what_there_was_no_room_for_is_reported(bench: Bench, tmp_path: Path) -> None:
    path = build(tmp_path / "thin.session", nan_from=None, fork=False, emitted=[9])
    with Session.open(path) as session:
        whole = [session.capture("layers.0.attn.probs", step=0, rank=rank) for rank in range(2)]
        record = session.step(0)
    thin = [
        replace(one, tap="layers.0.attn.scores", array=one.array[:, -4:, [0, 5]], slice=":,-4:,{0;5}")
        for one in whole
        if one is not None
    ]
    assert len(record.sequences[0].ids) == len(PROMPT)
    with SessionWriter.reopen(path) as writer:
        writer.tensors(0, 0, thin)
    async with bench(path=path) as pilot:
        await press(pilot, "2", "v")
        text = "\n".join(text_of(pilot))
        assert "kept: the 2 strongest of 8 keys, the rows of the last 4 of 8 tokens" in text
        assert "q 4…7 × k 0…7" in text
        values = _heatmap(pilot).matrix.values
        assert np.flatnonzero(np.isfinite(values).any(axis=0)).tolist() == [0, 5]


async def test_nan_and_infinity_are_glyphs_that_the_scale_explains(bench: Bench, tmp_path: Path) -> None:
    path = build(tmp_path / "odd.session", nan_from=None, fork=False, emitted=[9])
    with Session.open(path) as session:
        parts = [session.capture("layers.0.attn.probs", step=0, rank=rank) for rank in range(2)]
    odd = []
    for one in parts:
        assert one is not None
        array = one.array.copy()
        array[0, 3, 1], array[0, 5, 2] = np.nan, np.inf
        odd.append(replace(one, tap="layers.0.attn.scores", array=array))
    with SessionWriter.reopen(path) as writer:
        writer.tensors(0, 0, odd)
    async with bench(path=path) as pilot:
        await press(pilot, "2", "v", "m")
        text = "\n".join(text_of(pilot))
        assert "× NaN  ∞ Inf" in text
        assert text.count("×") > 2
        assert "∞" in text.replace("∞ Inf", "")


async def test_inside_a_step_the_layer_that_has_just_passed_is_shown(bench: Bench, tmp_path: Path) -> None:
    path = build(tmp_path / "flight.session", nan_from=None, fork=False, emitted=[9, 10])
    with Session.open(path) as session:
        names = [tap.name for tap in session.taps]
        parts = [session.capture("layers.1.attn.probs", step=1, rank=rank) for rank in range(2)]
        shape, sums = session.stats(1).shape, session.checksums(1)
    wider = [
        replace(one, array=np.pad(one.array, ((0, 0), (0, 0), (0, 1))) + np.float32(0.001))
        for one in parts
        if one is not None
    ]
    place = names.index("layers.2.attn_norm")
    flight = StepInFlight(
        2, place, [SequenceStep(0, [10], [9], ())], np.zeros(shape, np.float32), sums, wider
    )
    writer = SessionWriter.reopen(path)
    try:
        writer.in_flight(0, flight)
        async with bench(path=path) as pilot:
            await press(pilot, "2", "m")
            pane = _pane(pilot)
            screen = pilot.app.screen
            screen.look(replace(screen.where, step=2, tap=place))
            await settle(pilot)
            assert pane.snapshot is not None
            assert (pane.snapshot.layer, pane.snapshot.step) == (1, 2)
            text = "\n".join(text_of(pilot))
            assert "layer 1 probs" in text
            assert f"q 9 “{TEXTS[10]}”" in text
            assert "has not come here yet" not in text
            await press(pilot, "full_stop")  # one that has not passed
            assert (pane.snapshot.layer, pane.snapshot.step) == (3, 1)
            assert "of step 1: step 2 has not come here yet" in "\n".join(text_of(pilot))
    finally:
        writer.close()


async def test_scores_are_offered_only_where_there_are_some(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench() as pilot:
        await press(pilot, "2")
        assert "v scores" in text_of(pilot)[-1]
    without = [
        spec for spec in synthetic.tap_specs(synthetic.LAYERS) if not spec.name.endswith("attn.scores")
    ]
    monkeypatch.setattr(synthetic, "tap_specs", lambda layers: without)
    path = build(tmp_path / "imported.session", nan_from=None, fork=False, emitted=[9])
    async with bench(path=path) as pilot:
        await press(pilot, "2")
        assert "layer 0 probs" in "\n".join(text_of(pilot))
        assert "scores" not in text_of(pilot)[-1]
        await press(pilot, "v")
        assert "layer 0 probs" in "\n".join(text_of(pilot))
