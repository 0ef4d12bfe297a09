"""The Tensor pane: it fills its space, shows what each row and value is, and takes the keys of everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from textual.pilot import Pilot

from lockstep.engine.taps.names import tap_specs
from lockstep.sessions import SessionWriter
from lockstep.sessions.meta import ConfigMeta, ModelMeta, SessionMeta
from lockstep.sessions.records import SequenceStep, StepRecord, Tap, TensorRecord
from lockstep.workbench.tui.panes.tensor import TensorPane
from lockstep.workbench.tui.screens.workbench import WorkbenchScreen
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from tests.workbench.tui.conftest import Bench, enter, press, settle, text_of
from tests.workbench.tui.synthetic import TEXTS

pytestmark = pytest.mark.sampled_file(2)

HEADS, HEAD_DIM, PROMPT = 8, 32, [1, 2, 3, 4]
STEPS, RANKS, LAYERS = 3, 2, 2
RANDOM = np.random.default_rng(3)
#: By tap and step, the whole tensor.
WHOLE: dict[tuple[str, int], np.ndarray] = {}


def tensors(layer: int, step: int, positions: list[int]) -> list[TensorRecord]:
    """q_proj, the cache, scores and the gate, cut over two ranks."""
    new, known = len(positions), positions[-1] + 1
    scores = RANDOM.normal(0, 5, (HEADS, new, known)).astype(np.float32)
    scores[:, ~np.tril(np.ones((new, known), bool), known - new)] = -np.inf
    made = {
        "attn.q_proj": RANDOM.normal(0, 2, (new, HEADS * HEAD_DIM)).astype(np.float32),
        "attn.k_cache": RANDOM.normal(0, 2, (known, 2, HEAD_DIM)).astype(np.float32),
        "attn.scores": scores,
        "mlp.gate": RANDOM.normal(0, 2, (new, 768)).astype(np.float32),
    }
    made["attn.q_proj"][-1, 3 * HEAD_DIM + 5] = 77.125
    if step == 2:
        made["mlp.gate"][0, 300] = np.nan
    found = []
    for name, whole in made.items():
        tap = f"layers.{layer}.{name}"
        WHOLE[tap, step] = whole
        dim = 0 if name == "attn.scores" else 1
        found += [TensorRecord(tap, r, 0, half, "float32") for r, half in enumerate(np.split(whole, 2, dim))]
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with tensors of two layers on two ranks."""
    file = tmp_path_factory.mktemp("tensors") / "tensors.session"
    specs = tap_specs(LAYERS)
    taps = [Tap(i, spec.name, str(spec.layout)) for i, spec in enumerate(specs)]
    model = ModelMeta(name="Some", num_layers=LAYERS, num_heads=HEADS, num_kv_heads=2, head_dim=HEAD_DIM)
    meta = SessionMeta(
        model=model, config=ConfigMeta(device="cpu", dtype="float32", tp=RANKS), token_texts=TEXTS
    )
    with SessionWriter.create(file, taps=taps, ranks=RANKS, meta=meta) as writer:
        for step in range(STEPS):
            ids = PROMPT if step == 0 else [9 + step]
            positions = list(range(4)) if step == 0 else [3 + step]
            sequence = SequenceStep(
                0, ids, positions, [[positions[-1] + 1] * LAYERS] * RANKS, emitted=10 + step
            )
            captured = [one for layer in range(LAYERS) for one in tensors(layer, step, positions)]
            stats = np.zeros((len(taps), RANKS, 8), np.float32)
            sums = np.ones((len(taps), RANKS), np.uint64)
            writer.step(0, StepRecord(step, "decode", [sequence], 0.1, stats, sums, captured))
    return file


def pane_of(pilot: Pilot[int]) -> TensorPane:
    screen = pilot.app.screen
    assert isinstance(screen, WorkbenchScreen)
    assert isinstance(screen.front, TensorPane)
    return screen.front


def shown(pilot: Pilot[int]) -> str:
    return "\n".join(text_of(pilot))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize(("tap", "step"), [("attn.q_proj", 1), ("mlp.gate", 1), ("attn.q_proj", 0)])
async def test_a_tensor_fills_its_space(
    bench: Bench, path: Path, size: tuple[int, int], tap: str, step: int
) -> None:
    async with bench(path=path, size=size) as pilot:
        await enter(pilot, "colon", f"goto {step}")
        await enter(pilot, "colon", f"print layers.1.{tap}")
        heatmap = pane_of(pilot).query_one(Heatmap)
        pixels = heatmap._pixels
        assert pixels is not None
        room = heatmap.size.width - heatmap._margin.left, 2 * (heatmap.size.height - 2)
        covered = len(pixels.columns) * len(pixels.rows)
        assert covered >= 0.65 * room[0] * room[1]
        assert pixels.rows.max() >= 3
        assert heatmap.matrix is not None
        assert heatmap.matrix.scale == "difference", "values with a sign are on the diverging map"


