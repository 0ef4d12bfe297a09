"""From a checkpoint to one rank's tensors, one at a time: peak memory is the shards and one tensor.

    for name, tensor in shards_of(source, model, tp, rank, dtype="bfloat16", device="cuda:0"):
        parameters[name].copy_(tensor)

With `shards_of` every rank reads its own slices; with `rank0_shards` rank 0 reads and the others receive.
Both yield the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from lockstep.engine.checkpoint.source import Source
from lockstep.engine.checkpoint.verify import verify
from lockstep.engine.config import DTYPES, DType, ModelConfig
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.shards import Shard

TORCH_DTYPES: dict[DType, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}

Plan = Callable[[str, ModelConfig, int, int], Shard]
Keep = Callable[[str], bool]
TensorOf = Callable[[str, ModelConfig], str]
Named = tuple[str, torch.Tensor]


def keep_all(name: str) -> bool:
    """The default `keep`: every parameter is loaded."""
    return True


def own_tensor(name: str, model: ModelConfig) -> str:
    """The default `tensor_of`: a parameter is filled from the checkpoint's tensor of its name."""
    return name


def shards_of(
    source: Source,
    model: ModelConfig,
    tp: int,
    rank: int,
    *,
    dtype: DType,
    device: torch.device | str = "cpu",
    keep: Keep = keep_all,
    plan: Plan = shards.plan,
    tensor_of: TensorOf = own_tensor,
    converted: bool = True,
) -> Iterator[Named]:
    """This rank's part of each parameter that `keep` accepts: (Hugging Face name, tensor), in forward order.

    Reads only the slices that `plan` names. Each tensor is converted to `dtype` and moved to `device`;
    without `converted` it stays as it was read: what is filled with it converts and moves it.
    Verifies the checkpoint at once, before the first tensor is asked for.
    """
    verify(source, model)

    def each() -> Iterator[Named]:
        for name in filter(keep, shards.parameters(model)):
            shard = plan(name, model, tp, rank)
            stored = tensor_of(name, model)
            if converted:
                yield name, _read(source, stored, shard, shards.held_in(name, model, dtype), device)
            else:
                yield name, _as_stored(source, stored, shard)

    return each()


def rank0_shards(
    source: Source | None,
    model: ModelConfig,
    tp: int,
    rank: int,
    *,
    send: Callable[[torch.Tensor, int], None],
    recv: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    dtype: DType,
    device: torch.device | str = "cpu",
    keep: Keep = keep_all,
    plan: Plan = shards.plan,
    tensor_of: TensorOf = own_tensor,
) -> Iterator[Named]:
    """Like `shards_of`, but only rank 0 has a `source`: it reads each shard and sends it to its rank.

    `send(tensor, rank)` must have copied the contiguous tensor when it returns; `recv(shape, dtype)` gives
    the tensor that rank 0 sent, on `device`. Both sides go through the parameters in the same order and skip
    empty shards. Rank 0 holds its shards and one more at a time.
    """
    if (rank == 0) != (source is not None):
        raise ValueError(
            f"rank {rank} {'needs a' if rank == 0 else 'must not have a'} source: rank 0 reads for all"
        )
    if source is not None:
        verify(source, model)

    def each() -> Iterator[Named]:
        for name in filter(keep, shards.parameters(model)):
            held = shards.held_in(name, model, dtype)
            if source is not None:
                mine = _read_and_send(
                    source,
                    tensor_of(name, model),
                    [plan(name, model, tp, r) for r in range(tp)],
                    send,
                    held,
                    device,
                )
            else:
                mine = _receive(plan(name, model, tp, rank).local_shape, recv, held, device)
            yield name, mine

    return each()


def _as_stored(source: Source, name: str, shard: Shard) -> torch.Tensor:
    return source.read(name, shard.dim, None if shard.dim is None else shard.span)


def _read(source: Source, name: str, shard: Shard, dtype: DType, device: torch.device | str) -> torch.Tensor:
    return _as_stored(source, name, shard).to(device=device, dtype=TORCH_DTYPES[dtype])


def _read_and_send(
    source: Source,
    name: str,
    plans: Sequence[Shard],
    send: Callable[[torch.Tensor, int], None],
    dtype: DType,
    device: torch.device | str,
) -> torch.Tensor:
    """Rank 0's own shard, after every other rank was sent its one."""
    mine = tensor = _read(source, name, plans[0], dtype, device)
    for rank in range(1, len(plans)):
        if plans[rank] != plans[rank - 1]:  # neighbours that hold the same shard are sent the same tensor
            tensor = _read(source, name, plans[rank], dtype, device)
        if tensor.numel():
            send(tensor, rank)
    return mine


def _receive(
    shape: tuple[int, ...],
    recv: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    dtype: DType,
    device: torch.device | str,
) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)
    return recv(shape, TORCH_DTYPES[dtype])
