"""The KV pane: what can be read from it, at every size, between steps and inside one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.format import codec
from lockstep.sessions.records import SequenceStep, StepInFlight, TensorRecord
from lockstep.workbench.tui.panes.cache import CachePane
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.words.numbers import number
from tests.sessions.samples import tamper
from tests.workbench.tui.conftest import Bench, press, settle, text_of
from tests.workbench.tui.synthetic import HEAD_DIM, LAYERS, RANKS, build

pytestmark = pytest.mark.sampled_file(2)

SIZES = [(80, 24), (120, 40), (200, 60)]


def _pane(pilot) -> CachePane:
    pane = pilot.app.screen.front
    assert isinstance(pane, CachePane)
    return pane


def _map(pilot, name: str) -> Heatmap:
    return _pane(pilot).query_one(f"#{name}", Heatmap)


def _lines(heatmap: Heatmap) -> list[str]:
    return [line.text for line in heatmap.render_lines(heatmap.size.region)]


def _rows(layer: int, rank: int, length: int, step: int) -> TensorRecord:
    rng = np.random.default_rng(1000 * layer + rank)
    array = rng.normal(size=(64, 1, HEAD_DIM)).astype(np.float32)[:length]
    return TensorRecord(f"layers.{layer}.attn.k_cache", rank, 0, array, "float32")


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """The usual session, where a rank lacks two rows of a layer after step 7: what does not need a map has none."""
    path = build(tmp_path / "broken.session", nan_from=None)
    blob = codec.encode_ints([15, 15, 15, 15, 15, 13, 15, 15])
    return tamper(path, "UPDATE sequences SET kv_lens = ? WHERE step = 7 AND branch = 0", arguments=(blob,))


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """Three steps, the keys of the last two captured."""
    path = build(tmp_path / "kv.session", nan_from=None, fork=False, emitted=[9, 10, 5])
    with SessionWriter.reopen(path) as writer:
        for step in (1, 2):
            writer.tensors(
                0,
                step,
                [_rows(layer, rank, 8 + step, step) for layer in range(LAYERS) for rank in range(RANKS)],
            )
    blob = codec.encode_ints([8] * 7 + [7])
    return tamper(path, "UPDATE sequences SET kv_lens = ? WHERE step = 0 AND branch = 0", arguments=(blob,))


@pytest.mark.parametrize("size", SIZES)
async def test_the_pool_is_reported_in_blocks_and_bytes_and_drawn(
    bench: Bench, size: tuple[int, int]
) -> None:
    async with bench(size=size) as pilot:
        await press(pilot, "3")
        text = re.sub(r"\s+", " ", "\n".join(text_of(pilot)).replace("│", " "))
        assert "5 of 64 blocks of 4, 8 %" in text
        # keys and values, 4 layers, 1 KV head of 32 on a rank, 4 rows of float32: 4096 bytes a block
        assert "20.0 KiB of 256 KiB per rank" in text
        assert "block 0 0█ 0█ 0█ 0█ 0▆" in text
        assert "59 more, never used" in text
        assert "sequence 0 rows 19 rank 0 19 rank 1 19 =" in text
        assert "block 0 4/4 write a haiku about" in text, "which tokens, where there is no map"
        assert "block 4 3/4" in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", SIZES)
async def test_rows_over_steps_fill_the_pane_with_labelled_rows(
    bench: Bench, uneven: Path, size: tuple[int, int]
) -> None:
    async with bench(path=uneven, size=size) as pilot:
        await press(pilot, "3")
        lengths = _map(pilot, "lengths")
        lines = _lines(lengths)
        assert lines[0].startswith("layer↓ step→ 0 ")
        assert re.findall(r"\d+", lines[0])[-1] == "11"
        assert [found[0] for line in lines if (found := re.match(r"\d r\d", line))] == [
            f"{layer} r{rank}" for layer in range(LAYERS) for rank in range(RANKS)
        ]
        assert re.match(r"0 +19\.0  rows cached", [line for line in lines if line.strip()][-1])
        assert lengths.outer_size.width >= _pane(pilot).size.width - 2
        pixels, margin = lengths._pixels, lengths._margin
        filled = (
            len(pixels.columns) / (lengths.size.width - margin.left),
            len(pixels.rows) / (2 * (lengths.size.height - 2)),
        )
        assert max(filled) >= 0.8
        await press(pilot, "end", "down", "down", "down")
        assert lengths.cursor == (3, 11)
        assert any("layer 1 rank 1   after step 11: 19 rows cached" in line for line in text_of(pilot))
        cursor = next(line for line in _lines(lengths) if "◆" in line or line.startswith("1 r1"))
        assert cursor.startswith("1 r1"), "the cursor is on its row"


async def test_a_length_that_disagrees_is_marked_where_it_began(bench: Bench, uneven: Path) -> None:
    async with bench(path=uneven) as pilot:
        await press(pilot, "3")
        lengths = _map(pilot, "lengths")
        assert lengths.matrix is not None
        assert lengths.matrix.marks == {(3, 7)}
        assert sum("•" in line for line in _lines(lengths)) == 1
        lengths.cursor = (3, 7)
        await settle(pilot)
        text = "\n".join(text_of(pilot))
        assert "layer 1 rank 1   after step 7: 13 rows cached   its positions ask for 15" in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", SIZES)
async def test_norms_have_labelled_rows_and_the_cursor_is_on_its_row(
    bench: Bench, captured: Path, size: tuple[int, int]
) -> None:
    async with bench(path=captured, size=size) as pilot:
        await press(pilot, "3")
        norms = _map(pilot, "norms")
        lines = _lines(norms)
        assert lines[0].startswith("layer↓ slot→ 0 write")
        assert [found[0] for line in lines if (found := re.match(r"\d r\d", line))] == [
            f"{layer} r{rank}" for layer in range(LAYERS) for rank in range(RANKS)
        ]
        assert any("L2 norm of the cached keys" in line for line in lines)
        norms.focus()
        await press(pilot, "down", "down", "right")
        expected = float(np.sqrt((_rows(1, 0, 10, 2).array[1].astype(np.float64) ** 2).sum()))
        text = "\n".join(text_of(pilot))
        assert f"layer 1 rank 0   slot 1 “ a”   {number(expected, 4)}" in text
        drawn = _lines(norms)
        at = next(y for y, line in enumerate(drawn) if "◆" in line)
        label = next(line for line in reversed(drawn[1 : at + 1]) if line[:1].isdecimal())
        assert label.startswith("1 r0")


async def test_m_changes_the_map_where_only_one_fits_and_reports_it(bench: Bench, captured: Path) -> None:
    async with bench(path=captured, size=(80, 24)) as pilot:
        await press(pilot, "3")
        assert (_map(pilot, "norms").display, _map(pilot, "lengths").display) == (True, False)
        await press(pilot, "m")
        assert (_map(pilot, "norms").display, _map(pilot, "lengths").display) == (False, True)
        assert any("rows cached after each step" in line for line in text_of(pilot)[-3:])
    async with bench(path=captured, size=(120, 50)) as pilot:
        await press(pilot, "3")
        assert _map(pilot, "norms").display
        assert _map(pilot, "lengths").display


async def test_blocks_that_were_given_back_and_shared_ones_are_reported(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "batch.session"
    build(path, nan_from=None, fork=False, emitted=[9, 10])
    with SessionWriter.reopen(path) as writer, Session.open(path) as session:
        record = session.step(1)
        reported = record.sequences[0]
        first = replace(reported, block_table=[0, 1, 4])  # block 2 is given back
        other = replace(reported, seq=1, block_table=[3, 1], positions=[6], kv_lens=[[7] * LAYERS] * RANKS)
        writer.step(
            0,
            replace(
                record,
                step=2,
                sequences=[replace(first, positions=[9], kv_lens=[[10] * LAYERS] * RANKS), other],
            ),
        )
    async with bench(path=path) as pilot:
        await press(pilot, "3")
        text = re.sub(r" +", " ", "\n".join(text_of(pilot)))
        assert "block 0 0█ 0◆ ○ 1█ 0▄" in text
        assert "○ given back" in text
        assert "◆ in two tables" in text
        strips = [line.split() for line in text.splitlines() if "growth" in line]
        assert [line[-6:] for line in strips] == [
            ["sequence", "0", "8", "→", "10", "rows"], ["sequence", "1", "7", "→", "7", "rows"],
        ]  # fmt: skip
        assert "every layer and rank alike" in text


async def test_inside_a_step_the_rows_just_written_are_shown(bench: Bench, captured: Path) -> None:
    with Session.open(captured) as session:
        names = [tap.name for tap in session.taps]
        shape, sums = session.stats(2).shape, session.checksums(2)
    place = names.index("layers.1.attn.scores")
    tensors = [_rows(layer, rank, 11, 3) for layer in (0, 1) for rank in range(RANKS)]
    flight = StepInFlight(
        3, place, [SequenceStep(0, [5], [10], ())], np.zeros(shape, np.float32), sums, tensors
    )
    writer = SessionWriter.reopen(captured)
    try:
        writer.in_flight(0, flight)
        async with bench(path=captured) as pilot:
            await press(pilot, "3")
            pilot.app.screen.look(replace(pilot.app.screen.where, step=3, tap=place))
            await settle(pilot)
            text = "\n".join(text_of(pilot))
            assert "step 3 is under way: slot 10 “ rain”" in text
            assert "written in layers 0–1   layers 2–3 to come" in text
            assert "below: after step 2" in text
            assert "rows 10  rank 0 10  rank 1 10  =" in text
            assert "has not come here yet" not in text, "it is of this step"
            values = _map(pilot, "norms").matrix.values
            assert values.shape == (LAYERS * RANKS, 11)
            assert np.isfinite(values[:4, 10]).all(), "the rows just written"
            assert np.isneginf(values[4:, 10]).all(), "and those that are not there yet"
            assert np.isfinite(values[4:, :10]).all()
            assert "stale" not in text
    finally:
        writer.close()


async def test_inside_the_first_step_only_what_it_writes_is_shown(bench: Bench, tmp_path: Path) -> None:
    with Session.open(build(tmp_path / "model.session", emitted=[9], fork=False)) as session:
        taps, meta = session.taps, session.meta
    names, path = [tap.name for tap in taps], tmp_path / "first.session"
    prompt = list(range(1, 9))
    flight = StepInFlight(
        0, names.index("layers.0.attn.k_rope"), [SequenceStep(0, prompt, list(range(8)), ())]
    )
    writer = SessionWriter.create(path, taps=taps, ranks=RANKS, meta=meta)
    try:
        writer.in_flight(0, flight)
        async with bench(path=path) as pilot:
            await press(pilot, "3")
            text = "\n".join(text_of(pilot))
            assert "step 0 is under way: slots 0–7   written in no layer yet   layers 0–3 to come" in text
            await press(pilot, "6")
            text = "\n".join(text_of(pilot))
            assert "nothing wrong so far   1 of 1 steps looked at" in text
            await press(pilot, "5")
            text = "\n".join(text_of(pilot))
            assert "Step 0 is under way, and has not come here yet." in text
            assert "step -1" not in text
    finally:
        writer.close()
