"""The story of a session as one HTML page that needs nothing else: no network, no fonts, a few lines of script.

Every foreign string goes through Jinja's autoescape. The content security policy allows this page's own style and
script by their hashes, pictures that it holds itself, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lockstep.sessions.state import STATE_WORDS
from lockstep.workbench.export.colormap import SHADES, shades
from lockstep.workbench.export.figures import bias_figure, head_figures, history_figure
from lockstep.workbench.export.headline import headline
from lockstep.workbench.export.palette import css_variables
from lockstep.workbench.export.plots import depth_plot, judged_text
from lockstep.workbench.export.svg import STYLE
from lockstep.workbench.export.token_blocks import blocks_of
from lockstep.workbench.export.token_view import token_class, token_data, token_title
from lockstep.workbench.judgements.cause import Cause, cause_lines
from lockstep.workbench.views.branch_sentinel import BranchSentinel
from lockstep.workbench.views.rank_weights import shape_text
from lockstep.workbench.views.request import Limits
from lockstep.workbench.views.story import Story
from lockstep.workbench.views.verdicts import Judged, State, StepVerdict
from lockstep.workbench.words.numbers import chance, number
from lockstep.workbench.words.plain_text import plural

_TEMPLATES = Path(__file__).parent / "templates"

_GLYPHS: dict[State, str] = {"pass": "·", "suspect": "~", "fail": "✗", "inherited": "↓", "absent": "–"}
_STATES: tuple[tuple[State, str], ...] = (
    ("pass", "within the noise floor"),
    ("suspect", "suspect"),
    ("fail", "failed"),
    ("inherited", "inherited from a failed tap"),
    ("absent", "nothing to compare"),
)
#: Ranks whose numbers fit beside each other; all are drawn.
_RANKS = 8


@dataclass(frozen=True, slots=True)
class MapRow:
    """One operation of the map: a cell for each layer, or one over all of them (`wide` columns)."""

    operation: str
    cells: tuple[Judged | None, ...]
    wide: int


def render(story: Story, limits: Limits | None = None) -> str:
    """The page."""
    limits = limits or Limits()
    story, steps, failures = _cut(story, limits)
    style, script = _style(), (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    first = story.judgement.first
    attention = [(one, head_figures(one, limits.pixels)) for one in story.attention]
    layers, rows = _map(story.judgement.map)
    return (
        _environment()
        .get_template("report.html")
        .render(
            story=story,
            state=STATE_WORDS[story.identity.state],
            policy=_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            headline=headline(story),
            contents=_contents(story),
            blocks=[blocks_of(tokens) for tokens in story.tokens],
            data=[token_data(tokens, story.step) for tokens in story.tokens],
            map={"layers": layers, "rows": rows},
            first=first,
            states=_STATES,
            depth=depth_plot(story.judgement.map, first),
            failures=failures,
            misses=story.judgement.misses[: limits.failures],
            judged_steps=steps,
            names={branch.id: branch.name for branch in story.branches},
            fired=sorted(
                (one for one in story.sentinels if one.step is not None), key=lambda one: one.step or 0
            ),
            quiet=_quiet(story),
            attention=attention,
            histories=[(one, history_figure(one)) for one in story.histories],
            shown_ranks=min(story.identity.ranks, _RANKS),
        )
    )


def _cut(story: Story, limits: Limits) -> tuple[Story, tuple[StepVerdict, ...], list[Judged]]:
    """The judged steps and failures that are listed; what is not goes into the story's `cut`."""
    cut = list(story.cut)
    steps, failures = story.judgement.steps, story.judgement.of("fail")
    if len(steps) > limits.judged_steps:
        cut.append(f"{plural(len(steps) - limits.judged_steps, 'judged step')}")
    if len(failures) > limits.failures:
        cut.append(
            f"{plural(len(failures) - limits.failures, 'failed operation')} of the table (the map has them)"
        )
    misses = story.judgement.misses
    if len(misses) > limits.failures:
        cut.append(
            f"{plural(len(misses) - limits.failures, 'token')} that the reference would not have chosen"
        )
    return replace(story, cut=tuple(cut)), steps[: limits.judged_steps], failures[: limits.failures]


def _contents(story: Story) -> list[tuple[str, str]]:
    sections = [("tokens", "Tokens"), ("golden", "Golden reference"), ("sentinels", "Sentinels")]
    if story.attention:
        sections.append(("attention", "Attention"))
    if story.biases:
        sections.append(("biases", "Biases"))
    return [*sections, ("statistics", "Statistics"), ("journal", "Journal")]


def _quiet(story: Story) -> list[tuple[str, list[BranchSentinel]]]:
    """By branch, what was looked for and not found."""
    found: dict[int, list[BranchSentinel]] = {}
    for one in story.sentinels:
        if one.step is None:
            found.setdefault(one.branch, []).append(one)
    names = {branch.id: branch.name for branch in story.branches}
    return [(names[branch], ones) for branch, ones in found.items()]


def _map(judged: tuple[Judged, ...]) -> tuple[list[int], list[MapRow]]:
    """Operations in execution order; what stands outside the layers spans them all."""
    layers = sorted({one.layer for one in judged if one.layer is not None})
    at = {(one.operation, one.layer): one for one in judged}
    rows = []
    for operation, outside in dict.fromkeys((one.operation, one.layer is None) for one in judged):
        if outside:
            rows.append(MapRow(operation, (at[operation, None],), len(layers)))
        else:
            rows.append(MapRow(operation, tuple(at.get((operation, layer)) for layer in layers), 0))
    return layers, rows


def _bars() -> str:
    """A class for each tenth of probability: the bar's length and its colour show the same."""
    ramp = shades("magnitude", False)
    lines = []
    for tenth in range(11):
        colour = ramp[round((0.35 + 0.6 * tenth / 10) * (SHADES - 1))]
        image = f"background-image: linear-gradient({colour}, {colour}), linear-gradient(var(--faint), var(--faint))"
        lines.append(f".p{tenth} {{ {image}; background-size: {max(3, 10 * tenth)}% 3px, 100% 3px; }}")
    return "\n".join(lines)


@lru_cache(maxsize=1)
def _style() -> str:
    sheet = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    return "\n".join([css_variables(), STYLE, sheet, _bars()])


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _more(cause: Cause) -> list[tuple[str, str]]:
    """What is known of a cause beside its own line."""
    return list(cause_lines(cause))[1:]


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=number,
        chance=chance,
        plural=plural,
        judged_text=judged_text,
        glyph=_GLYPHS.__getitem__,
        bias_figure=bias_figure,
        shape=shape_text,
        token_class=token_class,
        more=_more,
        token_title=token_title,
    )
    return environment
