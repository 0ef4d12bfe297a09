"""llama.cpp's tensors in files: what a `cb_eval` callback kept of each pass, or what `llama-debug` leaves.

No tool of llama.cpp writes whole tensors in a settled format (a pull request for that, #21691, is open since April
2026). So there are two forms:

- What people's callbacks write, a folder a pass (docs/import.md shows one): `pass0/ids.npy`, [T] whole numbers, and
  `pass0/00012.MUL_MAT.Qcur-3.npy`: number, operation, name; float32 [ne3, ne2, ne1, ne0], as ggml computed them.
- `llama-debug --save-logits --logits-output-dir DIR`: ids and the last token's logits, and of `--verbose`, kept in
  DIR/*.log, the sum of each tensor. It prints numbers of four digits, three from each end, which are left out.

Names, which operation is which tap, and the order of llama's q and k rows are those of the reference that is recorded
through `cb_eval` (`workbench.models.llamacpp_taps`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.engine.checkpoint.files import gguf_file
from lockstep.engine.checkpoint.gguf.names import PAIRED
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.errors import CheckpointError, ConfigError
from lockstep.engine.taps.names import local_name
from lockstep.sessions.meta import ModelMeta
from lockstep.workbench.foreign.passes import (
    ForeignDumpError,
    ForeignFacts,
    ForeignPass,
    ForeignRun,
    ForeignTensor,
)
from lockstep.workbench.foreign.readers.arrays import load_array
from lockstep.workbench.foreign.readers.files import children, numbered, shown
from lockstep.workbench.foreign.readers.llama_debug import open_llama_debug
from lockstep.workbench.foreign.readers.pass_rows import whole_numbers
from lockstep.workbench.models.llamacpp_taps import Shape, TapNames, arrange

_PASS = re.compile(r"pass(\d{1,9})", re.ASCII)
_TENSOR = re.compile(r"(?P<number>\d{1,9})\.(?P<operation>[A-Z0-9_]+)\.(?P<name>.+)\.npy", re.ASCII)
#: Taps that are no rows of a pass.
_CACHES = ("attn.k_cache", "attn.v_cache")


@dataclass(slots=True)
class LlamaRun:
    """A folder a pass, of one sequence."""

    folder: Path
    shape: Shape
    homes: Sequence[Path]
    _notes: dict[str, None] = field(default_factory=dict)

    @property
    def facts(self) -> ForeignFacts:
        return ForeignFacts("llama.cpp", 1, "", ModelMeta(), "float32", notes=tuple(self._notes))

    def passes(self, rank: int) -> Iterator[ForeignPass]:
        read = 0
        for index, home in enumerate(self.homes if rank == 0 else ()):
            ids = whole_numbers(load_array(home / "ids.npy")[1], f"{shown(home)}/ids.npy").ravel()
            positions = range(read, read + len(ids))
            tensors = tuple(self._tensors(home, positions).values())
            yield ForeignPass(
                0, index, tuple(ids.tolist()), tuple(positions), ("sequence",) * len(ids), tensors
            )
            read = positions.stop

    def _tensors(self, home: Path, positions: range) -> dict[str, ForeignTensor]:
        """By tap. A tensor that llama.cpp computes twice (a product, then with its bias) counts as it was last."""
        found: dict[str, ForeignTensor] = {}
        names = TapNames()
        for path, operation, name in _files(home):
            tap = names.tap(name, operation)
            if tap is None or local_name(tap) in _CACHES:
                continue
            dtype, x = load_array(path)
            if dtype != "float32" or x.ndim != 4:
                raise ForeignDumpError(
                    f"{shown(path)}: {dtype} {list(x.shape)}; float32 [ne3, ne2, ne1, ne0] is read"
                )
            tensor = self._arranged(tap, x, positions, path)
            found.pop(tap, None)
            found[tap] = tensor
        return found

    def _arranged(self, tap: str, x: np.ndarray, positions: range, path: Path) -> ForeignTensor:
        try:
            rows = np.ascontiguousarray(arrange(tap, x, self.shape, positions))
        except (ValueError, IndexError) as error:
            raise ForeignDumpError(
                f"{shown(path)}: {list(x.shape)} are no rows of {len(positions)} tokens: a pass that was cut into "
                "micro-batches (let n_ubatch be as large as the prompt), or another model than --model names"
            ) from error
        if rows.ndim == 3 and local_name(tap) in ("attn.scores", "attn.probs"):
            rows = np.ascontiguousarray(np.moveaxis(rows, 0, 1))
        if len(rows) < len(positions):
            self._notes[
                "without logits of every token, llama.cpp keeps the last row alone of what follows them"
            ] = None
        last = (len(positions) - 1,) if len(rows) == 1 < len(positions) else None
        return ForeignTensor(tap, "replicate", "float32", rows, last)


def open_llamacpp(folder: Path, model: Path | None = None) -> ForeignRun:
    """Open a dump; `model` is the checkpoint that it is of. ForeignDumpError where the folder is no such dump."""
    homes = [path for path in numbered(folder, _PASS).values() if (path / "ids.npy").is_file()]
    if not homes:
        return open_llama_debug(folder)
    if model is None:
        raise ForeignDumpError(
            f"{shown(folder)}: give --model, the GGUF file or the checkpoint that it was made of: its heads show how "
            "the rows of q and k lie"
        )
    try:
        config, source = open_checkpoint(gguf_file(model) or model)
    except (CheckpointError, ConfigError) as error:
        raise ForeignDumpError(str(error)) from error
    source.close()
    shape = Shape(config.num_heads, config.num_kv_heads, config.head_dim, config.family in PAIRED)
    return LlamaRun(folder, shape, homes)


def _files(home: Path) -> Iterator[tuple[Path, str, str]]:
    """The tensors of a pass in the order in which they were computed: file, operation, name."""
    found = ((_TENSOR.fullmatch(path.name), path) for path in children(home))
    tensors = [(int(match["number"]), path, match) for match, path in found if match is not None]
    for _, path, match in sorted(tensors, key=lambda one: one[0]):
        yield path, match["operation"], match["name"]
