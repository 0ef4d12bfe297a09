"""The weights of a module in this process, written as an attached engine's rank writes them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.library.module_recording import engine_of

if TYPE_CHECKING:
    from torch import nn

#: By what else than tensors Megatron-core may cut a model: layers and experts have numbers of their own then.
_RENUMBERED = ("pipeline_model_parallel_size", "expert_model_parallel_size")


def write_module(module: nn.Module, dump: Path) -> None:
    """Into `dump`, as one rank of those that tensors are cut over; what FSDP has cut is whole."""
    from lockstep.workbench.attach.inside.lockstep_weights import write_weights
    from lockstep.workbench.attach.inside.lockstep_wrappers import unwrapped

    inner = unwrapped(module)
    rank, size = _tensor_parallel(inner)
    with _summoned(module):
        write_weights(module, dump / f"rank{rank}", engine_of(inner), rank, size, whole=True)


def _tensor_parallel(model: nn.Module) -> tuple[int, int]:
    """This rank's number among those that Megatron-core cuts tensors over."""
    config: Any = getattr(model, "config", None)
    size = int(getattr(config, "tensor_model_parallel_size", 1) or 1)
    cut = [name for name in _RENUMBERED if (getattr(config, name, 1) or 1) > 1]
    if cut:
        raise UsageError(
            f"weights takes a module with all layers and experts; this has {', '.join(cut)} above 1"
        )
    if size == 1:
        return 0, 1
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_rank()), size


def _summoned(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, the parameters of FSDP's first version are whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not any(isinstance(one, FullyShardedDataParallel) for one in module.modules()):
        return nullcontext()
    whole: AbstractContextManager[None] = FullyShardedDataParallel.summon_full_params(module, writeback=False)
    return whole
