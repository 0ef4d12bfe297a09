"""What `llama-debug --save-logits` leaves of one pass: ids, the last token's logits, and in a log the tensors' sums.

The writers are llama.cpp's examples/debug/debug.cpp (`llamacpp-MODEL.bin`, `llamacpp-MODEL-tokens.bin`) and
common/debug.cpp, whose lines are the same in `llama-eval-callback`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps.names import local_name
from lockstep.sessions.meta import ModelMeta
from lockstep.sessions.records import STATISTICS
from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignFacts, ForeignPass, ForeignTensor
from lockstep.workbench.foreign.readers.files import children, plain_size, shown
from lockstep.workbench.models.llamacpp_taps import TapNames

_TOKENS = "-tokens.bin"
_HEADER = re.compile(
    r"^\S*(?:ggml_debug|common_debug_cb_eval): +(?P<name>.*?) = \((?P<type>\w+)\) +(?P<operation>\w+)\(.*\) = "
    r"\{(?P<shape>\d{1,12}(?:, \d{1,12}){3})\}\s*$"
)
_SUM = re.compile(r"^\s*(?P<which>sum|sum_sq)\s*=\s*(?P<value>\S{1,40})\s*$")
#: Taps whose tensor in llama.cpp is not ours before it was arranged: unscaled, unmasked, padded.
_OTHER = ("attn.scores", "attn.probs", "attn.k_cache", "attn.v_cache")
MAX_LOG = 4 << 30
_LINE = 4096


@dataclass(frozen=True, slots=True)
class LlamaDebugRun:
    """One pass."""

    folder: Path
    tokens: Path
    logits: Path
    log: Path | None

    @property
    def facts(self) -> ForeignFacts:
        reported = () if self.log is None else ("of llama-debug's log means are kept, of all rows together",)
        return ForeignFacts("llama-debug", 1, "", ModelMeta(), "float32", notes=reported)

    def passes(self, rank: int) -> Iterator[ForeignPass]:
        if rank != 0:
            return
        ids = _numbers(self.tokens, "<i4").tolist()
        logits = _numbers(self.logits, "<f4").astype(np.float32)[None]
        last = (len(ids) - 1,) if len(ids) > 1 else None
        tensors = [] if self.log is None else list(_means(self.log))
        tensors.append(ForeignTensor("logits", "replicate", "float32", logits, last))
        yield ForeignPass(0, 0, tuple(ids), tuple(range(len(ids))), ("sequence",) * len(ids), tensors)


def open_llama_debug(folder: Path) -> LlamaDebugRun:
    """Open a dump. ForeignDumpError where the folder is none, or holds several."""
    found = children(folder)
    tokens = [path for path in found if path.name.startswith("llamacpp-") and path.name.endswith(_TOKENS)]
    if not tokens:
        raise ForeignDumpError(
            f"{shown(folder)}: has neither pass0/ids.npy of a callback nor llamacpp-…{_TOKENS}; dump with llama-debug "
            "--save-logits --logits-output-dir DIR"
        )
    if len(tokens) > 1:
        raise ForeignDumpError(f"{shown(folder)}: holds several models' files; give each a folder of its own")
    logits = folder / (tokens[0].name.removesuffix(_TOKENS) + ".bin")
    if logits not in found:
        raise ForeignDumpError(
            f"{shown(folder)}: has no {shown(logits)}: run llama-debug without --embedding"
        )
    logs = [path for path in found if path.suffix == ".log"]
    if len(logs) > 1:
        raise ForeignDumpError(f"{shown(folder)}: holds several logs; keep the one of this pass")
    return LlamaDebugRun(folder, tokens[0], logits, logs[0] if logs else None)


def _numbers(path: Path, dtype: str) -> NDArray[np.generic]:
    size = plain_size(path)
    if size == 0 or size % 4:
        raise ForeignDumpError(
            f"{shown(path)}: {size} bytes are no row of four-byte numbers; it may have been cut off"
        )
    return np.fromfile(path, dtype)


def _means(log: Path) -> Iterator[ForeignTensor]:
    """The tensors of the first pass in a log, each with what its sums show; the last of each tap counts."""
    plain_size(log, MAX_LOG)
    names, found = TapNames(), dict[str, ForeignTensor]()
    tap, count, sums = "", 0, dict[str, float]()
    with log.open(encoding="utf-8", errors="replace") as lines:
        while line := lines.readline(_LINE):
            if (header := _HEADER.match(line)) is not None:
                tap = names.tap(header["name"].strip(), header["operation"]) or ""
                count, sums = math.prod(int(one) for one in header["shape"].split(",")), {}
            elif (
                (reported := _SUM.match(line)) is not None and tap and count and local_name(tap) not in _OTHER
            ):
                sums[reported["which"]] = _number(reported["value"])
                found.pop(tap, None)
                found[tap] = ForeignTensor(tap, "replicate", "float32", statistics=_statistics(sums, count))
                if tap == "logits":
                    break  # what follows is another pass
    found.pop("logits", None)
    yield from found.values()


def _statistics(sums: Mapping[str, float], count: int) -> NDArray[np.float32]:
    reported = {"mean": sums["sum"] / count} if "sum" in sums else {}
    if "sum_sq" in sums:
        reported["rms"] = math.sqrt(max(sums["sum_sq"], 0.0) / count)
    return np.array([[reported.get(name, math.nan) for name in STATISTICS]], np.float32)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
