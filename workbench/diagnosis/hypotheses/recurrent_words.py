"""Plain words for edits of the formulas of linear attention, Mamba-2 and gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph.operation import STATES
from lockstep.workbench.diagnosis.hypotheses.recurrent_operands import (
    ALL_GROUPS,
    KEPT,
    LATE,
    NEWEST_FIRST,
    OTHER_WIDTH,
    SINGLE_HEADS,
    SLOT_OF,
    OtherSlot,
    slot_names,
)
from lockstep.workbench.diagnosis.hypotheses.recurrent_rules import RULES
from lockstep.workbench.judgements.cause import numbers_in_words

_RESTARTED = "the state is not carried on: the pass begins with zeros in place of what the sequence has"
_EXCHANGED = (
    "the state that a pass goes on from is read with both of its axes exchanged: it is kept in another layout"
)
_PAIRED = (
    "a value head is given another key head than its own: key heads are tiled, not repeated for neighbours"
)
_SHARE = "the share of the state that is kept, the exponential of its decay, is rounded to {0}"
_DECAY = "the decay is rounded to {0} before its exponential is taken"
#: Begins the name of queries and keys of which each step of the norm is rounded.
NORMALISED_IN = "normalised in "
_GROUPED = (
    "a head is given another group of B and C than its own: groups are tiled, not repeated for neighbours"
)
#: What the gated norm of Mamba-2 gives where it is taken before the gate.
NORM_FIRST = "norm before the gate"


def _of_slot(one: OtherSlot) -> str:
    """What is reported of sequences that have it, with room for what is kept there."""
    verb, after = "reads and writes" if one.written else "reads", one.which > 0
    ends = "" if one.wraps else f"; the {'last' if after else 'first'} sequence has a slot that is nobody's"
    slot = "next slot" if after else "slot before"
    return f"a sequence {verb} another sequence's {{0}}: that of the batch's {slot}{ends}"


_OF_SLOTS = {one.name: _of_slot(one) for one in slot_names()}
_LOST = "the decay of the first token of each chunk of {a:g} is lost: what the chunk before it left is kept whole there"
_STEP = "the step size is rounded to {0} before the state is changed by it"
_UNFORGOTTEN = "decay is not applied: the state keeps all that it has"
#: (operation, the function or leaf at the place, kind of the edit, the first of its detail) -> what ran.
RECURRENT_WORDS: Mapping[tuple[str, str, str, object], str] = {
    ("gate", "multiply", "left_out", 0.0): "attention's output gate is left out: its output goes on as it is",
    ("gate", "sigmoid", "left_out", 0.0): "attention is multiplied by the gate itself, not by its sigmoid",
    ("gate", "sigmoid", "function", "silu"): "attention is multiplied by SiLU of the gate, not by its sigmoid",
    ("times", "multiply", "left_out", 0.0): "a gate of the short convolution is left out",
    ("conv", "silu", "left_out", 0.0): "SiLU after the short convolution is left out",
    ("conv", "silu", "function", "sigmoid"): "the short convolution is followed by a sigmoid, not by SiLU",
    ("conv", "weight", "applied", "backwards"): "the kernel of the short convolution is applied backwards in time",
    ("conv", "before", "operand", "nothing"):
        "the convolution's state is not carried on: a pass begins as if nothing had come before it",
    ("conv", "before", "operand", "frozen"):
        "the convolution's state is stale: it is that of the end of the prompt, which decode steps do not update",
    ("conv", "before", "applied", "oldest_row_lost"): "the convolution's state is one token short",
    ("conv", "before", "applied", "newest_row_lost"): "the convolution's state lacks the newest token",
    ("l2_norm", "side_by_side", "skipped", "x"): "queries and keys are not divided by their length: no l2 norm",
    ("l2_norm", "divide", "left_out", 0.0): "queries and keys are not divided by their length: no l2 norm",
    ("l2_norm", "total", "function", "mean"): "squares are averaged, not summed: an RMS norm in place of the l2 norm",
    ("sigmoid", "sigmoid", "left_out", 0.0): "beta is not passed through a sigmoid",
    ("decay", "softplus", "left_out", 0.0): "the decay is made without softplus",
    ("decay", "add", "left_out", 0.0): "the decay is made without dt_bias",
    ("decay", "negative", "left_out", 0.0): "the decay has the wrong sign: the state grows",
    ("decay", "exp A_log", "left_out", 0.0): "the decay is made with A_log itself, not with its exponential",
    ("gated_norm", "multiply", "left_out", 0.0): "the gated norm is not multiplied by its gate",
    ("gated_norm", "multiply", "before", "x"): "the gate is multiplied before the norm, not after it",
    ("gated_norm", "silu", "function", "sigmoid"): "the gated norm is multiplied by a sigmoid of the gate, not by SiLU",
    ("gated_norm", "silu", "left_out", 0.0): "the gated norm is multiplied by the gate itself, not by its SiLU",
    ("gated_norm", "weight", "applied", "plus_one"): "the gated norm's weight is applied as 1 + w",
    **{
        (operation, *edit): text
        for operation in ("state", "delta")
        for edit, text in {
            ("before", "operand", "nothing"): _RESTARTED,
            ("before", "applied", "axes_exchanged"): _EXCHANGED,
            ("paired", "function", "paired_in_turn"): _PAIRED,
            ("exp", "left_out", 0.0): "the state is multiplied by the logarithm of its decay, not by its exponential",
            ("decay", "operand", "nothing"): _UNFORGOTTEN,
        }.items()
    },
    **{
        (operation, place, "applied", dtype): text.format(dtype)
        for operation in ("state", "delta")
        for place, text in (("exp", _SHARE), ("decay", _DECAY))
        for dtype in ("bfloat16", "float16")
    },
    **{(operation, "exp", "applied", "kept_at_chunks"): _LOST for operation in STATES},
    ("conv", "add", "left_out", 0.0): "the bias of the convolution is left out",
    ("step_size", "softplus", "left_out", 0.0): "the step size is made without softplus",
    ("step_size", "add", "left_out", 0.0): "the step size is made without dt_bias",
    ("step_size", "clamped", "left_out", 0.0): "the step size is not clamped to time_step_limit",
    ("step_size", "clamped", "outside", 0.0):
        "the step size is clamped to time_step_limit before its softplus, not behind it",
    ("ssm_read", "add", "left_out", 0.0): "the skip is left out: D x is not added to what is read from the state",
    ("gated_norm", "multiply", "operand", NORM_FIRST): "the gate is multiplied after the norm, not before it",
    ("gated_norm", "norm_width", "operand", ALL_GROUPS):
        "the mean of squares is over the channels of all groups together, not over each group's own",
    ("gated_norm", "norm_width", "operand", SINGLE_HEADS):
        "the mean of squares is over each head's own channels, not over those of its whole group",
    **{
        (operation, "before", "operand", LATE):
            f"a sequence goes on from the {kept} of the step before the last: each step goes one too far back"
        for operation, kept in (
            ("conv", "kept rows"), *dict.fromkeys(("state", "delta", "ssm_state", "ssm_read"), "state").items(),
        )
    },
    **{
        ("conv", "before", "operand", name):
            f"other rows of a prompt are kept for the convolution than its last: {name}"
        for name in KEPT
    },
    ("conv", "before", "operand", NEWEST_FIRST):
        "the rows kept for the convolution are read in reverse order: they are kept newest first",
    **{
        (operation, "before", "operand", name): text.format(kept)
        for operation, kept in (
            ("conv", "kept rows"),
            *dict.fromkeys(("state", "delta", "ssm_state", "ssm_read"), "state").items(),
        )
        for name, text in _OF_SLOTS.items()
    },
    ("sigmoid", "sigmoid", "applied", "scaled"):
        "beta is {by} times its sigmoid; 2 times are for negative eigenvalues",
    ("gated_norm", "multiply", "operands", "whole"):
        "the mean of squares is over the rank's own channels, not over those of all ranks that share a group",
    **{
        (operation, *edit): text
        for operation in ("ssm_state", "ssm_read")
        for edit, text in {
            ("before", "operand", "nothing"): _RESTARTED,
            ("before", "applied", "axes_exchanged"): _EXCHANGED,
            ("paired", "function", "paired_in_turn"): _GROUPED,
            ("exp A_log", "left_out", 0.0): "A is made of A_log itself, not of its exponential",
            ("negative", "left_out", 0.0): "the exponent of the decay has the wrong sign: the state grows",
            ("exp", "left_out", 0.0): "the state is multiplied by the logarithm of its decay, not by its exponential",
        }.items()
    },
    **{
        (operation, place, "applied", dtype): text.format(dtype)
        for operation in ("ssm_state", "ssm_read")
        for place, text in (("exp", _SHARE), ("step", _STEP))
        for dtype in ("bfloat16", "float16")
    },
    **{
        (operation, name, "function", name + order): text
        for operation, name in (
            ("state", "last_state"), ("delta", "read_out"), ("ssm_state", "scanned"), ("ssm_read", "scan_read"),
        )
        for order, text in (
            ("_decayed_last", "the state decays behind its update, not before it: what a token writes decays at once"),
            ("_early", "queries read the state before their own token's update: a token does not find what it wrote"),
            (
                "_handed_on",
                "the state does not decay from chunk to chunk: what each chunk of {a:g} tokens makes is added to "
                "the whole of what was there before it",
            ),
        )
    },
    **{
        (operation, name, "function", name + ending): rule.words
        for operation, name in (("state", "last_state"), ("delta", "read_out"))
        for ending, rule in RULES.items()
    },
    **{
        (operation, place, "function", "exp2"): text
        for operation in STATES
        for place, text in (
            ("exp", "the share of the state that is kept is 2 to the power of its decay, not e to that power"),
            ("exp A_log", "A is made of A_log as a power of 2, not of e"),
        )
    },
    ("decay", "exp A_log", "function", "exp2"): "the decay is made of A_log as a power of 2, not of e",
    ("conv", "convolved", "function", "convolved_by"):
        "the convolution's rows lie {a:g} tokens off (negative: back): each token meets others than its own last ones",
    ("conv", "convolved", "function", "convolved_ahead"):
        "the convolution's rows have moved on already: each token meets the next one's, the newest row counts twice",
    **{
        (operation, "A_log", "applied", "minus_exp"):
            "the rate is made twice: -exp(A_log), which is the rate already, is taken for its logarithm once more"
        for operation in ("decay", "ssm_state", "ssm_read")
    },
    ("ssm_read", "D", "applied", "exp"): "the skip is multiplied by the exponential of D, not by D",
    **{
        ("times", "gate", "applied", function):
            f"a gate of the short convolution goes through {name}, which it should not"
        for function, name in (("silu", "SiLU"), ("sigmoid", "a sigmoid"))
    },
    **{
        ("conv", "weight", "operand", f"the kernels of conv_{other}"):
            f"the kernels of the short convolution are those of {what}, which are convolved beside it"
        for other, what in (("q", "queries"), ("k", "keys"), ("v", "values"), ("x", "x"), ("b", "B"), ("c", "C"))
    },
    ("delta", "multiply", "left_out", 0.0): "queries are not scaled by 1 / sqrt(key_dim)",
}  # fmt: skip


def width_words(operand: str) -> str:
    """What is reported of a gated norm whose groups have another width, by the name of the operand; "" of anything
    else."""
    width, _, what = operand.partition(" ")
    if what != OTHER_WIDTH.format("").strip():
        return ""
    return (
        f"the mean of squares is over {width} channels each, not over those of a whole group: as many groups are taken "
        "as there would be of another width"
    )


def shared_slot_words(operation: str, operand: str) -> str:
    """What is reported of sequences that have another live sequence's slot, by the name of the operand; "" of anything
    else."""
    if not operand.startswith(SLOT_OF):
        return ""
    slot, how = operand.split(", ", 1)
    kept = "kept rows" if operation == "conv" else "state"
    verb = "reads and writes" if how == "read and written" else "reads"
    when = how.removeprefix("read alone") if verb == "reads" else ""
    return f"a sequence {verb} another live sequence's {kept}{when}: the {slot}"


def pairing_words(model: ModelConfig, heads: Sequence[float]) -> str:
    """Which key head each value head is given, -1 for none, where it is another than its own."""
    if (mamba := model.mamba) is not None:
        keys = mamba.groups * len(heads) // mamba.heads
    else:
        assert model.linear is not None, "what pairs heads is linear attention"
        keys = model.linear.key_heads * len(heads) // model.linear.value_heads
    read: dict[int, list[int]] = {}
    for head, key in enumerate(map(int, heads)):
        if key != head * keys // len(heads):
            read.setdefault(key, []).append(head)
    reported = [
        f"value head{'s' * (len(mine) > 1)} {numbers_in_words(mine)} {'get' if len(mine) > 1 else 'gets'} "
        + (
            "none and give zeros"
            if key < 0
            else f"key head {key} instead of {', '.join(_own(mine, keys, len(heads)))}"
        )
        for key, mine in sorted(read.items(), key=lambda one: (one[0] < 0, one[0]))
    ]
    return f"value heads are given other key heads than their own: {'; '.join(reported)}"


def _own(heads: Sequence[int], keys: int, of: int) -> list[str]:
    return list(dict.fromkeys(str(head * keys // of) for head in heads))


def coarse_words(operand: str) -> str:
    """What is reported of queries or keys in fewer bits, by the name of the operand; "" of anything else."""
    _, _, how = operand.partition(" ")
    if how.startswith("rounded to "):
        return f"queries and keys are {how} once they are divided by their length"
    dtype = how.removeprefix(NORMALISED_IN).partition(",")[0]
    if how == operand or not how.startswith(NORMALISED_IN):
        return ""
    return f"queries and keys are divided by their length in {dtype}: squares, sum, root and result are rounded to it"
