"""The code that documents show, run as a reader would: block by block, in one place, with what is printed."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A block of Python and the lines that it is to print."""

    code: str
    shown: tuple[str, ...] = ()


def blocks_of_page(page: Path) -> list[CodeBlock]:
    """The blocks of a Markdown page; a block of `text` right below one is its output."""
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [CodeBlock(code, tuple(shown.splitlines())) for code, shown in found]


def blocks_of_notebook(notebook: Path) -> list[CodeBlock]:
    """The code cells of a notebook."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [CodeBlock("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]


def run_blocks(blocks: list[CodeBlock]) -> Iterator[tuple[CodeBlock, str, Any]]:
    """Run them one after the other in one namespace: each with what it printed and its last expression's value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks):
        tree, place = ast.parse(block.code), f"<block {number}>"
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        out, value = io.StringIO(), None
        with contextlib.redirect_stdout(out):
            exec(compile(tree, place, "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), place, "eval"), names)
        yield block, out.getvalue(), value


def not_printed(shown: tuple[str, ...], printed: str) -> str | None:
    """The first line that is shown and was not printed, in order. A line `…` stands for any, one at the end of a line
    for its rest."""
    lines, at = [line.rstrip() for line in printed.splitlines()], 0
    for line in shown:
        if line == "…":
            continue
        pattern = ".*".join(map(re.escape, line.split("…")))
        found = next((i for i in range(at, len(lines)) if re.fullmatch(pattern, lines[i])), None)
        if found is None:
            return line
        at = found + 1
    return None
