"""Which column of one matrix is which of another: what finds that columns, rows or heads were moved."""

from __future__ import annotations

import numpy as np

from lockstep.workbench.diagnosis.recording import Array


def nearest_columns(columns: Array, source: Array) -> list[int]:
    """For each of `columns` [T, M] the index of the nearest column of `source` [T, N]."""
    distances = (source**2).sum(0)[None, :] - 2 * columns.T @ source  # + |column|², the same for all
    return [int(j) for j in np.argmin(distances, axis=1)]
