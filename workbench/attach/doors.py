"""Doors into engines that other packages add, by the entry points `lockstep.engines`: docs/extending.md.

The door is imported here, where `lockstep attach` runs; its file runs in the engine's processes, which may have another
Python, and no Lockstep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.workbench.extensions import Extension, ExtensionError, extensions


@dataclass(frozen=True, slots=True)
class EngineDoor:
    """How an engine is tapped. `engine` is in words, for whoever wonders why nothing was recorded: "MyEngine
    (myengine.runner)". `file` is Python, and complete by itself: after a process has imported a module of
    `installers`, the function of `file` that is its value is called as `function(module, open_tape)`."""

    engine: str
    file: Path
    installers: Mapping[str, str]


def doors(asked: str, ours: tuple[str, ...]) -> tuple[dict[str, EngineDoor], list[str]]:
    """The doors for `--engine asked` by name, and what is wrong with others. ExtensionError where the one that is asked
    for is not as it has to be."""
    found, wrong = {}, []
    for name, by in extensions("lockstep.engines", ours).items():
        if asked not in ("auto", name):
            continue
        try:
            found[name] = _opened(by)
        except ExtensionError as error:
            if asked == name:
                raise
            wrong.append(str(error))
    return found, wrong


def _opened(by: Extension) -> EngineDoor:
    opening = by.load()
    with by.answering("it failed"):
        door = opening()
    if not isinstance(door, EngineDoor):
        raise by.error(f"it gave {type(door).__name__}, not EngineDoor")
    if not door.file.is_file():
        raise by.error(f"its file {door.file} does not exist")
    words = [door.file, *door.installers, *door.installers.values()]
    if any(character in str(word) for word in words for character in "\t\n"):
        raise by.error("a name of it has a tab or a line's end in it")
    return door


def settings_inside(doors: Mapping[str, EngineDoor]) -> str:
    """The doors as the variable LOCKSTEP_TAP_DOORS has them: module, engine, function and file, a line each."""
    return "\n".join(
        f"{module}\t{name}\t{function}\t{door.file.absolute()}"
        for name, door in doors.items()
        for module, function in door.installers.items()
    )
