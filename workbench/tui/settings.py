"""UserSettings and what is remembered between runs, under the XDG directories. Errors name file and key."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual.message import Message

from workbench.paths import state_directory
from workbench.settings import SESSION_KEYS, SettingsError, config_file, positive, read
from workbench.tui.theme import THEMES

_THEME_NAMES = tuple(theme.name for theme in THEMES)
_RECENT = 12


class SettingChosen(Message):
    """The user has chosen a setting on a screen: the application keeps it for the next time."""

    def __init__(self, key: str, value: str) -> None:
        super().__init__()
        self.key, self.value = key, value


@dataclass(frozen=True, slots=True)
class UserSettings:
    """What `config.toml` may say."""

    theme: str = _THEME_NAMES[0]
    token_colour: str = "probability"
    timeout: float | None = None  # seconds without progress until a rank counts as hung
    start_timeout: float | None = None  # the same while ranks start and load

    @property
    def host_words(self) -> list[str]:
        """What of it a host is told, as its options."""
        given = (("--timeout", self.timeout), ("--start-timeout", self.start_timeout))
        return [word for name, value in given if value is not None for word in (name, str(value))]


#: What the tokens may be coloured by.
TOKEN_COLOURS = ("probability", "entropy", "divergence")
_CHOICES = {"theme": _THEME_NAMES, "token_colour": TOKEN_COLOURS}
_SECONDS = ("timeout", "start_timeout")


def load(file: Path | None = None) -> UserSettings:
    """The settings; the defaults where there is no file."""
    file = file or config_file()
    checked = ((key, _checked(file, key, value)) for key, value in read(file).items())
    return UserSettings(**{key: value for key, value in checked if key not in SESSION_KEYS})


def _checked(file: Path, key: str, value: Any) -> Any:
    if key in (*_SECONDS, *SESSION_KEYS):
        return positive(file, key, value)
    if key not in _CHOICES:
        known = ", ".join((*_CHOICES, *_SECONDS, *SESSION_KEYS))
        raise SettingsError(f"{file}: {key}: no such setting; there are {known}")
    if value not in _CHOICES[key]:
        raise SettingsError(
            f"{file}: {key} = {value!r}: must be one of {', '.join(map(repr, _CHOICES[key]))}"
        )
    return str(value)


def save(key: str, value: str, file: Path | None = None) -> None:
    """Remember a setting; the others in the file stay as they are, a file that is not there is made."""
    file = file or config_file()
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    kept = [text for text in lines if text.partition("=")[0].strip() != key]
    file.parent.mkdir(parents=True, exist_ok=True)
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
        file.parent.mkdir(parents=True, exist_ok=True)
        _replace(file, json.dumps([str(item) for item in kept], indent=1))
    except OSError:
        return


def _replace(file: Path, text: str) -> None:
    """Write a file in one piece."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(file)
