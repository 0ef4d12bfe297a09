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


def foreign_block() -> None:
    """Behind the prefill the second request of a batch has the first block of the first in its table."""
    from vllm.v1.worker.block_table import BlockTable

    def make(commit: Any) -> Any:
        def exchanged(self: Any, num_reqs: int) -> None:
            self.lockstep_commits = getattr(self, "lockstep_commits", 0) + (num_reqs > 1)
            if num_reqs > 1 and self.lockstep_commits > 3:
                self.block_table.np[1, 0] = self.block_table.np[0, 0]
            commit(self, num_reqs)

        return exchanged

    _replaced(BlockTable, "commit_block_table", make)


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


def positions_begin_again() -> None:
    """The tokens behind a prefix that comes from the cache have positions from 0 on."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def make(preprocess: Any) -> Any:
        def from_zero(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            new, start = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}, 0
            for name in self.input_batch.req_ids:
                stop = start + output.num_scheduled_tokens[name]
                self.positions[start:stop] -= new.get(name, 0)
                start = stop
            return preprocess(self, output, *args, **kwargs)

        return from_zero

    _replaced(GPUModelRunner, "_preprocess", make)


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        foreign_block, prefix_hash_collides, evicted_block_stays_known, last_row_of_a_block_one_too_far,
        positions_begin_again,
    )
}  # fmt: skip
