"""The table of causes that are faults of the catalogue: every name in it is one."""

from __future__ import annotations

import pytest

from lockstep.engine.faults.catalogue import FAULTS, parse_fault
from lockstep.workbench.judgements.known_faults import KNOWN_FAULTS, KNOWN_POSITIONS, fault_of


@pytest.mark.parametrize("fault", sorted(set(KNOWN_FAULTS.values())))
def test_every_fault_named_is_in_the_catalogue(fault: str) -> None:
    assert "=".join(parse_fault(fault)) == fault


#: A fault of families whose cause has the numbers of each model.
OF_NUMBERS = {"layer_rope=same"}

#: Faults of linear attention, Mamba-2 and short convolutions, whose causes are edits of their formulas without a
#: name of the catalogue.
OF_STATES = {
    "beta=linear", "conv_in_gate=missing", "conv_out_gate=missing", "plain_conv=backwards", "conv_kept=frozen",
    "conv_kept=one_short", "decay=linear", "decay=unbiased", "gated_norm=ungated",
    "key_heads=tiled", "l2_norm=missing", "output_gate=missing", "short_conv=linear", "state_before=left",
    "state_before=restarted", "state_kept=bfloat16", "ssm_conv=unbiased", "ssm_step=unbiased", "ssm_step=linear",
    "ssm_rate=log", "ssm_skip=missing", "ssm_norm=gate_after", "sum_squares=own_channels",
}  # fmt: skip
#: Also: faults of latents whose cause is that of what is read or written; and of other experts by no rule that engines
#: have, of which there is no hypothesis.
WITHOUT_A_NAME = {
    "choice=worst", "split_latent=together", "written_latent=summed", "written_latent=shard", *OF_STATES,
}  # fmt: skip


def test_every_fault_of_the_catalogue_is_the_name_of_some_cause() -> None:
    positions = {fault for pair in KNOWN_POSITIONS.values() for fault in pair}
    width = fault_of("window_width", {"width": 9, "window": 8})
    assert {f"{one.seam}={one.value}" for one in FAULTS} <= {
        *KNOWN_FAULTS.values(),
        *positions,
        width,
        *OF_NUMBERS,
        *WITHOUT_A_NAME,
    }
    assert not (OF_NUMBERS | WITHOUT_A_NAME) & set(KNOWN_FAULTS.values())


def test_how_a_loader_misreads_a_file_decides_which_fault_it_is() -> None:
    assert (
        fault_of("misread", {"tensor": "model.embed_tokens.weight", "how": "integers"})
        == "dequantise=integers"
    )
    assert fault_of("misread", {"tensor": "lm_head.weight", "how": "sideways"}) is None


def test_a_fitted_value_decides_where_the_name_alone_does_not() -> None:
    assert fault_of("activation_function", {"formula": "gelu(gate) * up"}) == "act=gelu"
    assert fault_of("activation_function", {"formula": "another"}) is None
    assert fault_of("norm_number", {"formula": "", "numbers": [1e-5]}) == "norm=eps_1e-5"
    assert (
        fault_of("scores_scale", {"scale": 0.1, "meanings": ["by 1/sqrt of hidden_size"]}) == "scale=hidden"
    )
    assert fault_of("rope_theta", {"theta": 10000.0}) == "rope_theta=10000"
    assert fault_of("rope_theta", {"theta": 5000.0}) is None
    assert fault_of("window_width", {"width": 9, "window": 8}) == "window=one_more"
    assert fault_of("window_width", {"width": 7, "window": 8}) is None
    assert fault_of("nothing", {}) is None


def test_the_kinds_of_taps_decide_where_a_cause_may_be_at_any_of_them() -> None:
    qkv = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
    assert fault_of("bias_dropped", {"times": 0}, qkv) == "load_bias=false"
    assert fault_of("bias_dropped", {"times": 0}, {"attn.k_proj"}) == "load_bias=without_k"
    assert fault_of("bias_dropped", {"times": 0}, {"attn.q_proj"}) is None


def test_positions_that_the_engine_reports_itself_are_another_fault_than_those_of_the_rotation_alone() -> (
    None
):
    stuck = {"position": 0.0}
    assert fault_of("position_stuck", stuck | {"recorded": True}) == "positions=stuck"
    assert fault_of("position_stuck", stuck | {"recorded": False}) == "rope_positions=of_the_pass"
    assert fault_of("position_offset", {"offset": 2.0, "recorded": True}) is None
