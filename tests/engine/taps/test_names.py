"""A tap's name states which layer it is of, whoever made it up."""

from __future__ import annotations

import pytest

from lockstep.engine.taps.names import count_layers, layer_of, layer_path, local_name


@pytest.mark.parametrize(
    ("tap", "layer", "path", "local"),
    [
        ("layers.3.attn.q_proj", 3, "layers.3", "attn.q_proj"),
        ("embed", None, "embed", "embed"),
        ("layers.x.attn", None, "layers.x.attn", "layers.x.attn"),
        ("layers.3", None, "layers.3", "layers.3"),
        ("layers.99999999999.foo", None, "layers.99999999999.foo", "layers.99999999999.foo"),
        ("", None, "", ""),
    ],
)
def test_the_layer_of_a_tap(tap: str, layer: int | None, path: str, local: str) -> None:
    assert (layer_of(tap), layer_path(tap), local_name(tap)) == (layer, path, local)


def test_layers_are_counted_to_the_highest() -> None:
    assert count_layers(["embed", "layers.0.mlp.up", "layers.2.mlp.up", "layers.x.y"]) == 3
    assert count_layers([]) == 0
