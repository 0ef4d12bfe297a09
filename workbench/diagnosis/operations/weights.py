"""A checkpoint's weights as numpy reads them: of safetensors read without torch, of GGUF and of MXFP4
blocks dequantised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.checkpoint.files import gguf_file
from lockstep.engine.checkpoint.gguf.source import GgufSource
from lockstep.engine.checkpoint.header import read_header
from lockstep.engine.checkpoint.resolve import open_checkpoint, open_stored
from lockstep.engine.checkpoint.stacks import fitting, stored_in
from lockstep.sessions.dtypes import widen
from lockstep.workbench.diagnosis.operations.misreadings import Misreading, misreadings

#: How the file's dtypes lie in numpy, which has no bfloat16.
_STORED = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


def checkpoint_weights(path: Path) -> Callable[[str], NDArray[Any] | None]:
    """A reader of single weights by their checkpoint names; None for those that the checkpoint lacks.

    The output head of a tied model is its embedding. CheckpointError and ConfigError as `open_checkpoint`.
    """
    model, source = open_checkpoint(path)
    with source:
        if gguf_file(path):
            return partial(_dequantised, path)
        infos = {name: source.info(name) for name in source.names()}
    with open_stored(path, model) as whole:  # stacks as they lie in the files
        stored = {name: whole.info(name) for name in whole.names()}
    headers = {file: read_header(file) for file in {info.file for info in stored.values()}}
    stacked = stored_in(model)

    def read(name: str) -> NDArray[Any] | None:
        if name == "lm_head.weight" and name not in infos and model.tie_embeddings:
            name = "model.embed_tokens.weight"
        if name in infos and infos[name].encoding:
            return _dequantised(path, name)
        place = stacked.get(name)
        if place is not None:
            there = stored.get(place.tensor)
            place = fitting(place, None if there is None else there.shape, model)
        name = name if place is None else place.tensor
        if name not in stored:
            return None
        info = stored[name]
        entry = headers[info.file].entries[info.stored_as or name]
        kind, shape, start = np.dtype(_STORED[entry.dtype]), entry.shape, entry.start
        if place is not None and place.matrix is not None:
            shape = shape[1:]
            start += place.matrix * prod(shape) * kind.itemsize
        raw = np.fromfile(info.file, kind, prod(shape), offset=start)
        found = widen(raw.reshape(shape), entry.dtype)
        return found if place is None else place.within(found)

    return read


def _dequantised(path: Path, name: str) -> NDArray[Any] | None:
    """A weight that is stored in blocks, in the layout of Hugging Face."""
    model, source = open_checkpoint(path)
    with source:
        if name == "lm_head.weight" and model.tie_embeddings:
            name = "model.embed_tokens.weight"
        return source.read(name).float().numpy() if name in source.names() else None


def checkpoint_misreadings(path: Path) -> Callable[[str], list[tuple[Misreading, NDArray[Any]]]]:
    """What single weights become under the known mistakes of loaders, by their checkpoint names. None of safetensors,
    which hold what is used."""

    if gguf_file(path) is None:
        return lambda name: []

    def read(name: str) -> list[tuple[Misreading, NDArray[Any]]]:
        model, source = open_checkpoint(path)
        with source:
            if not isinstance(source, GgufSource) or name not in source.names():
                return []
            return list(misreadings(source, model, name))

    return read
