"""The KV pane's lengths: a line where all layers agree, else layers by ranks, with the wrong ones marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.sessions.format import codec
from lockstep.workbench.tui.panes.cache_lengths import layered, length_lines
from lockstep.workbench.views.kv_cache import CachedSequence
from tests.sessions.samples import tamper
from tests.workbench.tui.conftest import Bench, press, text_of
from tests.workbench.tui.synthetic import build


def _lines(lengths: Sequence[Sequence[int]], width: int = 76) -> list[str]:
    sequence = CachedSequence(0, (18,), 19, tuple(map(tuple, lengths)), (0, 1), ())
    return ["".join(text for text, _ in line).rstrip() for line in length_lines(sequence, width)]


def _wrong(lengths: Sequence[Sequence[int]]) -> list[str]:
    sequence = CachedSequence(0, (18,), 19, tuple(map(tuple, lengths)), (0, 1), ())
    return [text.strip() for line in length_lines(sequence, 76) for text, role in line if role == "wrong"]


WORDS = "≠ its positions ask for 19"


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([[19] * 24] * 2, ["sequence 0   rows 19  rank 0 19  rank 1 19  ="]),
        ([[19], [18]], [f"sequence 0   rows 19  rank 0 19  rank 1 18  {WORDS}"]),  # an older recording
        ([[19] * 24] * 8, ["sequence 0   rows 19  ranks 0–7 19  ="]),
        ([], ["sequence 0   rows 19  cached lengths were not recorded"]),
        (
            [[19, 0, 0, 0], [19, 0, 0, 7]],
            [
                f"sequence 0   rows 19  {WORDS}",
                "   cached          rank 0   rank 1",
                "   layer 0             19       19",
                "   layers 1–2           0        0  ✗",
                "   layer 3              0        7  ✗",
            ],
        ),
        (
            [[19] * 30, [19] * 12 + [18] + [19] * 17, *[[19] * 30] * 6],
            [
                f"sequence 0   rows 19  {WORDS}",
                "   cached           rank 0    rank 1 ranks 2–7",
                "   layers 0–11          19        19        19",
                "   layer 12             19        18        19  ✗",
                "   layers 13–29         19        19        19",
            ],
        ),
    ],
    ids=["agree", "older", "many ranks", "unknown", "shared", "one of many"],
)
def test_lengths_are_collapsed_where_they_agree(lengths: list[list[int]], expected: list[str]) -> None:
    assert _lines(lengths) == expected


def test_only_what_is_wrong_is_marked() -> None:
    assert _wrong([[19, 0, 0, 0], [19, 0, 0, 7]])[1:] == ["0", "0", "✗", "0", "7", "✗"]
    assert _wrong([[19] * 4] * 2) == []


def test_a_width_that_holds_no_more_ranks_cuts_and_reports_it() -> None:
    lines = _lines([[19, rank] for rank in range(12)], width=60)
    assert lines[1] == "   cached          rank 0   rank 1   rank 2   rank 3  …"
    assert lines[3].endswith("…  ✗")
    assert max(map(len, lines[1:])) <= 60


def test_many_lines_of_layers_are_cut_and_counted() -> None:
    lines = _lines([[layer % 2 for layer in range(40)]])
    assert len(lines) == 2 + 16 + 1
    assert lines[-1] == "   and 24 more such lines"


def test_the_table_reports_layers_that_do_not_agree() -> None:
    assert layered([[19, 19], [19, 19]]) == "19 19"
    assert layered([[19, 0, 0], [19, 19, 19]]) == "19×1+0×2 19"
    assert layered([]) == ""


async def test_the_pane_and_the_sentinel_name_the_layers_in_a_small_terminal(
    bench: Bench, tmp_path: Path
) -> None:
    path = build(tmp_path / "broken.session", nan_from=None)
    blob = codec.encode_ints([19, 19, 19, 19, 19, 17, 17, 19])
    tamper(path, "UPDATE sequences SET kv_lens = ? WHERE step = 11 AND branch = 0", arguments=(blob,))
    async with bench(size=(80, 24), path=path) as pilot:
        await press(pilot, "3")
        lines = [line.strip(" │┃▕▏") for line in text_of(pilot)]
        assert "cached          rank 0   rank 1" in lines
        assert "layer 0             19       19" in lines
        assert "layers 1–2          19       17  ✗" in lines
        assert "layer 3             19       19" in lines
        await press(pilot, "6")
        lines = text_of(pilot)
        line = next(line for line in lines[3:] if "● KV length" in line)  # below the header
        assert "sequence 0 has 17 rows in lay" in line
        assert any("sequence 0 has 17 rows in layers 1–2" in line for line in text_of(pilot)), "in full below"
        assert line.rstrip(" │┃▕▏").endswith("1"), "the rank"
