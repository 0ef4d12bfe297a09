"""Bugs of vLLM's paged cache, put into its own code: who gets which block, and which slot a row goes to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor


def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(what was there)` in the place of an attribute."""
    real = getattr(owner, name)
    setattr(owner, name, functools.wraps(real)(make(real)))


def prefix_hash_collides() -> None:
    """The hash of a block is of its first eight tokens."""
    from vllm.v1.core import kv_cache_utils

    def make(hashed: Any) -> Any:
        return lambda function, parent, tokens, extra=None: hashed(function, parent, list(tokens)[:8], extra)

    _replaced(kv_cache_utils, "hash_block_tokens", make)


def evicted_block_stays_known() -> None:
    """A block that is given to another request can still be found by the hash that it had."""
    from vllm.v1.core.block_pool import BlockPool

    def make(evict: Any) -> Any:
        def kept(self: Any, block: Any) -> bool:
            known = block.block_hash
            evicted: bool = evict(self, block)
            if known is not None:
                self.cached_block_hash_to_block.insert(known, block)
            return evicted

        return kept

    _replaced(BlockPool, "_maybe_evict_cached_block", make)


def last_row_of_a_block_one_too_far() -> None:
    """The slot of the last row of each block is that of the next block's first."""
    from vllm.v1.worker.block_table import BlockTable

    def make(compute: Any) -> Any:
        def shifted(self: Any, num_reqs: int, query_start_loc: Tensor, positions: Tensor) -> None:
            compute(self, num_reqs, query_start_loc, positions)
            slots = self.slot_mapping.gpu[: len(positions)]
            slots[positions % self.block_size == self.block_size - 1] += 1

        return shifted

    _replaced(BlockTable, "compute_slot_mapping", make)


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (prefix_hash_collides, evicted_block_stays_known, last_row_of_a_block_one_too_far)
}
