"""The pool of the KV pane: how much of it is used, and each block as a glyph: whose, how full, given back, shared."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.engine.text import bytes_text
from lockstep.workbench.tui.panes.cache_text import Label
from lockstep.workbench.tui.widgets.grid import GridCell
from lockstep.workbench.tui.widgets.text_block import TextLine, flow, folded
from lockstep.workbench.views.block_map import Block
from lockstep.workbench.views.kv_cache import Cache, CachedSequence
from lockstep.workbench.words.plain_text import plural

#: The widest pool bar, the width of a line's label and of a block.
_BAR, _LABEL, _BLOCK = 40, 11, 3
_FILLS = " ▁▂▃▄▅▆▇█"


def pool_lines(snapshot: Cache, ranks: int, width: int) -> list[TextLine]:
    """The occupancy of the pool in blocks and bytes."""
    if snapshot.used is None or snapshot.free is None:
        return [[("pool   ", "strong"), ("not recorded", "quiet")]]
    used, total, size = snapshot.used, snapshot.used + snapshot.free, snapshot.pool.block_bytes
    room = max(8, min(_BAR, width - 66))
    filled = max(round(room * used / total) if total else 0, 1 if used else 0)
    bar: TextLine = [("pool   ", "strong"), ("█" * filled, "trace"), ("░" * (room - filled), "edge")]
    share = f"{100 * used / total if total else 0:.0f} %"
    facts: list[TextLine] = [
        bar,
        [(f"{used} of {total} blocks of {snapshot.block_size}, {share}", "quiet")],
    ]
    if size is not None:
        each = " per rank" if ranks > 1 else ""
        facts.append([(f"{bytes_text(size * used)} of {bytes_text(size * total)}{each}", "quiet")])
    return flow(facts, width, gap=2)


def map_lines(snapshot: Cache, width: int, most: int) -> list[TextLine]:
    """The blocks in their order, on at most `most` lines, and what the glyphs mean."""
    blocks = snapshot.pool.blocks
    if not blocks:
        return []
    across = max(1, (width - _LABEL) // _BLOCK)
    rows = [blocks[first : first + across] for first in range(0, len(blocks), across)]
    lines: list[TextLine] = [
        [(f"block {row[0].number}".ljust(_LABEL), "quiet"), *(_glyph(one, snapshot) for one in row)]
        for row in rows[:most]
    ]
    left = sum(map(len, rows[most:]))
    legend: list[TextLine] = [
        [("0█", "text"), (" a full block of sequence 0", "quiet")],
        [("0▄", "accent"), (" a block partly filled", "quiet")],
        [("○", "quiet"), (" given back", "quiet")] if any(one.freed for one in blocks) else [],
        [("◆", "wrong"), (" in two tables", "wrong")] if snapshot.shared else [],
        [("·", "faint"), (f" {snapshot.pool.beyond} more, never used", "quiet")]
        if snapshot.pool.beyond
        else [],
        [(f"… {left} more blocks in use", "wrong")] if left else [],
    ]
    return [*lines, *([(" " * _LABEL, "quiet"), *line] for line in flow(legend, width - _LABEL))]


def _glyph(block: Block, snapshot: Cache) -> GridCell:
    if not block.owners:
        return ("○" if block.freed else "·").ljust(_BLOCK), "quiet" if block.freed else "faint"
    owner = str(block.owners[0])[-1]
    if len(block.owners) > 1:
        return f"{owner}◆".ljust(_BLOCK), "wrong"
    eighths = -(-8 * block.rows // max(1, snapshot.block_size))
    return f"{owner}{_FILLS[min(8, eighths)]}".ljust(_BLOCK), "text" if eighths >= 8 else "accent"


def table_lines(sequence: CachedSequence, snapshot: Cache, width: int) -> list[TextLine]:
    """A sequence's block table in order, and how full the last block is."""
    if not sequence.blocks:
        return [[("   no block table recorded", "quiet")]]
    facts: list[TextLine] = []
    left = sequence.expected
    for block in sequence.blocks:
        held = max(0, min(snapshot.block_size, left))
        left -= held
        full = held == snapshot.block_size
        role = "wrong" if block in snapshot.shared else "text" if full else "accent"
        facts.append([(f"{block}" if full else f"{block}({held}/{snapshot.block_size})", role)])
    lines = flow(facts, width - _LABEL, gap=1)
    found: list[TextLine] = [
        [("   blocks".ljust(_LABEL) if not i else " " * _LABEL, "quiet"), *line]
        for i, line in enumerate(lines)
    ]
    return [*found, [(f"   ✗ {left} rows have no block", "wrong")]] if left > 0 else found


def token_lines(
    sequence: CachedSequence, snapshot: Cache, label: Label, width: int, most: int
) -> list[TextLine]:
    """Each block of a sequence: how full it is, and the tokens whose rows it holds, on as many lines as they need. Of
    what is more than `most` lines the blocks at the end."""
    size, shown = snapshot.block_size, list[TextLine]()
    for place in reversed(range(len(sequence.blocks))):
        held = range(place * size, min((place + 1) * size, sequence.expected))
        lines = _block_lines(sequence.blocks[place], held, size, label, width)
        if shown and len(shown) + len(lines) > most:
            return [[(f"   {plural(place + 1, 'block')} before", "quiet")], *shown]
        shown = [*lines, *shown]
    return shown


def _block_lines(block: int, held: range, size: int, label: Label, width: int) -> list[TextLine]:
    head = _LABEL + 10  # the cells before the tokens
    first, *rest = folded([(label(one), "quiet") for one in held], max(8, width - head)) or [[]]
    name: TextLine = [
        (f"   block {block}".ljust(_LABEL + 3), "text"),
        (f"{len(held)}/{size}  ".rjust(7), "text" if len(held) == size else "accent"),
    ]
    return [[*name, *first], *([(" " * head, "quiet"), *line] for line in rest)]


def finding_lines(found: Sequence[str], width: int) -> list[TextLine]:
    """What is odd about the cached rows."""
    lines = flow([[(f"✗ {words}", "wrong")] for words in found[:4]], width)
    more: list[TextLine] = [[(f"  and {len(found) - 4} more", "quiet")]] if len(found) > 4 else []
    return [*lines, *more]
