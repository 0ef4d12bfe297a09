"""The `dims` of SGLang's dumper as layouts: `"t h[tp:partial]"`, `"b s (heads*head_dim)[tp] # dp:=attn_dp"`.

The grammar is that of sglang/srt/debug_utils/comparator/dims_spec: a name for each axis ("1" for one that is squeezed),
in brackets the parallel axes over which it is cut or of which it holds a part, and declarations behind "#".
"""

from __future__ import annotations

import re

from lockstep.engine.text import printable
from lockstep.workbench.foreign.passes import ForeignDumpError

_AXIS = re.compile(r"(?P<name>1|[A-Za-z_]\w*|\([\w*]+\))(?:\[(?P<cuts>[^\]]+)\])?", re.ASCII)
_ROWS = ("t", "b", "s")


def layout_of(dims: str) -> str:
    """The layout of a tensor whose token axes became one. ForeignDumpError for what has no layout of ours: rows that
    are spread over ranks, and two axes that are cut."""
    axes = [_AXIS.fullmatch(axis) for axis in dims.partition("#")[0].split()]
    layouts: set[str] = set()
    position = 0  # of the axis, once the token axes are one
    for axis in axes:
        if axis is None:
            raise ForeignDumpError(f"dims {printable(dims)!r}: is not what SGLang's dumper writes")
        for cut in (axis["cuts"] or "").split(","):
            if cut.strip():
                layouts.add(_cut(cut.strip(), axis["name"], position, dims))
        if axis["name"] not in ("b", "1"):
            position += 1
    layouts.discard("")
    if len(layouts) > 1:
        raise ForeignDumpError(
            f"dims {printable(dims)!r}: are cut twice; one layout a tensor can be imported"
        )
    return layouts.pop() if layouts else "replicate"


def _cut(cut: str, name: str, position: int, dims: str) -> str:
    parallel, _, how = cut.partition(":")
    if "partial" in how.split("+") and parallel == "tp":
        return "partial"
    if parallel == "tp" and name not in _ROWS:
        return f"shard({position})"
    if parallel == "recompute_pseudo":
        return ""
    raise ForeignDumpError(
        f"dims {printable(dims)!r}: {printable(name)} is spread over the ranks of {printable(parallel)}; whole rows, "
        "cut by tensor parallelism alone, can be imported"
    )
