"""Ranks meet by a file that whoever starts them has made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.engine.errors import EngineError
from lockstep.engine.parallel.comm import Comm


def test_a_rank_does_not_wait_for_a_rendezvous_that_is_gone(tmp_path: Path) -> None:
    """Its starter has been killed while it was importing, and another rank has tidied: torch would wait for minutes."""
    with pytest.raises(EngineError, match="has ended"):
        Comm.join(
            0,
            2,
            local_size=2,
            device=torch.device("cpu"),
            store_path=str(tmp_path / "gone" / "store"),
            timeout=1.0,
        )
