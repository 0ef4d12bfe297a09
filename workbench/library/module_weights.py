"""The weights of a module in this process, written as an attached engine's rank writes them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.workbench.library.module_recording import engine_of
from lockstep.workbench.library.tensor_ranks import tensor_ranks

if TYPE_CHECKING:
    from torch import nn

#: By what else than tensors Megatron-core may cut a model: layers and experts have numbers of their own then.
_RENUMBERED = ("pipeline_model_parallel_size", "expert_model_parallel_size")


def write_module(module: nn.Module, dump: Path) -> None:
    """Into `dump`, as one rank of those that tensors are cut over; what FSDP has cut is whole."""
    from lockstep.workbench.attach.inside.lockstep_weights import write_weights
    from lockstep.workbench.attach.inside.lockstep_wrappers import unwrapped

    inner = unwrapped(module)
    of = tensor_ranks(inner, _RENUMBERED, "weights takes a module with all layers and experts")
    with _summoned(module):
        write_weights(module, dump / f"rank{of.rank}", engine_of(inner), of.rank, of.size, whole=True)


def _summoned(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, the parameters of FSDP's first version are whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not any(isinstance(one, FullyShardedDataParallel) for one in module.modules()):
        return nullcontext()
    whole: AbstractContextManager[None] = FullyShardedDataParallel.summon_full_params(module, writeback=False)
    return whole
