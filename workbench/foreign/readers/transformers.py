"""transformers' `model_addition_debugger_context(model, debug_path=DIR, use_repr=False)`: a tree of calls in JSON, and
a safetensors file for each tensor that went into a module or, where it has no modules inside, came out.

The writer is transformers/model_debugging_utils.py (5.23). What it does to a reader:

- A forward pass writes over the files of the one before: a folder holds one pass. A run of several is a folder of
  such folders, read in the order of their names.
- By default the tree leaves out all layers but the first and the last. Their files are there: files are what is read.
- With `use_repr=True`, its default, the numbers are text of four digits: refused, as nothing can be judged on that.
- Under tensor parallelism rank 0 alone writes, its own shards: refused where the model's sizes show it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps.names import layer_of
from lockstep.engine.text import printable
from lockstep.sessions.meta import ModelMeta
from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignFacts, ForeignPass, ForeignTensor
from lockstep.workbench.foreign.readers.arrays import load_array
from lockstep.workbench.foreign.readers.files import children, read_json, shown
from lockstep.workbench.foreign.readers.modules import ModuleNames
from lockstep.workbench.foreign.readers.number_formats import Numbers
from lockstep.workbench.foreign.readers.pass_rows import PassRows
from lockstep.workbench.foreign.readers.shape import Sizes, read_model

_TREE = "_debug_tree_FULL_TENSORS.json"
_FILE = re.compile(r"\.(?P<module>.+?)_(?P<side>inputs|outputs)(?P<key>(?:_\w+)?)\.safetensors", re.ASCII)
#: Calls inside each other that are followed.
_DEPTH = 64


#: The files of one module: "inputs_args_0" or "outputs" -> file.
Files = Mapping[str, Path]


@dataclass(slots=True)
class TransformersRun:
    """A dump of one pass, or of several; `trees` is the JSON of each."""

    folder: Path
    model: ModelMeta
    trees: Sequence[Path]

    @property
    def facts(self) -> ForeignFacts:
        return ForeignFacts("transformers", 1, "eager", self.model)

    def passes(self, rank: int) -> Iterator[ForeignPass]:
        batch = 0
        for index, tree in enumerate(self.trees if rank == 0 else ()):
            files = _modules(tree)
            rows = _rows(files, shown(tree))
            batch += 0 in rows.positions
            names = ModuleNames.of(files, 1, self.model)
            yield rows.in_batch(batch).passed(0, index, list(self._tensors(files, names, rows)))

    def _tensors(
        self, files: Mapping[str, Files], names: ModuleNames, rows: PassRows
    ) -> Iterator[ForeignTensor]:
        for module, found in files.items():
            taken = found.get("inputs_args_0")
            if taken is not None and names.inputs(module, [np.empty(0)]):
                dtype, x = load_array(taken)
                yield from rows.tensors(names.inputs(module, [x]), dtype)
            given = [load_array(path) for key, path in found.items() if key.startswith("outputs")]
            self._check_width(module, given)
            if given:
                yield from rows.tensors(names.outputs(module, [x for _, x in given]), given[0][0])

    def _check_width(self, module: str, given: Sequence[Numbers]) -> None:
        """ForeignDumpError for a shard: the other ranks wrote nothing."""
        sizes = Sizes.of(self.model, 1)
        width = given[0][1].shape[-1] if given and module.endswith("self_attn.q_proj") else None
        if sizes is not None and width is not None and width != sizes.q:
            raise ForeignDumpError(
                f"{shown(self.folder)}: {printable(module)} is {width} wide, and the model's {sizes.q}: "
                "one rank's shard, of which transformers writes no other; dump on one rank"
            )


def open_transformers(folder: Path, model: Path | None = None) -> TransformersRun:
    """Open a dump; `model` is the checkpoint that it is of. ForeignDumpError where the folder is no such dump."""
    found = children(folder)
    places = [found, *(children(path) for path in sorted(found, key=_natural) if path.is_dir())]
    trees = [path for place in places for path in place if path.name.endswith(_TREE)]
    if not trees:
        raise ForeignDumpError(
            f"{shown(folder)}: has no …{_TREE}; name the debug_path of a pass, or the folder of several"
        )
    homes = [path.parent for path in trees]
    if len(set(homes)) < len(homes):
        raise ForeignDumpError(
            f"{shown(folder)}: holds the trees of several models; give each a debug_path of its own"
        )
    return TransformersRun(folder, read_model(folder, model), trees)


def _modules(tree: Path) -> dict[str, Files]:
    """The files of each module, in the order in which the tree has them."""
    kind = tree.name.removesuffix(_TREE)
    found: dict[str, dict[str, Path]] = {}
    for path in children(tree.parent):
        if path.name.startswith(kind + ".") and (match := _FILE.fullmatch(path.name.removeprefix(kind))):
            found.setdefault(match["module"], {})[match["side"] + match["key"]] = path
    if not found:
        raise ForeignDumpError(
            f"{shown(tree)}: has its tensors as text of four digits, which nothing can be judged on: dump with "
            "model_addition_debugger_context(model, debug_path=…, use_repr=False)"
        )
    order = {name.removeprefix(kind + "."): place for place, name in enumerate(_called(read_json(tree), 0))}
    parts = {_part(name): place for name, place in reversed(order.items())}
    first = min((place for name, place in order.items() if layer_of(_layered(name)) is not None), default=0)

    def place_of(module: str) -> tuple[int, int, int]:
        layer = layer_of(_layered(module))
        at = order.get(module, parts.get(_part(module), len(order)))
        return (1, layer, at) if layer is not None else (0 if at < first else 2, 0, at)

    return {module: found[module] for module in sorted(found, key=place_of)}


def _layered(module: str) -> str:
    """ "model.layers.3.mlp" -> "layers.3.mlp"."""
    return module[module.find("layers.") :] if "layers." in module else module


def _part(module: str) -> str:
    """A module's name without its layer, for layers that the tree leaves out."""
    return re.sub(r"\.\d+\.", ".*.", module, count=1)


