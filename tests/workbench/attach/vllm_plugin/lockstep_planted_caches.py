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


def parent_left_out() -> None:
    """The hash of a block is of its own tokens alone, not of those before it."""
    from vllm.v1.core import kv_cache_utils

    def make(hashed: Any) -> Any:
        return lambda function, parent, tokens, extra=None: hashed(function, None, tokens, extra)

    _replaced(kv_cache_utils, "hash_block_tokens", make)


def hit_is_not_counted() -> None:
    """A block that a request finds in the prefix cache has one user fewer than it has, and is free too early."""
    from vllm.v1.core.block_pool import BlockPool

    def make(touch: Any) -> Any:
        def touched(self: Any, blocks: Any) -> None:
            used = [block for block in blocks if block.ref_cnt > 0]
            touch(self, blocks)
            for block in used:
                block.ref_cnt -= 1

        return touched

    _replaced(BlockPool, "touch", make)


def positions_after_a_hit_from_zero() -> None:
    """What a request computes first, behind rows of the prefix cache, has positions from 0 on."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def scheduled(execute: Any) -> Any:
        def noted(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            self.planted_hits = {
                one.req_id: one.num_computed_tokens
                for one in output.scheduled_new_reqs
                if one.num_computed_tokens
            }
            self.planted_rows = output.num_scheduled_tokens
            return execute(self, output, *args, **kwargs)

        return noted

    def called(forward: Any) -> Any:
        def moved(self: Any, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
            positions, start = positions.clone(), 0
            for name in self.input_batch.req_ids:
                rows = self.planted_rows.get(name, 0)
                positions[start : start + rows] -= self.planted_hits.get(name, 0)
                start += rows
            return forward(self, input_ids, positions, *args, **kwargs)

        return moved

    _replaced(GPUModelRunner, "execute_model", scheduled)
    _replaced(GPUModelRunner, "_model_forward", called)


def resumed_with_old_blocks() -> None:
    """A request that was preempted goes on with the block table that it had."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def make(update: Any) -> Any:
        def kept(self: Any, output: Any) -> Any:
            reported = output.scheduled_cached_reqs
            for at, name in enumerate(reported.req_ids):
                if name in reported.resumed_req_ids:
                    old = self.requests[name].block_ids
                    new = reported.new_block_ids[at]
                    reported.new_block_ids[at] = tuple(
                        [*before[: len(now)], *now[len(before) :]]
                        for before, now in zip(old, new, strict=True)
                    )
            return update(self, output)

        return kept

    _replaced(GPUModelRunner, "_update_states", make)


def stale_positions_in_a_graph() -> None:
    """Where the model is not run eagerly, single tokens are computed at the positions of the step before."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def make(forward: Any) -> Any:
        def stale(self: Any, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self.model_config.enforce_eager and positions.numel() == 1:
                positions = positions - 1
            return forward(self, input_ids, positions, *args, **kwargs)

        return stale

    _replaced(GPUModelRunner, "_model_forward", make)


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        prefix_hash_collides, evicted_block_stays_known, last_row_of_a_block_one_too_far, parent_left_out,
        hit_is_not_counted, positions_after_a_hit_from_zero, resumed_with_old_blocks, stale_positions_in_a_graph,
    )
}  # fmt: skip
