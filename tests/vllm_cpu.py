"""Where vLLM is, and the environment in which it computes on this machine's cores."""

from __future__ import annotations

import os
from pathlib import Path

VLLM = Path(os.environ.get("LOCKSTEP_VLLM") or Path(__file__).parents[1] / ".vllm/bin/python").absolute()


def binding(ranks: int) -> str:
    """A core for each rank; ranks share those that there are, as vLLM starts with no fewer words than ranks."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))


def environment(ranks: int, plugin: Path) -> dict[str, str]:
    """Of so many ranks, each on a core; `plugin` is the folder of what is loaded into it."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if ranks == 1 else binding(ranks),
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(plugin),
        **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if ranks == 1 else {}),  # half the imports
    }  # fmt: skip
