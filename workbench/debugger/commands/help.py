"""`help`: the manual, from the registry."""

from __future__ import annotations

from lockstep.workbench.debugger.answers import Group, Result, TableResult
from lockstep.workbench.debugger.core import registry
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.registry import Argument, command


@command(
    "help", "h", arguments=(Argument("name", "word", help="a command"),), group="session",
    help="what commands there are, or how one is used",
)  # fmt: skip
def help_(debugger: Debugger, name: str | None) -> Result:
    """The manual."""
    if name is None:
        return Group([_group(group) for group in registry.GROUPS])
    one = registry.find(name)
    rows = [[a.usage(), a.help or a.kind] for a in one.arguments]
    greyed = " (needs the model)" if one.engine else ""
    title = f"{one.usage}: {one.help}{greyed}" + (f"\n{one.details}" if one.details else "")
    return TableResult(title, ["argument", "meaning"], rows, empty="no arguments")


def _group(group: registry.Group) -> TableResult:
    rows = [
        [f"  {one.usage}", " ".join(one.aliases), one.key.press if one.key else "", one.help]
        for one in registry.commands().values()
        if one.group == group
    ]
    return TableResult(group, ["  command", "also", "key", "what it does"], rows)
