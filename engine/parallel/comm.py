"""The process group of one tensor-parallel engine.

Every collective goes through here: each is counted and noted on the progress board where it is entered and left, so
that the host can report which rank the others wait for, and strided tensors, which Gloo would silently misread, are
refused. Over NCCL a collective is left when it was enqueued, not when the GPU is done with it.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore  # the public alias is not exported for type checkers

from lockstep.engine.errors import EngineError
from lockstep.engine.parallel.devices import own_gpus
from lockstep.engine.parallel.operations import COLLECTIVES, OpKind
from lockstep.engine.parallel.shared_sum import SharedSum, possible


class ProgressSink(Protocol):
    """Where a rank reports its progress and learns that the host wants a pause."""

    @property
    def pause_wanted(self) -> bool:
        """Whether the host wants the ranks to pause."""
        ...

    def write(
        self, rank: int, number: int, step: int, place: int, collectives: int, kind: int, inside: bool
    ) -> None:
        """Note an operation of `rank`."""
        ...


def _store(path: str, size: int) -> FileStore:
    """The rendezvous file. Where its folder is gone torch would wait for it for minutes with the interpreter locked,
    so that the thread that ends a rank with its starter could not run."""
    if not Path(path).parent.is_dir():
        raise EngineError(
            "the folder of the rendezvous is gone: the program that started this rank has ended"
        )
    return FileStore(path, size)


_TAP = OpKind.TAP


class Comm:
    """Rank `rank` of `size`, computing on `device`. With one rank every collective is the identity."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        board: ProgressSink | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.device = device or torch.device("cpu")
        self.step = 0
        self.place = 0
        self.operations = 0
        self.collectives = 0
        self._board = board
        self._shared_sum: SharedSum | None = None

    @cached_property
    def _through_host(self) -> bool:
        """Gloo sends and gathers only what is in host memory; there the ranks' order of summation holds as well."""
        return self.size > 1 and self.device.type == "cuda" and self.backend == "gloo"

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        *,
        local_size: int,
        device: torch.device,
        store_path: str | None,
        timeout: float,
        board: ProgressSink | None = None,
    ) -> Comm:
        """Rendezvous with the other ranks and form the group: NCCL where each of the `local_size` ranks on this
        machine has a GPU of its own, otherwise Gloo (also for CUDA tensors, when ranks share a GPU). `store_path`
        is the rendezvous file; None: torchrun's environment names the store. `timeout` in seconds."""
        comm = cls(rank, size, device, board)
        if size > 1:
            comm._begin(OpKind.RENDEZVOUS)
            store = None if store_path is None else _store(store_path, size)
            nccl = device.type == "cuda" and own_gpus(local_size)
            sums = Path(f"{store_path}.sums") if store_path is not None and possible() and not nccl else None
            if rank == 0 and sums is not None:
                with suppress(OSError):  # no room for it: the others find none either
                    comm._shared_sum = SharedSum(sums, rank, size, timeout)
            dist.init_process_group(
                "nccl" if nccl else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
            if sums is not None:
                comm._share(sums, timeout)
            comm._end(OpKind.RENDEZVOUS)
        return comm

    def _share(self, sums: Path, timeout: float) -> None:
        """Open what rank 0 has made, if it could; its name goes when all have it."""
        if self.rank != 0 and sums.exists():
            self._shared_sum = SharedSum(sums, self.rank, self.size, timeout)
        dist.barrier()
        if self.rank == 0 and self._shared_sum is not None:
            self._shared_sum.unlink()

    @property
    def backend(self) -> str:
        """What carries the collectives: "none", "gloo" or "nccl"."""
        return str(dist.get_backend()) if self.size > 1 else "none"

    def free_on_gpu(self) -> int | None:
        """Bytes of its GPU that this rank may take, with what torch keeps for it; None on the CPU. Ranks that share the
        GPU take theirs of the same."""
        if self.device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def enter(self, place: int) -> None:
        """Note that this rank has reached `place` (a tap's index in execution order)."""
        self.place = place
        self.operations += 1  # as `note` does: a step has hundreds
        if self._board is not None:
            self._board.write(self.rank, self.operations, self.step, place, self.collectives, _TAP, False)

    def note(self, kind: OpKind, place: int = 0) -> None:
        """Note an operation: the host treats a rank that notes none for too long as hung."""
        self.operations += 1
        self._write(kind, place, False)

    def _begin(self, kind: OpKind, place: int | None = None) -> None:
        """Enter a collective, or a transfer to or from the rank `place`."""
        self.operations += 1
        if kind in COLLECTIVES:
            self.collectives += 1
        self._write(kind, self.place if place is None else place, True)

    def _end(self, kind: OpKind, place: int | None = None) -> None:
        """Leave it. One that raised is never left: that is where the rank stands."""
        self._write(kind, self.place if place is None else place, False)

    def _write(self, kind: OpKind, place: int, inside: bool) -> None:
        if self._board is not None:
            self._board.write(self.rank, self.operations, self.step, place, self.collectives, kind, inside)

    @property
    def interrupted(self) -> bool:
        """Whether this rank has seen the host's request to pause. Ranks see it at different times: use `union`."""
        return self._board is not None and self._board.pause_wanted

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns x.

        On the CPU, and for ranks that share a GPU, the order of summation depends on the ranks alone: Gloo's own, from
        three ranks on, depends on the buffer's size and on an element's place in it, so that a sequence would not
        compute the same alone and in a batch. NCCL promises no order. Ranks that one host has started sum through
        shared memory where they can.
        """
        if self.size > 1:
            _assert_contiguous(x)
            self._begin(OpKind.ALL_REDUCE)
            summed = x.cpu() if self._through_host else x
            if self._shared_sum is not None:
                self._shared_sum(summed)
            elif self.size == 2 or summed.device.type != "cpu":
                dist.all_reduce(summed)
            else:
                self._sum_in_order(summed)
            if summed is not x:
                x.copy_(summed)
            self._end(OpKind.ALL_REDUCE)
        return x

    def _sum_in_order(self, x: Tensor) -> None:
        """Rank by rank, in float32 at least, rounded once."""
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(parts), x)
        total = parts[0] if x.dtype in (torch.float32, torch.float64) else parts[0].float()
        for part in parts[1:]:
            total += part
        x.copy_(total)

    def gather_columns(self, x: Tensor, widths: list[int]) -> Tensor | None:
        """Rank 0 gets every rank's [S, widths[rank]] side by side, the others None.

        Gloo wants equal shapes: shards are padded to the widest for the transfer and cropped after it.
        """
        if self.size == 1:
            return x
        padded = x.new_zeros(x.shape[0], max(widths))
        padded[:, : x.shape[1]] = x
        if self._through_host:
            padded = padded.cpu()
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        self._begin(OpKind.GATHER)
        dist.gather(padded, parts, dst=0)
        self._end(OpKind.GATHER)
        if parts is None:
            return None
        whole = torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
        return whole.to(x.device)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Every rank gets rank `source`'s x, in place; returns x."""
        if self.size > 1:
            _assert_contiguous(x)
            self._begin(OpKind.BROADCAST)
            dist.broadcast(x, src=source)
            self._end(OpKind.BROADCAST)
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send x to one rank (point to point: rank 0 distributes shards)."""
        _assert_contiguous(x)
        self._begin(OpKind.SEND, to)
        dist.send(x.cpu() if self._through_host else x, dst=to)
        self._end(OpKind.SEND, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill x with what rank `source` sends."""
        _assert_contiguous(x)
        landed = torch.empty_like(x, device="cpu") if self._through_host else x
        self._begin(OpKind.RECEIVE, source)
        dist.recv(landed, src=source)
        self._end(OpKind.RECEIVE, source)
        return x.copy_(landed) if self._through_host else x

    def union(self, bits: int) -> int:
        """Bitwise OR over the ranks of an integer below 2**62: how ranks agree that one of them must stop."""
        if self.size == 1:
            return bits
        device = self.device if self.backend == "nccl" else None
        flags = torch.tensor([bits >> i & 1 for i in range(62)], dtype=torch.uint8, device=device)
        self._begin(OpKind.AGREEMENT)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        self._end(OpKind.AGREEMENT)
        return sum(bit << i for i, bit in enumerate(flags.tolist()))

    def leave(self) -> None:
        """Destroy the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _assert_contiguous(x: Tensor) -> None:
    """Gloo reads a strided tensor's storage as if it were contiguous (pytorch#192920)."""
    assert x.is_contiguous(), f"collective on a strided tensor: shape {tuple(x.shape)}, strides {x.stride()}"
