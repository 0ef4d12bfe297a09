"""UserSettings and what is remembered between runs, under the XDG directories. Errors name file and key."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from textual.keys import Keys
from textual.message import Message

from lockstep.engine.folders import private_folder, state_directory
from lockstep.workbench.settings import SESSION_KEYS, SettingsError, config_file, positive, read
from lockstep.workbench.tui.theme import THEMES

_THEME_NAMES = tuple(theme.name for theme in THEMES)
_RECENT = 12


class SettingChosen(Message):
    """The user has chosen a setting on a screen: the application keeps it for the next time."""

    def __init__(self, key: str, value: str) -> None:
        super().__init__()
        self.key, self.value = key, value


@dataclass(frozen=True, slots=True)
class UserSettings:
    """What `config.toml` may state."""

    theme: str = _THEME_NAMES[0]
    token_colour: str = "probability"
    timeout: float | None = None  # seconds without progress until a rank counts as hung
    start_timeout: float | None = None  # the same while ranks start and load
    reference: str = "transformers"  # whom `golden` asks of a GGUF file
    catch: tuple[str, ...] = ("nan", "desync")  # catchpoints that are set when a model is started
    keys: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # by action, the keys in place of its own

    @property
    def host_words(self) -> list[str]:
        """What of it a host is given, as its options."""
        given = (("--timeout", self.timeout), ("--start-timeout", self.start_timeout))
        seconds = [word for name, value in given if value is not None for word in (name, str(value))]
        asked = ["--reference", self.reference] if self.reference != DEFAULTS.reference else []
        return [*seconds, *asked, *(word for sentinel in self.catch for word in ("--catch", sentinel))]


DEFAULTS = UserSettings()
#: What the tokens may be coloured by.
TOKEN_COLOURS = ("probability", "entropy", "divergence")
#: What may be caught from the beginning: every sentinel that needs no reference.
CATCHABLE = ("nan", "inf", "desync", "repetition", "eos", "error")
_CHOICES = {
    "theme": _THEME_NAMES,
    "token_colour": TOKEN_COLOURS,
    "reference": ("transformers", "llama.cpp"),
}
_SECONDS = ("timeout", "start_timeout")
#: Keys that have a name and are no characters.
_NAMED_KEYS = {key.value for key in Keys if "<" not in key.value} | {"space"}


def load(file: Path | None = None) -> UserSettings:
    """The settings; the defaults where there is no file."""
    file = file or config_file()
    checked = ((key, _checked(file, key, value)) for key, value in read(file).items())
    return UserSettings(**{key: value for key, value in checked if key not in SESSION_KEYS})


def _checked(file: Path, key: str, value: Any) -> Any:
    if key in (*_SECONDS, *SESSION_KEYS):
        return positive(file, key, value)
    if key == "catch":
        return _catchpoints(file, value)
    if key == "keys":
        return _keys(file, value)
    if key not in _CHOICES:
        known = ", ".join((*_CHOICES, *_SECONDS, *SESSION_KEYS, "catch", "[keys]"))
        raise SettingsError(f"{file}: {key}: no such setting; there are {known}")
    if value not in _CHOICES[key]:
        raise SettingsError(
            f"{file}: {key} = {value!r}: must be one of {', '.join(map(repr, _CHOICES[key]))}"
        )
    return str(value)


def _catchpoints(file: Path, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or any(one not in CATCHABLE for one in value):
        raise SettingsError(f"{file}: catch = {value!r}: must be a list of {', '.join(map(repr, CATCHABLE))}")
    return tuple(dict.fromkeys(value))


def _keys(file: Path, table: Any) -> dict[str, tuple[str, ...]]:
    """The [keys] table: an action and its key, or a list of keys. What actions there are the workbench knows."""
    if not isinstance(table, dict):
        raise SettingsError(
            f'{file}: keys = {table!r}: must be a table: [keys], then ACTION = "KEY" in lines'
        )
    found = {}
    for action, value in table.items():
        names = value if isinstance(value, list) else [value]
        for name in names:
            if not _is_key(name):
                raise SettingsError(
                    f"{file}: [keys] {action} = {value!r}: {name!r} is no key: use a character, or a name such as"
                    " 'space', 'f5', 'ctrl+r'"
                )
        found[action] = tuple(names)
    return found


def _is_key(name: Any) -> bool:
    """Whether a terminal has such a key."""
    if not isinstance(name, str):
        return False
    *held, last = name.split("+") if len(name) > 1 else [name]
    known = (len(last) == 1 and last.isprintable()) or last in _NAMED_KEYS or name in _NAMED_KEYS
    return known and all(one in ("ctrl", "alt", "shift") for one in held)


def save(key: str, value: str, file: Path | None = None) -> None:
    """Remember a setting; the others in the file stay as they are, a file that is not there is made."""
    file = file or config_file()
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    tables = next((at for at, text in enumerate(lines) if text.lstrip().startswith("[")), len(lines))
    kept = [text for text in lines[:tables] if text.partition("=")[0].strip() != key] + lines[tables:]
    private_folder(file.parent)
    _replace(file, "\n".join([f'{key} = "{value}"', *kept]) + "\n")


def recent_file() -> Path:
    """Where the recent sessions and models are remembered."""
    return state_directory() / "recent.json"


def recent(file: Path | None = None) -> list[Path]:
    """What was opened last, newest first, as far as it is still there."""
    try:
        raw = json.loads((file or recent_file()).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []  # only a memory: a broken one is as good as none, and is written anew
    paths = [Path(item) for item in raw if isinstance(item, str)] if isinstance(raw, list) else []
    return [path for path in paths if path.exists()]


def remember(path: Path, file: Path | None = None) -> None:
    """Put a session or a model at the head of the recent ones. A state directory that cannot be written is let be."""
    file = file or recent_file()
    path = path.absolute()
    kept = [path, *(other for other in recent(file) if other != path)][:_RECENT]
    try:
        private_folder(file.parent)
        _replace(file, json.dumps([str(item) for item in kept], indent=1))
    except OSError:
        return


def _replace(file: Path, text: str) -> None:
    """Write a file in one piece; a new one is for this user alone."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
    if file.exists():
        fresh.chmod(stat.S_IMODE(file.stat().st_mode))
    fresh.replace(file)
