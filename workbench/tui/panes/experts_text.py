"""The Experts pane in words: the layer's load, an expert a row, a token a row, and the token under the cursor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lockstep.workbench.tui.panes.logits import bar
from lockstep.workbench.tui.widgets.grid import GridCell, GridColumn
from lockstep.workbench.tui.widgets.text_block import TextLine, flow
from lockstep.workbench.views.cached_lengths import span
from lockstep.workbench.views.experts import ExpertLoad, LayerExperts, TokenExperts, expert_number
from lockstep.workbench.words.numbers import fixed, number
from lockstep.workbench.words.plain_text import finite, plural

#: The token at a position.
Label = Callable[[int], str]

#: Cells of the bar of a load.
_BAR = 16
EXPERT_COLUMNS = (
    GridColumn("expert", 6, right=True),
    GridColumn("rank", 5, right=True),
    GridColumn("tokens", 6, right=True),
    GridColumn("share", 6, right=True),
    GridColumn("", _BAR, drop=1),
    GridColumn("weight", 8, right=True),
    GridColumn("", 9, flex=1),
)
TOKEN_COLUMNS = (
    GridColumn("", 1),
    GridColumn("pos", 5, right=True),
    GridColumn("token", 8, flex=1),
    GridColumn("experts", 12, flex=2),
    GridColumn("margin", 7, right=True),
    GridColumn("", 10, flex=2),
)


def expert_cells(load: ExpertLoad, largest: float) -> list[GridCell]:
    """A row of the list of experts; the bar is of the largest share."""
    ranks = load.ranks
    held = span(ranks[0], ranks[-1]) if ranks else "-"
    idle = not load.tokens
    return [
        (str(load.expert), "quiet" if idle else "strong"),
        (held, f"rank{ranks[0] % 4}" if len(ranks) == 1 else "quiet"),
        (str(load.tokens), "quiet" if idle else "text"),
        (f"{load.share:.1%}", "quiet"),
        (bar(load.share / largest if largest else 0, _BAR), "trace"),
        (number(load.weight, 4), "text" if load.weight is None or finite(load.weight) else "wrong"),
        ("no tokens" if idle else "", "quiet"),
    ]


def token_cells(one: TokenExperts, pointed: int, label: Label) -> list[GridCell]:
    """A row of the list of tokens. `pointed`: the expert under the cursor, whose tokens are marked."""
    numbers = [item.number for item in one.chosen]
    wrong = "; ".join(one.flaws) or (f"golden {_numbers(one.golden or ())}" if one.differs else "")
    return [
        ("▸" if pointed in numbers else "", "accent"),
        (str(one.position), "quiet"),
        (label(one.position), "text"),
        (_numbers(numbers), "wrong" if wrong else "text"),
        (number(one.margin), "text" if one.margin is None or finite(one.margin) else "wrong"),
        (wrong, "wrong"),
    ]


def _numbers(experts: tuple[float, ...] | list[float]) -> str:
    return " ".join(expert_number(one) for one in experts)


def about(found: LayerExperts, golden: bool, width: int) -> list[TextLine]:
    """The layer, how the load lies on experts and ranks, and what is wrong or not recorded."""
    choices = found.choices
    assert choices is not None
    flawed, differing = int(choices.flawed.sum()), int(choices.differing.sum())
    slots = choices.ids.shape[1]
    idle = sum(not load.tokens for load in found.loads)
    busiest = max((load.share for load in found.loads), default=0.0) * len(found.loads)
    of = "" if found.sequences == 1 else f" of {found.sequences} sequences"
    facts: list[TextLine] = [
        [(f"layer {found.layer} ", "strong"), (f"{len(found.loads)} experts", "text")],
        [(f"{plural(found.tokens, 'token')}{of}, {slots} experts each", "text")],
        [("busiest ", "quiet"), (f"{busiest:.1f} × the mean", "text")],
        [(f"{idle} without tokens" if idle else "", "quiet")],
        *_rank_loads(found),
        [(found.placement, "quiet")],
        [("" if choices.count else "how many experts there are was not recorded", "quiet")],
        [(found.dropped, "wrong")],
        [(found.wrong, "wrong")],
        [(f"{plural(flawed, 'token')} with a wrong choice" if flawed else "", "wrong")],
        [(f"{plural(differing, 'token')} with other experts than golden" if differing else "", "wrong")],
        [("golden: the same experts" if golden and not differing else "", "quiet")],
    ]
    return flow(facts, width)


def _rank_loads(found: LayerExperts) -> list[TextLine]:
    """The share of the slots that go to each rank, where the experts are divided among them."""
    groups = dict.fromkeys(load.ranks for load in found.loads if load.ranks)
    if len(groups) < 2:
        return []
    return [
        [
            (f"rank {span(ranks[0], ranks[-1])} ", f"rank{ranks[0] % 4}"),
            (f"{sum(load.share for load in found.loads if load.ranks == ranks):.0%}", "text"),
        ]
        for ranks in groups
    ]


def under_cursor(found: LayerExperts, row: int, label: Label, width: int) -> list[TextLine]:
    """The experts of one token with weights and router logits, the margin, golden's."""
    assert found.choices is not None
    one = found.choices.token(row)
    ranks = {load.expert: load.ranks for load in found.loads}
    facts: list[TextLine] = [[(f"token {one.position} ", "strong"), (f"“{label(one.position)}”", "text")]]
    for item in one.chosen:
        held = ranks.get(int(item.number), range(0)) if np.isfinite(item.number) else range(0)
        facts.append([
            (f"expert {expert_number(item.number)} ", "strong"),
            (f"rank {held[0]} " if len(held) == 1 else "", f"rank{held[0] % 4}" if held else "quiet"),
            ("weight ", "quiet"), _figure(item.weight), (" logit ", "quiet"), _figure(item.logit),
        ])  # fmt: skip
    if one.margin is None:
        facts.append(
            [("margin: no router logits were recorded", "quiet")] if found.choices.logits is None else []
        )
    elif one.margin < 0:
        # By a correction or by groups another one may be chosen: that is not wrong by itself.
        more = f"expert {one.runner_up}, not chosen, has a larger logit by {number(-one.margin, 4)}"
        facts.append([(more, "text")])
    else:
        margin = fixed(one.margin, 4) if one.margin >= 1e-3 else number(one.margin)
        facts.append([("margin ", "quiet"), (margin, "text"), (f" to expert {one.runner_up}", "quiet")])
    facts += [[(flaw, "wrong")] for flaw in one.flaws]
    if one.differs:
        facts.append([(f"golden: experts {_numbers(one.golden or ())}", "wrong")])
    return flow(facts, width)


def _figure(value: float | None) -> GridCell:
    return number(value, 4), "text" if value is None or finite(value) else "wrong"
