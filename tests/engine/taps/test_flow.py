"""The data flow of a decoder, and of names that are none of its taps."""

from __future__ import annotations

import pytest

from lockstep.engine.taps.flow import UnknownTap, inputs_of, is_known
from lockstep.engine.taps.names import tap_specs


def test_every_tap_has_inputs_that_are_taps_and_came_before() -> None:
    names = [spec.name for spec in tap_specs(3, {"qk_norm"})]
    for place, name in enumerate(names):
        assert is_known(name)
        inputs = [one for one in inputs_of(name, 3, names) if one in names]
        assert set(inputs) <= set(names[:place])
        assert bool(inputs) == (name != "embed")
    assert inputs_of("layers.2.attn_norm") == ("layers.1.mlp_residual",)
    assert inputs_of("final_norm", 3) == ("layers.2.mlp_residual",)
    assert inputs_of("final_norm", 0) == ("embed",)


@pytest.mark.parametrize(
    "name", ["", "x", "layers.x.attn.scores", "layers.0", "layers.0.x", "layers.99999999999.foo", "attn_norm"]
)
def test_a_name_that_is_no_tap_is_an_error_that_reports_it(name: str) -> None:
    assert not is_known(name)
    with pytest.raises(UnknownTap, match="is no tap of a decoder"):
        inputs_of(name, 3)