async def test_rows_and_values_report_what_they_are(bench: Bench, path: Path) -> None:
    async with bench(path=path) as pilot:
        await enter(pilot, "colon", "goto 1")
        await enter(pilot, "colon", "print layers.0.attn.q_proj")
        lines = shown(pilot)
        assert "layers.0.attn.q_proj  all ranks  1×8×32 float32" in lines
        assert "head × channel" in lines
        for head in range(HEADS):
            assert any(f" head {head} " in line for line in text_of(pilot))
        await press(pilot, "u")  # to the largest
        lines = shown(pilot)
        assert "value   77.125" in lines
        assert f"0x{np.float32(77.125).view(np.uint32):08x}" in lines
        for stated in ("token   4", "head    3", "channel 5", "rank    0"):
            assert stated in lines
        whole = WHOLE["layers.0.attn.q_proj", 1]
        assert f"min  {whole.min():.3f}" in lines
        assert "max  77.12" in lines
        await press(pilot, "down", "down")
        value = whole.reshape(HEADS, HEAD_DIM)[5, 5]
        assert f"value   {np.format_float_positional(value)}" in shown(pilot), "the exact float32"
        assert "rank    1" in shown(pilot)
        assert "▁" in lines or "█" in lines, "a histogram"


async def test_one_ranks_part_has_its_own_heads_and_other_layouts(bench: Bench, path: Path) -> None:
    async with bench(path=path) as pilot:
        await enter(pilot, "colon", "goto 0")
        await enter(pilot, "colon", "print layers.0.attn.q_proj")
        assert "token·head × channel" in shown(pilot)
        await press(pilot, "R", "R")
        lines = shown(pilot)
        assert "rank 1  4×4×32" in lines
        assert "head    4" in lines, "its first head is the fifth"
        await press(pilot, "m")
        assert "head × channel of one token: 0 write of 4" in shown(pilot)
        await press(pilot, "greater_than_sign", "greater_than_sign")
        assert "of one token: 2  haiku of 4" in shown(pilot)
        await press(pilot, "m")
        assert "token × channel of one head: head 4 of 4" in shown(pilot)
        await press(pilot, "less_than_sign")
        assert "of one head: head 7 of 4" in shown(pilot)
        await press(pilot, "R")
        assert "all ranks  4×8×32" in shown(pilot)


async def test_the_keys_of_everywhere_step_and_help(bench: Bench, path: Path) -> None:
    async with bench(path=path) as pilot:
        await enter(pilot, "colon", "goto 0")
        await enter(pilot, "colon", "print layers.0.attn.scores")
        lines = shown(pilot)
        assert "query × key of one head: head 0 of 8" in lines
        scores = WHOLE["layers.0.attn.scores", 0][0]
        seen = scores[np.isfinite(scores)]
        assert f"zeros 0 of {seen.size}" in lines, "what the mask hides is not counted"
        assert "Inf  0" in lines
        assert "masked" in lines
        await press(pilot, "right_square_bracket")
        assert "head × key" in shown(pilot), "a decode step: all heads of its one query"
        assert "step 1/2" in shown(pilot)
        await press(pilot, "n")
        assert "step 2/2" in shown(pilot)
        await press(pilot, "full_stop")
        assert "layers.1.attn.scores" in shown(pilot)
        await press(pilot, "question_mark")
        assert "9  Tensor" in shown(pilot)
        assert "previous, next token or head" in shown(pilot)
        await press(pilot, "escape", "escape")
        assert "over steps" in shown(pilot), "back in the list of operations"


async def test_a_tensor_that_comes_late_takes_the_keys(bench: Bench, path: Path) -> None:
    async with bench(path=path) as pilot:
        await press(pilot, "9")
        assert "embed was not captured at step 2" in shown(pilot)
        await press(pilot, "escape")
        assert "over steps" in shown(pilot), "back also from a pane that shows nothing"
        await press(pilot, "9")
        await enter(pilot, "colon", "print layers.0.mlp.gate")
        await press(pilot, "right", "down")
        assert pane_of(pilot).query_one(Heatmap).cursor == (1, 1)


async def test_nan_is_drawn_reported_and_found(bench: Bench, path: Path) -> None:
    async with bench(path=path) as pilot:
        await enter(pilot, "colon", "goto 2")
        await enter(pilot, "colon", "print layers.1.mlp.gate")
        lines = shown(pilot)
        assert "×" in lines
        assert "NaN  1" in lines
        assert "NaN  c 300" in lines, "first among the largest"
        await press(pilot, "u")
        assert "channel 300" in shown(pilot)
        assert "value   NaN" in shown(pilot)


async def test_a_tensor_is_copied_and_exported_with_its_places(
    bench: Bench, path: Path, tmp_path: Path
) -> None:
    async with bench(path=path) as pilot:
        await enter(pilot, "colon", "goto 1")
        await enter(pilot, "colon", "print layers.0.attn.k_cache")
        await press(pilot, "m", "m")
        assert "token × channel of one kv head: kv head 0 of 2" in shown(pilot)
        assert any(" 0 write " in line for line in text_of(pilot)), "rows are tokens"
        await enter(pilot, "colon", f"export {tmp_path / 'out.csv'}")
        await settle(pilot)
        written = (tmp_path / "out.csv").read_text().splitlines()
        assert written[0].startswith("row,0,1,2,")
        assert len(written) == 1 + 5
        assert written[1].startswith("0 write,")
        values = [float(cell) for cell in written[2].split(",")[1:]]
        assert np.allclose(values, WHOLE["layers.0.attn.k_cache", 1][1, 0])
