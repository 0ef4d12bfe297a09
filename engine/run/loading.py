"""Filling a decoder from a checkpoint, under rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lockstep.engine.checkpoint.gguf.source import Decoding, GgufSource
from lockstep.engine.checkpoint.load import (
    Keep,
    Named,
    TensorOf,
    keep_all,
    own_tensor,
    rank0_shards,
    shards_of,
)
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.source import Source
from lockstep.engine.checkpoint.verify import verify
from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import CheckpointError
from lockstep.engine.layers.weight import KeptTensor
from lockstep.engine.model import Decoder
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.parallel.operations import OpKind
from lockstep.engine.rules import CORRECT, Rules
from lockstep.engine.run.memory import check_loadable
from lockstep.engine.taps.measure import tensor_checksum


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of loading on this rank: bytes of tensor data read, and parameters that were not filled."""

    bytes_read: int
    skipped: tuple[str, ...]


class Loader:
    """Reads one checkpoint into decoders, again whenever rules that act on loading change."""

    def __init__(self, path: Path, config: EngineConfig, comm: Comm) -> None:
        self.path, self.config, self.comm = path, config, comm
        self.model = check_loadable(path, config, comm.rank, comm.free_on_gpu())

    def __call__(self, decoder: Decoder, rules: Rules) -> Loaded:
        """Fill every parameter that `rules` let through; one that has no tensor is an error."""
        parameters = decoder.parameters()

        kept = {name: part for name, part in parameters.items() if isinstance(part, KeptTensor)}
        dense = {name: part for name, part in parameters.items() if isinstance(part, Tensor)}

        def keep(name: str) -> bool:
            return name in dense and rules.load_bias(name)

        source = self._open()
        filled = set()
        with source, torch.inference_mode():
            if isinstance(source, GgufSource):
                source.decoding = Decoding(rules.dequantise, rules.row_order)
                filled |= self._keep_blocks(source, kept, rules)
            # A rule may look at the values as they are held; without one they are converted where they are put.
            converted = rules.stored is not CORRECT.stored
            shards_read = self._shards(
                source, decoder.device, keep, rules.shard, rules.tensor_of, converted=converted
            )
            for count, (name, tensor) in enumerate(shards_read, 1 + len(filled)):
                self.comm.note(OpKind.LOADING, count)
                _fill(name, dense[name], rules.stored(name, tensor))
                filled.add(name)
                del tensor  # before the next one is read: peak memory is the shards and one tensor
            return Loaded(source.bytes_read, tuple(sorted(parameters.keys() - filled)))

    def _keep_blocks(self, source: GgufSource, kept: Mapping[str, KeptTensor], rules: Rules) -> set[str]:
        """Fill what stays quantised, each with the blocks that cover this rank's slice; returns their names."""
        for count, (name, part) in enumerate(kept.items(), 1):
            self.comm.note(OpKind.LOADING, count)
            shard = rules.shard(name, self.model, self.comm.size, self.comm.rank, self.config.ep)
            part.fill(
                source.blocks(
                    rules.tensor_of(name, self.model), shard.dim, None if shard.dim is None else shard.span
                )
            )
        return set(kept)

    def _open(self) -> Source:
        return open_checkpoint(self.path)[1]

    def checksums(self, device: torch.device) -> dict[str, int]:
        """The checksum of each of this rank's shards as the checkpoint has it, read anew by the correct plan."""
        source = self._open()
        found = {}
        with source, torch.inference_mode():
            for count, (name, tensor) in enumerate(
                self._shards(source, device, keep_all, shards.plan, own_tensor), 1
            ):
                self.comm.note(OpKind.LOADING, count)
                found[name] = tensor_checksum(tensor)
                del tensor
        return found

    def _shards(
        self,
        source: Source,
        device: torch.device,
        keep: Keep,
        plan: shards.ShardPlan,
        tensor_of: TensorOf,
        *,
        converted: bool = True,
    ) -> Iterator[Named]:
        """This rank's shards, one at a time; read by itself, as stored unless `converted`, or received from rank 0."""
        if self.config.load == "direct":
            read: Callable[..., Iterator[Named]] = partial(shards_of, source, converted=converted)
        else:
            read = self._from_rank0(source)
        size, rank = self.comm.size, self.comm.rank
        return read(
            self.model,
            size,
            rank,
            dtype=self.config.dtype,
            device=device,
            keep=keep,
            plan=partial(plan, ep=self.config.ep),
            tensor_of=tensor_of,
        )

    def _from_rank0(self, source: Source) -> Callable[..., Iterator[Named]]:
        """Rank 0 reads for all: only it keeps its source, the others receive."""

        def receive(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return self.comm.receive(torch.empty(shape, dtype=dtype, device=self.comm.device), 0)

        if self.comm.rank != 0:
            verify(source, self.model)  # what is wrong with the checkpoint is every rank's error, in step
        reads = source if self.comm.rank == 0 else None
        return partial(rank0_shards, reads, send=self.comm.send, recv=receive)


def _fill(name: str, parameter: Tensor, tensor: Tensor) -> None:
    if parameter.shape != tensor.shape:
        raise CheckpointError(
            f"{name}: the shard is {list(tensor.shape)}, this rank holds {list(parameter.shape)}"
        )
    parameter.copy_(tensor)