def _called(node: object, depth: int) -> Iterator[str]:
    """The modules of a tree in the order of their calls."""
    if not isinstance(node, Mapping) or depth > _DEPTH:
        return
    if isinstance(path := node.get("module_path"), str):
        yield path
    inner = node.get("children")
    for one in inner if isinstance(inner, list) else ():
        yield from _called(one, depth + 1)


def _rows(files: Mapping[str, Files], where: str) -> PassRows:
    """What went into the embedding, and where it stands."""
    embedding = next((found for module, found in files.items() if module.endswith("embed_tokens")), {})
    ids = _whole(embedding.get("inputs_args_0"))
    if ids is None or ids.ndim != 2:
        raise ForeignDumpError(
            f"{where}: has no input of embed_tokens, so which tokens were read is not known"
        )
    rotary = [
        path for module, found in files.items() if module.endswith("rotary_emb") for path in found.values()
    ]
    named = [path for found in files.values() for key, path in found.items() if key.endswith("_position_ids")]
    candidates = (path for path in (*named, *rotary) if not path.name.endswith("_outputs.safetensors"))
    positions = next((x for path in candidates if (x := _whole(path)) is not None and x.ndim == 2), None)
    masks = (
        path for found in files.values() for key, path in found.items() if key.endswith("_attention_mask")
    )
    mask = next((x for path in masks if (x := _whole(path)) is not None and x.ndim == 2), None)
    if positions is None and mask is None:
        raise ForeignDumpError(f"{where}: has no positions: dump the whole model, not a module of it")
    return PassRows.lines(ids, positions, mask)


def _whole(path: Path | None) -> NDArray[np.int64] | None:
    """The whole numbers in a file; None for others."""
    if path is None:
        return None
    array = load_array(path)[1]
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else None


def _natural(path: Path) -> list[tuple[int, str]]:
    """Folders by the numbers in their names: pass2 before pass10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,9})", path.name)]
