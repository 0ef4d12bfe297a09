"""docs/library.md and the example notebook do what they state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.documents import blocks_of_notebook, blocks_of_page, not_printed, run_blocks
from tests.workbench.library.safe_html import Shown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "library.md"
NOTEBOOK = ROOT / "examples" / "first_look.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_runs_and_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of_page(PAGE)
    assert len(blocks) >= 6
    for block, printed, _ in run_blocks(blocks):
        assert not_printed(block.shown, printed) is None, f"{block.code}\nprinted:\n{printed}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_and_shows_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [value for _, _, value in run_blocks(blocks_of_notebook(NOTEBOOK)) if value is not None]
    pages = [Shown(value._repr_html_()).text for value in shown]
    assert any("layers.0.attn.q_proj" in page and "ledger" in page for page in pages)
    assert sum(hasattr(value, "_repr_svg_") for value in shown) >= 2


def test_the_notebook_is_one_and_has_no_outputs() -> None:
    reported = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (reported["nbformat"], reported["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in reported["cells"]}) == len(reported["cells"])
    for cell in reported["cells"]:
        assert cell["cell_type"] in ("code", "markdown")
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)


def test_a_line_that_is_not_printed_is_found() -> None:
    assert not_printed(("a", "…", "c d…"), "a\nb\nc d e\n") is None
    assert not_printed(("b", "a"), "a\nb\n") == "a"
    assert not_printed(("a",), "a b\n") == "a"
