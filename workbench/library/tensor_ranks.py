"""A model that Megatron-core has cut over tensor-parallel ranks: which this process is, and one folder for all."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.workbench.exit_codes import UsageError

if TYPE_CHECKING:
    from torch import nn

#: Seconds that the first rank waits for the others' recordings.
_PATIENCE = 60.0
_LONGEST_PATH = 4096


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """`rank` of `size`, which `group` of torch.distributed has (None: the default one)."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def share(self, folder: Path | None, module: nn.Module) -> Path:
        """The folder of the first rank, on every rank. Each has to come here."""
        if self.size == 1:
            assert folder is not None
            return folder
        import torch
        import torch.distributed as dist

        device = next((one.device for one in module.parameters()), torch.device("cpu"))
        path = torch.zeros(_LONGEST_PATH, dtype=torch.uint8, device=device)
        if folder is not None:
            written = str(folder.absolute()).encode()
            path[: len(written)] = torch.tensor(list(written), dtype=torch.uint8)
        first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast(path, first, group=self.group)
        return Path(bytes(path.cpu().tolist()).rstrip(b"\0").decode())

    def wait_for_others(self, dump: Path, patience: float = _PATIENCE) -> None:
        """Until every rank has closed its recording in `dump`; a rank that does not is not waited for any longer."""
        ends, waited_for = time.monotonic() + patience, range(1, self.size)
        while any(not _is_closed(dump / f"rank{rank}") for rank in waited_for) and time.monotonic() < ends:
            time.sleep(0.02)


def tensor_ranks(model: nn.Module, undivided: tuple[str, ...], what: str) -> TensorRanks:
    """This rank's place among those that Megatron-core cuts tensors over. UsageError where the model is cut by one of
    `undivided` as well, which `what` does not take."""
    config: Any = getattr(model, "config", None)
    size = int(getattr(config, "tensor_model_parallel_size", 1) or 1)
    cut = {name: getattr(config, name, 1) or 1 for name in undivided}
    if words := ", ".join(f"{name} {by}" for name, by in cut.items() if by > 1 or (by is True and size > 1)):
        raise UsageError(f"{what}; this has {words}")
    if size == 1:
        return TensorRanks()
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    return TensorRanks(int(parallel_state.get_tensor_model_parallel_rank()), size, group)


def _is_closed(rank: Path) -> bool:
    try:
        return bool(json.loads((rank / "tape.json").read_text(encoding="utf-8")).get("closed"))
    except (OSError, ValueError):
        return False
