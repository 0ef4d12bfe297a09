"""Which device each rank of a machine computes on."""

from __future__ import annotations

import torch

from lockstep.engine.errors import ConfigError


def rank_device(device: str, local_rank: int, local_size: int) -> torch.device:
    """The device of rank `local_rank` of the `local_size` ranks on this machine.

    `cuda` gives each rank a GPU of its own; where there are fewer, ranks share them in turn. ConfigError for a
    GPU that does not exist, and for one GPU named for several ranks that could each have their own: NCCL
    refuses two ranks on one GPU.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return torch.device(device)
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError(f"device {device}: torch sees no GPU here; use the cpu")
    index = int(number) if number else local_rank % count
    if index >= count:
        raise ConfigError(f"device {device}: there are GPUs 0 to {count - 1}")
    if number and local_size > 1 and own_gpus(local_size):
        raise ConfigError(
            f"device {device} is one GPU for {local_size} ranks, and there are {count}: use device cuda, which "
            "gives each rank its own (CUDA_VISIBLE_DEVICES chooses among them)"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def own_gpus(local_size: int) -> bool:
    """Whether there is a GPU for each rank on this machine: what NCCL needs."""
    return torch.cuda.device_count() >= local_size
