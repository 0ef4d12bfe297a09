"""Widgets and pure functions by themselves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.app import App, ComposeResult

from lockstep.workbench.debugger.host.options import parse_options, target_of
from lockstep.workbench.debugger.stops.breakpoints import SENTINELS
from lockstep.workbench.export.pooling import ABSENT, FINITE, NAN, pool
from lockstep.workbench.models.identify import completions, identify
from lockstep.workbench.tui import routes, settings
from lockstep.workbench.tui.screens import commands
from lockstep.workbench.tui.screens.starting import StartingScreen
from lockstep.workbench.tui.widgets.fit import fit
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.tui.widgets.plot import bars, curve, greatest, squeeze
from lockstep.workbench.tui.widgets.shading import Matrix
from lockstep.workbench.tui.widgets.sparkline import sparkline
from lockstep.workbench.tui.widgets.token_strip import StripLine, TokenStrip
from lockstep.workbench.views.token_line import TokenCell, TokenRow


@given(st.text(max_size=30), st.integers(1, 30), st.booleans())
def test_fit_is_exact(text: str, width: int, right: bool) -> None:
    assert cell_len(fit(text, width, right=right)) == width


@given(st.lists(st.one_of(st.none(), st.floats(width=32)), max_size=60))
def test_sparklines_are_as_long_as_what_they_show(values: list[float | None]) -> None:
    line = sparkline(values)
    assert len(line) == len(values)
    for value, bar in zip(values, line, strict=True):
        assert (bar == "×") == (value is not None and not math.isfinite(value))


def test_a_statistic_that_hardly_moves_is_flat() -> None:
    assert sparkline([1.0, 1.0001, 0.9999]) == "▁▁▁" or len(set(sparkline([1.0, 1.0001, 0.9999]))) == 1


@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**32 - 1)
)
def test_pooling_keeps_the_strongest_and_its_sign(
    rows: int, columns: int, width: int, height: int, seed: int
) -> None:
    matrix = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    matrix[seed % rows, seed % columns] = -100
    pixels = pool(matrix, width, height)
    assert pixels.values.min() == -100
    assert pixels.values.shape == (len(pixels.rows), len(pixels.columns))
    assert len(pixels.rows) <= height
    assert len(pixels.columns) <= width


def test_pooling_never_loses_a_nan_and_leaves_hidden_cells_out() -> None:
    matrix = np.ones((300, 300), np.float32)
    matrix[123, 45] = np.nan
    assert (pool(matrix, 10, 10).kind == NAN).sum() == 1
    matrix[:, 150:] = -np.inf
    kind = pool(matrix, 10, 10, masked=True).kind
    assert (kind[:, 5:] == ABSENT).all()
    assert (kind[:, :4] != ABSENT).all()
    assert (kind[0, :4] == FINITE).all()


class _One(App[None]):
    def __init__(self, widget: Heatmap | TokenStrip) -> None:
        super().__init__()
        self.widget = widget

    def compose(self) -> ComposeResult:
        yield self.widget


async def test_a_heatmap_shows_nan_as_a_cross_and_its_cursor_stays_inside() -> None:
    values = np.ones((20, 30), np.float32)
    values[7, 11] = np.nan
    values[3, 2] = np.inf
    heatmap = Heatmap(Matrix(values))
    async with _One(heatmap).run_test(size=(30, 10)) as pilot:
        text = "\n".join(line.text for line in heatmap.render_lines(heatmap.size.region))
        assert text.count("×") == 1
        assert text.count("∞") == 1
        await pilot.press("up", "left", "end", "pagedown", "pagedown")
        assert heatmap.cursor == (19, 29)
        heatmap.matrix = Matrix(np.zeros((2, 2), np.float32))
        assert heatmap.cursor == (1, 1)


async def test_the_token_strip_keeps_the_present_token_in_view() -> None:
    strip = TokenStrip()
    async with _One(strip).run_test(size=(40, 1)) as pilot:
        tokens = TokenRow.of([TokenCell(f"token{i}", i) for i in range(10_000)])
        for at in (0, 9_999, 5_000, 17):
            strip.lines = (StripLine(tokens, at),)
            await pilot.pause()
            assert f"token{at}" in strip.render_line(0).text
            assert cell_len(strip.render_line(0).text) == 40


def test_bars_reach_the_top_and_show_the_smallest() -> None:
    lines = bars([0.0, 0.001, 1.0, float("nan"), None], 3)
    assert [line[2] for line in lines] == ["█", "█", "█"]
    assert lines[-1][1] == "▁"
    assert lines[-1][0] == " "
    assert squeeze([1.0, 5.0, 2.0, 3.0], 2) == [5.0, 3.0]


@pytest.mark.parametrize(
    ("line", "do"),
    [
        ("pane attention", "pane"), (":pane 2", "pane"), ("q", "quit"), ("help", "help"), ("export", "export"),
        ("export a.png", "export"), ("theme light", "theme"), ("export script a.txt", None), ("help next", None),
        ("next 3", None), ("export junit", None),
    ],
)  # fmt: skip
def test_the_screens_own_lines_are_distinguished_from_the_debuggers(line: str, do: str | None) -> None:
    act = commands.parse_own(line, ("Operations", "Attention"))
    assert (act.do if act else None) == do
    assert act is None or do != "pane" or act.number == 2


def test_a_pane_that_is_not_there_is_reported_so() -> None:
    with pytest.raises(commands.CommandProblem, match="there are Operations"):
        commands.parse_own("pane nothing", ("Operations",))


def test_settings_errors_name_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    assert settings.load(file) == settings.UserSettings()
    file.write_text('theme = "puce"\n')
    with pytest.raises(settings.SettingsError, match=r"config\.toml: theme"):
        settings.load(file)
    file.write_text("colour = 1\n")
    with pytest.raises(settings.SettingsError, match="colour"):
        settings.load(file)
    for wrong in ('"soon"', "0", "true", "nan"):
        file.write_text(f"start_timeout = {wrong}\n")
        with pytest.raises(
            settings.SettingsError, match=r"config\.toml: start_timeout = .*number of seconds"
        ):
            settings.load(file)
    for wrong in ('"nan"', '["golden"]', "[1]", "true"):
        file.write_text(f"catch = {wrong}\n")
        with pytest.raises(settings.SettingsError, match=r"config\.toml: catch = .*'nan', 'inf', 'desync'"):
            settings.load(file)
    assert set(settings.CATCHABLE) == {*SENTINELS} - {"golden"}
    settings.save("theme", "lockstep-light", file.with_name("fresh.toml"))
    assert settings.load(file.with_name("fresh.toml")).theme == "lockstep-light"


def test_the_timeouts_reach_the_host_and_the_command_line_has_the_better_of_the_file(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("timeout = 7\nstart_timeout = 900.5\n")
    screen = routes.running(["demo", "--timeout", "9.0"], "demo")(settings.load(file))
    assert isinstance(screen, StartingScreen)
    launch = parse_options(["--socket", "s", *screen.driver.arguments]).launch
    assert launch is not None
    assert (launch.timeout, launch.start_timeout) == (9.0, 900.5)
    config = target_of(launch).config
    assert (config.timeout_seconds, config.start_timeout_seconds) == (9.0, 900.5)


def test_recent_things_are_remembered_newest_first(tmp_path: Path) -> None:
    memory = tmp_path / "state" / "recent.json"
    for name in ("a", "b", "a"):
        (tmp_path / name).write_text("")
        settings.remember(tmp_path / name, memory)
    assert [path.name for path in settings.recent(memory)] == ["a", "b"]
    memory.write_text("not json")
    assert settings.recent(memory) == []


def test_what_is_opened_is_identified(session: Path, tmp_path: Path) -> None:
    assert identify(str(session)).summary == "Demo-3.5M: 12 steps, 2 ranks, 2 branches"
    (tmp_path / "bad.session").write_text("no database")
    assert identify(str(tmp_path / "bad.session")).kind == "nothing"
    assert identify(str(tmp_path)).kind == "directory"
    assert "there is no" in identify("/nowhere/at/all").summary
    assert completions(str(session)[:-4]) == [str(session)]


def test_a_curve_over_its_floor() -> None:
    lines = curve([0.0, 3.0, math.nan, None], [-1.0, -1.0, None, None], 2)
    assert ["".join(text for text, _ in line) for line in lines] == [" ⠉× ", "⠒⡀  "]
    assert curve([None], [None], 2) == [[(" ", "quiet")]] * 2


def test_the_greatest_of_a_share_with_nan_is_nan() -> None:
    assert greatest([1.0, None, 2.0]) == 2.0
    assert greatest([None]) is None
    for shuffled in ([math.nan, 2.0], [2.0, math.nan]):
        assert math.isnan(greatest(shuffled) or 0)
        assert math.isnan(squeeze([*shuffled, 0.0, 0.0], 2)[0] or 0)
