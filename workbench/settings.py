"""The user's settings file, `config.toml` in the user's configuration directory (XDG), and what all programs take from
it. What the screens alone take is in `workbench.tui.settings`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_config_path

if TYPE_CHECKING:
    from lockstep.sessions.limits import ReadLimits

#: What reading one session may cost: MiB of memory for all that is decoded, seconds of processor time for a view.
SESSION_KEYS = {"session_memory": "MiB", "session_seconds": "seconds"}


class SettingsError(ValueError):
    """A settings file that holds something it must not: the message names the file and the key."""


def config_file() -> Path:
    """Where the settings are read from."""
    return user_config_path("lockstep") / "config.toml"


def read(file: Path) -> dict[str, object]:
    """The settings as the file has them; none where there is no file."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {file}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file}: not valid TOML: {error}") from error


def positive(file: Path, key: str, value: object) -> float:
    """The value of a key that must be a number above 0: of seconds, if nothing else is known of it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise SettingsError(
            f"{file}: {key} = {value!r}: must be a number of {SESSION_KEYS.get(key, 'seconds')} above 0"
        )
    return float(value)


def session_limits(file: Path | None = None) -> ReadLimits:
    """What reading one session may cost, here."""
    # Imported here: the first paint reads the settings, and does not wait for numpy and SQLite.
    from lockstep.sessions.limits import DEFAULT, ReadLimits

    file = file or config_file()
    raw = read(file)
    memory = positive(file, "session_memory", raw.get("session_memory", DEFAULT.memory >> 20))
    seconds = positive(file, "session_seconds", raw.get("session_seconds", DEFAULT.seconds))
    return ReadLimits(int(min(memory, 1 << 40) * (1 << 20)), seconds)
