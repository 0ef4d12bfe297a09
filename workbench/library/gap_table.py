"""Each operation's share of the gap between a rollout and a trainer, as a table and as a drawing."""

from __future__ import annotations

from lockstep.sessions.text import clean
from lockstep.workbench.diagnosis.mismatch.shares import GapShare, GapShares
from lockstep.workbench.export.bars import bar_chart
from lockstep.workbench.export.svg import Picture
from lockstep.workbench.words.plain_text import plural

#: Operations that are shown, and the share that they have at least.
_MOST, _LEAST = 10, 0.01
#: The two directions.
DIRECTIONS = ("in the rollout", "in the trainer")
_COLUMN = 11


def largest(found: GapShares) -> tuple[GapShare, ...]:
    """Those that are worth showing, the largest first; of many small ones the largest."""
    return tuple(one for one in found.shares if one.size >= _LEAST)[:_MOST] or found.shares[:1]


def share_lines(found: GapShares) -> list[str]:
    """The table, and what is to be reported of it; nothing where no share is known."""
    shown = largest(found)
    if not shown:
        return []
    names = [clean(one.tap) for one in shown]
    width = max(len(name) for name in ("operation", *names))
    reported = [
        "",
        f"share of the gap that goes when one operation's output is the other side's ({plural(found.tokens, 'token')}, "
        f"mean |Δ| {found.whole.gap:.3g}, KL {found.whole.kl:.3g})",
        f"{'':<{width}}  " + "  ".join(f"{one:>{2 * _COLUMN}}" for one in DIRECTIONS),
        f"{'operation':<{width}}  "
        + "  ".join(f"{'|Δ log p|':>{_COLUMN}}{'KL':>{_COLUMN}}" for _ in DIRECTIONS),
    ]
    for name, one in zip(names, shown, strict=True):
        cells = (
            f"{_percent(x.gap):>{_COLUMN}}{_percent(x.kl):>{_COLUMN}}" for x in (one.rollout, one.trainer)
        )
        reported.append(f"{name:<{width}}  " + "  ".join(cells))
    if rest := len(found.shares) - len(shown):
        reported.append(
            f"{plural(rest, 'more operation')}: at most {_percent(found.shares[len(shown)].size)} each"
        )
    if found.note:
        reported.append(found.note)
    return reported


def share_picture(found: GapShares) -> Picture | None:
    """The same as bars; None where no share is known."""
    shown = largest(found)
    if not shown:
        return None
    bars = {
        DIRECTIONS[0]: [one.rollout.gap for one in shown],
        DIRECTIONS[1]: [one.trainer.gap for one in shown],
    }
    title = "share of the mean |Δ log p| that goes when one operation's output is the other side's"
    return bar_chart(title, [clean(one.tap) for one in shown], bars, "operations' shares of the gap")


def _percent(share: float) -> str:
    if share != share:
        return "?"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{100 * share:.1f} %" if abs(share) >= 0.0005 else "0.0 %"
