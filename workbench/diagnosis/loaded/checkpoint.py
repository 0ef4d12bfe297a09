"""The checkpoint that an engine's memory is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from lockstep.engine.checkpoint.files import read_json
from lockstep.engine.checkpoint.fused import UnstackedSource
from lockstep.engine.checkpoint.resolve import open_checkpoint, open_stored
from lockstep.engine.checkpoint.safetensors import SafetensorsSource
from lockstep.engine.checkpoint.source import Source
from lockstep.engine.checkpoint.stacks import Place, stored_in
from lockstep.engine.checkpoint.ties import is_frequencies, is_unread
from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import ConfigError
from lockstep.workbench.diagnosis.loaded.places import key_of

#: A stack's name, and by parameter the matrix that it is.
OddStack = tuple[str, Mapping[str, int | None]]


@dataclass(frozen=True, slots=True)
class LoadedFrom:
    """`source` has the parameters one by one. `stacks`: what is stacked in an order of its own (gate and up in turn, by
    heads, transposed), by what its name has in common with others': its name in `stored`, and whose numbers it has, of
    which of its matrices (None: of all).
    `tied`: the head is the embedding. `model` is None of a family that our engine does not run."""

    source: Source
    tied: bool
    model: ModelConfig | None = None
    stored: SafetensorsSource | None = None
    stacks: Mapping[str, OddStack] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Self:
        """ConfigError and CheckpointError as of `open_checkpoint`."""
        try:
            model, source = open_checkpoint(path)
        except ConfigError:
            config = (path if path.is_dir() else path.parent) / "config.json"
            if not config.is_file():
                raise
            return cls(SafetensorsSource(path), bool(read_json(config).get("tie_word_embeddings", True)))
        if not isinstance(source, UnstackedSource):
            return cls(source, model.tie_embeddings, model)
        there, stacks = source.names(), dict[str, OddStack]()
        stored = open_stored(path, model)
        as_stored = stored.names()
        for name, place in stored_in(model).items():
            if name in there and place.tensor in as_stored and _is_odd(place):
                _, others = stacks.get(key_of(place.tensor), ("", {}))
                stacks[key_of(place.tensor)] = place.tensor, {**others, name: place.matrix}
        return cls(source, model.tie_embeddings, model, stored if stacks else None, stacks)

    def is_unread(self, name: str) -> bool:
        """Whether no engine has to load the tensor."""
        return is_frequencies(name) if self.model is None else is_unread(name, self.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.source.close()
        if self.stored is not None:
            self.stored.close()


def _is_odd(place: Place) -> bool:
    """Whether a parameter's rows do not follow each other in its stack."""
    vector = place.matrix is not None and len(place.parameter_shape) == 1
    flattened = place.matrix is None and len(place.parameter_shape) != len(place.shape)
    return place.transposed or place.step > 1 or place.blocks > 1 or vector or flattened
