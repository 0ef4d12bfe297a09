"""The table of causes that are faults of the catalogue: every name in it is one."""

from __future__ import annotations

import pytest

from engine.faults.catalogue import parse_rule
from workbench.views.known_faults import KNOWN_FAULTS, fault_of


@pytest.mark.parametrize("fault", sorted(set(KNOWN_FAULTS.values())))
def test_every_fault_named_is_in_the_catalogue(fault: str) -> None:
    assert "=".join(parse_rule(fault)) == fault


def test_a_fitted_value_decides_where_the_name_alone_does_not() -> None:
    assert fault_of("other_activation", {"is": "gelu(gate) * up"}) == "act=gelu"
    assert fault_of("other_activation", {"is": "another"}) is None
    assert fault_of("norm_epsilon", {"epsilon": 1e-5, "expected": 1e-6}) == "norm=eps_1e-5"
    assert fault_of("bias_dropped", {"times": 0}) == "load_bias=false"
    assert fault_of("rope_theta", {"theta": 10000.0}) == "rope_theta=10000"
    assert fault_of("rope_theta", {"theta": 5000.0}) is None
    assert fault_of("window_width", {"width": 9, "window": 8}) == "window=one_more"
    assert fault_of("window_width", {"width": 7, "window": 8}) is None
    assert fault_of("nothing", {}) is None
