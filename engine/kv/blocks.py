"""The block manager: which blocks of the pool belong to which sequence (torch-free).

After vLLM's PagedAttention (Kwon et al. 2023, arXiv:2309.06180). Every rank runs the same manager on
the same requests, so block tables need no communication and are equal by construction.
"""

from __future__ import annotations

from collections import deque

from lockstep.engine.errors import RequestError


class BlockManager:
    """Hands out blocks of `block_size` token slots; position p of a sequence lives in slot
    `table[p // block_size] * block_size + p % block_size`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}
        self._free = deque(range(num_blocks))

    @property
    def free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks held by sequences."""
        return self.num_blocks - len(self._free)

    def missing(self, seq: int, length: int) -> int:
        """Blocks that `seq` would have to be given to hold `length` tokens."""
        return max(0, -(-length // self.block_size) - len(self.tables.get(seq, ())))

    def reserve(self, wanted: dict[int, int]) -> None:
        """Reserve blocks for `wanted[seq]` tokens of each sequence: for all of them, or RequestError and for none."""
        needed = sum(self.missing(seq, length) for seq, length in wanted.items())
        if needed > self.free:
            raise RequestError(
                f"the KV cache is full: {needed} more blocks of {self.block_size} tokens wanted, "
                f"{self.free} of {self.num_blocks} free; use fewer or shorter sequences, or more blocks"
            )
        for seq, length in wanted.items():
            missing = self.missing(seq, length)
            self.tables.setdefault(seq, []).extend(self._free.popleft() for _ in range(missing))

    def truncate(self, seq: int, length: int) -> None:
        """Give back the blocks of `seq` that hold no token below `length`, last one first."""
        table = self.tables.get(seq, [])
        while len(table) > -(-length // self.block_size):
            self._free.appendleft(table.pop())

    def release(self, seq: int) -> None:
        """Give back all blocks of `seq`."""
        self.truncate(seq, 0)
        del self.tables[seq]

    def check_integrity(self) -> None:
        """Every block is free or held by exactly one sequence."""
        held = [block for table in self.tables.values() for block in table]
        assert sorted([*held, *self._free]) == list(range(self.num_blocks)), (
            f"block accounting is broken: {len(held)} held, {self.free} free, {self.num_blocks} in all"
        )
