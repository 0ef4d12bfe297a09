"""What kernels are tried against, itself against softmax written out."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.engine.layers.plain_attention import attended


@pytest.mark.parametrize(("queries", "rows"), [(1, 7), (3, 7), (7, 7)])
def test_it_is_causal_and_scaled(queries: int, rows: int) -> None:
    q = torch.randn(queries, 6, 8, dtype=torch.float64)
    keys, values = (torch.randn(rows, 2, 8, dtype=torch.float64) for _ in range(2))
    found = attended(q, keys, values, torch.float64)
    for query in range(queries):
        seen = rows - queries + query + 1
        for head in range(6):
            shares = (keys[:seen, head // 3] @ q[query, head] / math.sqrt(8)).softmax(0)
            torch.testing.assert_close(found[query, head], shares @ values[:seen, head // 3])
