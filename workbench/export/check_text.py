"""What a check found, as text: a table a layer a row, the first divergence, its cause, the verdict."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from lockstep.engine.taps.names import layer_of, local_name
from lockstep.sessions.text import clean
from lockstep.workbench.diagnosis.judgement import TapVerdict
from lockstep.workbench.judgements.cause import NO_CAUSE, cause_lines
from lockstep.workbench.judgements.golden_event import Divergence, GoldenEvent, UntappedRun
from lockstep.workbench.views.verdicts import JUDGED_WORDS
from lockstep.workbench.words.numbers import number

#: Heads of the columns: operations in execution order.
HEADS: Mapping[str, str] = {
    "attn_norm": "n1", "attn.in_scaled": "i*", "attn.q_proj": "q", "attn.k_proj": "k", "attn.v_proj": "v",
    "attn.q_norm": "qn", "attn.k_norm": "kn", "attn.q_clip": "tq", "attn.k_clip": "tk", "attn.v_clip": "tv",
    "attn.k_scaled": "k*", "attn.q_rope": "qr", "attn.k_rope": "kr", "attn.q_rope_norm": "nq",
    "attn.k_rope_norm": "nk", "attn.q_unit_norm": "uq", "attn.k_unit_norm": "uk", "attn.q_scaled": "qs",
    "attn.k_cache": "kc", "attn.v_cache": "vc",
    "attn.q_a_proj": "qa", "attn.q_a_norm": "an", "attn.q_b_proj": "qb", "attn.kv_a_proj": "la", "attn.kv_a_norm": "ln",
    "attn.rope_key": "rk", "attn.latent_cache": "lc", "attn.rope_cache": "rc", "attn.kv_b_proj": "lb",
    "attn.keys": "ke", "attn.values": "va",
    "attn.index_q_proj": "xq", "attn.index_k_proj": "xk", "attn.index_k_norm": "xn", "attn.index_q_rope": "yq",
    "attn.index_k_rope": "yk", "attn.index_weights": "xw", "attn.index_k_cache": "xc", "attn.index_scores": "xs",
    "attn.index_chosen": "xt", "attn.shared_chosen": "yt",
    "attn.in_proj_q": "iq", "attn.in_proj_k": "ik", "attn.in_proj_v": "iv", "attn.in_proj_z": "iz",
    "attn.in_proj_b": "ib", "attn.in_proj_a": "ia", "attn.conv_q": "cq", "attn.conv_k": "ck", "attn.conv_v": "cv",
    "attn.q_l2": "ql", "attn.k_l2": "kl", "attn.beta": "be", "attn.decay": "de", "attn.state": "st", "attn.delta": "dl",
    "attn.gated_norm": "gn", "attn.conv_in_gate": "gi", "attn.conv_out_gate": "go", "attn.conv_x": "cc",
    "attn.conv_in": "ci", "attn.conv": "cs", "attn.conv_gated": "cg",
    "attn.ssm_in_scaled": "m*", "attn.ssm_z": "mz", "attn.ssm_x": "mx", "attn.ssm_b": "mb", "attn.ssm_c": "mc",
    "attn.ssm_dt": "mt", "attn.ssm_z_scaled": "z*", "attn.ssm_x_scaled": "x*", "attn.ssm_b_scaled": "b*",
    "attn.ssm_c_scaled": "c*", "attn.ssm_dt_scaled": "t*", "attn.ssm_conv_x": "vx", "attn.ssm_conv_b": "vb",
    "attn.ssm_conv_c": "vd", "attn.ssm_step": "dt", "attn.ssm_state": "ss", "attn.ssm_read": "sr",
    "attn.ssm_norm": "gm", "attn.ssm_gated": "gs", "attn.out_proj.partial": "p+", "attn.out_proj": "op",
    "attn.out_scaled": "p*",
    "attn.scores": "sc", "attn.probs": "pr", "attn.context": "cx", "attn.gate": "ga",
    "attn.gated": "gx", "attn.o_proj.partial": "o+", "attn.o_proj": "o", "attn.o_scaled": "o*", "attn.mixed": "mi",
    "post_attn_norm": "on", "attn_residual": "r1", "mlp_norm": "n2", "mlp.gate": "g", "mlp.up": "u",
    "mlp.gate_scaled": "g*", "mlp.act": "a", "mlp.down.partial": "d+", "mlp.down": "d", "mlp.down_scaled": "d*",
    "mlp.router": "ro", "mlp.topk_ids": "id", "mlp.topk_weights": "tw", "mlp.experts.input": "ei",
    "mlp.dense_norm": "n3", "mlp.router_norm": "rn", "mlp.router_input": "ri", "mlp.experts_norm": "n4",
    "mlp.combine_norm": "n5", "mlp.sum": "m+",
    "mlp.experts.gate": "eg", "mlp.experts.up": "eu", "mlp.experts.act": "ea", "mlp.experts.down": "ed",
    "mlp.shared.gate": "sg", "mlp.shared.up": "su", "mlp.shared.act": "sa", "mlp.shared.down": "sd",
    "mlp.shared_gate": "sf", "mlp.combine.partial": "c+", "mlp.combine": "co", "post_mlp_norm": "dn",
    "attn.v_norm": "vn", "mlp_stream": "ms", "layer_input": "li", "layer_input.gate": "lg", "layer_input.act": "lx",
    "layer_input.proj": "lp", "post_layer_input_norm": "pn", "mlp_residual": "r2",
}  # fmt: skip

#: What a cell shows of the worst judgement in it.
_MARKS = {"pass": "·", "suspect": "~", "fail": "✗", "inherited": "↓", "absent": "-"}
_STYLES = {"pass": "green", "suspect": "yellow", "fail": "bold red", "inherited": "red", "absent": "dim"}
_ORDER = ("fail", "inherited", "suspect", "pass", "absent")

#: Causes that `check` prints; `diagnose` prints all.
MOST_CAUSES = 4

#: How lines of the explanation are set off.
_EXPLAINED = {"first wrong": "bold", "cause": "bold"}

#: Columns of the names before the lines under the table.
_INDENT = 12

#: (tap, whether in decode) -> the worst of it
Cells = Mapping[tuple[str, bool], str]


def render(event: GoldenEvent, taps: Sequence[TapVerdict], console: Console) -> None:
    """Print the whole report."""
    rests(event, console)
    table(event, taps, console)
    console.print()
    explain(event, console)
    verdict(event, taps, console)


def rests(event: GoldenEvent, console: Console) -> None:
    """What the verdict on a recording rests on, before anything else."""
    if event.coverage is None:
        return
    console.print(Text(event.coverage.in_words(), "bold"))
    for remark in event.coverage.remarks():
        console.print(Text(remark, "dim"))
    console.print()


def inconclusive(event: GoldenEvent) -> str:
    """Why neither right nor wrong can be stated."""
    if event.overflow is not None:
        return "use a wider --dtype"
    return event.unsupported or (event.notes[-1] if event.notes else "")


def table(event: GoldenEvent, taps: Sequence[TapVerdict], console: Console) -> None:
    """A layer a row, an operation a column; each cell holds the prefill and the decode steps."""
    judged = _cells(taps, event.prefill)
    shown = {tap for (tap, _), name in judged.items() if name != "absent"}
    cells = {place: name for place, name in judged.items() if place[0] in shown}
    kinds = [kind for kind in HEADS if any(local_name(tap) == kind for tap in shown)]
    first = event.first_divergence
    here = None if first is None else (first.tap, first.step >= event.prefill)
    console.print(f"each cell: prefill, decode   {_legend(cells)}", style="dim")
    console.print(Text("layer ") + Text(" ".join(f"{HEADS[kind]:2}" for kind in kinds), "bold"))
    _outside("embed", cells, here, console)
    for layer in sorted({layer for tap in shown if (layer := layer_of(tap)) is not None}):
        row = [_cell(f"layers.{layer}.{kind}", cells, here) for kind in kinds]
        console.print(Text(f"{layer:<6}") + Text(" ").join(row))
    for tap in ("final_norm", "logits"):
        _outside(tap, cells, here, console)


def _legend(cells: Cells) -> str:
    used = set(cells.values())
    return "   ".join(f"{_MARKS[name]} {words}" for name, words in JUDGED_WORDS.items() if name in used)


def _outside(tap: str, cells: Cells, here: tuple[str, bool] | None, console: Console) -> None:
    if any((tap, decode) in cells for decode in (False, True)):
        console.print(Text(f"{'':6}") + _cell(tap, cells, here) + Text(f" {tap}"))


def _cells(taps: Iterable[TapVerdict], prefill: int) -> Cells:
    worst: dict[tuple[str, bool], str] = {}
    for one in taps:
        name = "inherited" if one.verdict == "fail" and one.inherited else one.verdict
        place = (one.tap, one.step >= prefill)
        worst[place] = min(worst.get(place, name), name, key=_ORDER.index)
    return worst


def _cell(tap: str, cells: Cells, here: tuple[str, bool] | None) -> Text:
    cell = Text()
    for decode in (False, True):
        name = cells.get((tap, decode))
        if name is None:
            cell.append(" ")
        else:
            cell.append(_MARKS[name], f"{_STYLES[name]}{' reverse' if here == (tap, decode) else ''}")
    return cell


def explain(event: GoldenEvent, console: Console) -> None:
    """The first divergence: where, how wrong, why."""
    for label, words in explanation(event):
        dim = label == "" or words == NO_CAUSE
        print_field(console, label, words, "dim" if dim else _EXPLAINED.get(label, ""))


def explanation(event: GoldenEvent) -> Iterator[tuple[str, str]]:
    """The first divergence as (label, words): where, how wrong, why; nothing where there is none."""
    first = event.first_divergence
    if first is None:
        return
    yield "first wrong", clean(where(first, event))
    yield "how wrong", how_wrong(first)
    for cause in event.causes[:MOST_CAUSES]:
        reported = dict(cause_lines(cause))
        for label in ("cause", "or", "proof", "fix"):
            if label in reported:
                yield label, clean(reported[label])
    if (more := len(event.causes) - MOST_CAUSES) > 0:
        yield "", f"and {more} more: `lockstep diagnose` shows all of them"
    if not event.causes:
        yield "cause", NO_CAUSE
    if event.ledger:
        yield "ledger", clean(event.ledger)


def where(first: Divergence, event: GoldenEvent) -> str:
    """The place of a divergence in words: operation, layer, step, ranks."""
    tp, reading = event.tp, first.step < event.prefill
    step = f"prefill (step {first.step})" if reading else f"decode step {first.step}"
    layer = "" if first.layer is None else f", layer {first.layer}"
    if tp == 1:
        ranks = "rank 0"
    elif first.rank is None:
        ranks = "both ranks" if tp == 2 else f"all {tp} ranks"
    else:
        ranks = f"rank{'s' * (len(first.ranks) > 1)} {', '.join(map(str, first.ranks))}"
    return f"{first.tap}{layer}, {step}, {ranks}"


def how_wrong(first: Divergence) -> str:
    """The size of a divergence in words."""
    return (
        f"max abs {number(first.max_abs)}, relative {number(first.rel_l2)}, cosine {number(first.cosine)}"
        f" ({clean(first.reason)})"
    )


def verdict(event: GoldenEvent, taps: Sequence[TapVerdict], console: Console) -> None:
    """Tokens, logits, and the verdict itself on the last line."""
    for note in event.notes:
        print_field(console, "note", clean(note))
    for flip in event.flips_in_words():
        print_field(console, "flip", clean(flip))
    apart = event.max_abs_logits
    compared = apart is not None and not math.isnan(apart)
    logits = f"max abs {number(apart)} from" if compared else "not compared with"
    at = "at the same dtype" if event.tolerance == "floor" else "in float64"
    if event.reference == "llama.cpp":
        at = "in float32"
    some = "the same where they could be compared" if compared else "not compared"
    tokens = "identical" if event.tokens_identical else some
    if event.overflow is not None and not compared:
        tokens = "not compared: the reference's logits are no numbers either"
    elif event.token_mismatches:
        miss = event.token_mismatches[0]
        tie = ", a tie within the noise" if miss.tie else ""
        tokens = f"differ at step {miss.step}: {miss.engine} instead of {miss.reference}{tie}"
    if event.reference:
        print_field(console, "tokens", tokens)
        print_field(console, "logits", f"{logits} {clean(event.reference, limit=20)} {at}")
    if event.quantisation is not None:
        print_field(console, "quantised", event.quantisation.in_words(event.matches))
    if event.untapped is not None:
        print_field(console, "no taps", untapped(event.untapped, clean(event.reference, limit=20)))
    style = {"match": "bold green", "inconclusive": "bold yellow"}.get(event.verdict, "bold red")
    print_field(console, "verdict", conclusion(event, taps), style)


def conclusion(event: GoldenEvent, taps: Sequence[TapVerdict]) -> str:
    """The verdict itself, with what it rests on or why it is none."""
    if event.matches:
        suspects = sum(one.verdict == "suspect" for one in taps)
        counted = sum(one.verdict != "absent" for one in taps)
        return f"match: {counted} tensors judged, {suspects} suspect, none wrong"
    if event.verdict == "inconclusive":
        return f"inconclusive: {clean(inconclusive(event))}"
    return "diverged"


def untapped(run: UntappedRun, reference: str) -> str:
    """What came of the passes with no tap on, in words."""
    apart = [
        f"max abs {number(value)} from {side}"
        for value, side in ((run.max_abs_logits, reference), (run.max_abs_tapped, "the run with taps"))
        if value is not None and not math.isnan(value)
    ]
    return f"as `generate` runs: logits {', '.join(apart) or 'not compared'}"


def print_field(console: Console, name: str, value: str, style: str = "") -> None:
    """A line of the report, folded under itself where the terminal is narrow."""
    lines = textwrap.wrap(value, max(20, console.width - _INDENT), break_long_words=False) or [""]
    folded = ("\n" + " " * _INDENT).join(lines)
    console.print(Text(f"{name:<{_INDENT}}", "dim") + Text(folded, style))
