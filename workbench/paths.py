"""Where Lockstep keeps files on this machine (torch-free). Each can be moved by an environment variable; the state
directory is the engine's as well (`engine.folders`)."""

from __future__ import annotations

import errno
import fnmatch
import os
import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from platformdirs import user_cache_path, user_data_path

from lockstep.engine.errors import RequestError
from lockstep.engine.folders import private_folder
from lockstep.engine.text import did_you_mean, printable

#: Names that Windows keeps for devices, with any ending.
_RESERVED = frozenset(
    {"CON", "PRN", "AUX", "NUL", *(f"{port}{n}" for port in ("COM", "LPT") for n in range(10))}
)


#: Recorded bugs that come with the package: `gallery/NAME`.
GALLERY = Path(__file__).resolve().parents[1] / "sessions" / "recorded"


def data_directory() -> Path:
    """What must stay: `$LOCKSTEP_DATA_DIR`, or the user's data directory (XDG)."""
    root = os.environ.get("LOCKSTEP_DATA_DIR")
    return Path(root) if root else user_data_path("lockstep", appauthor=False)


def cache_directory() -> Path:
    """What can be made again: `$LOCKSTEP_CACHE_DIR`, or the user's cache directory (XDG)."""
    root = os.environ.get("LOCKSTEP_CACHE_DIR")
    return Path(root) if root else user_cache_path("lockstep", appauthor=False)


def golden_directory() -> Path:
    """Where golden sessions live: `shared_golden_directory`, or in the cache."""
    return shared_golden_directory() or cache_directory() / "golden"


def shared_golden_directory() -> Path | None:
    """`$LOCKSTEP_GOLDEN_DIR`, a folder of golden sessions that goes from machine to machine, as a CI's cache does."""
    root = os.environ.get("LOCKSTEP_GOLDEN_DIR")
    return Path(root) if root else None


def new_golden_directory() -> Path:
    """The same, to record to; made if need be, for this user alone."""
    return _writable(golden_directory(), "LOCKSTEP_CACHE_DIR")


def sessions_directory() -> Path:
    """Where sessions go that nobody named a place for; made if need be, for this user alone."""
    return _writable(_sessions(), "LOCKSTEP_DATA_DIR")


def saved_sessions() -> dict[Path, os.stat_result]:
    """What lies there by the name of a session; see `entries`."""
    return entries(_sessions(), "*.session")


def _writable(directory: Path, variable: str) -> Path:
    """A directory that is made if need be, for this user alone. OSError where nothing can be written there names the
    variable to set."""
    try:
        if os.access(private_folder(directory), os.W_OK | os.X_OK):
            return directory
        why = os.strerror(errno.EACCES)
    except OSError as error:
        why = error.strerror or str(error)
    raise OSError(f"cannot write to {directory}: {why}. Set {variable} to a directory of your own.")


def _sessions() -> Path:
    return data_directory() / "sessions"


def entries(directory: Path, *names: str) -> dict[Path, os.stat_result]:
    """What lies in a directory under names that match one of the globs, newest first, with what is known of it (of a
    link: of itself). What vanishes meanwhile is left out; a directory that is not there has nothing. OSError where it
    cannot be read."""
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(directory):
            if any(fnmatch.fnmatch(name, one) for one in names):
                with suppress(FileNotFoundError):
                    found[directory / name] = (directory / name).lstat()
    return dict(sorted(found.items(), key=lambda item: item[1].st_mtime, reverse=True))


def find_session(name: str | Path) -> Path:
    """A session by its path, by its name in `sessions_directory`, or as `gallery/NAME`, with or without the ending; a
    path comes first.
    What is neither comes back as the path that it would be, for whoever opens it to report it."""
    path = Path(name).expanduser()
    # Not Path.exists: it raises where a name is too long to be one.
    if os.path.exists(path) or not path.name:
        return path
    if path.parent == Path("gallery"):
        return _of_gallery(path.name.removesuffix(".session"))
    if path.parent != Path():
        return path
    kept = _sessions() / f"{path.name.removesuffix('.session')}.session"
    return kept if os.path.isfile(kept) else path


def gallery_names() -> list[str]:
    """The recorded bugs that come with the package, as they are opened."""
    return sorted(f"gallery/{path.stem}" for path in GALLERY.glob("*.session"))


def _of_gallery(stem: str) -> Path:
    """A recording of the gallery; RequestError for a name that none has."""
    if (name := f"gallery/{stem}") in (known := gallery_names()):
        return GALLERY / f"{stem}.session"
    advice = did_you_mean(name, known, f"there are {', '.join(known)}", most=1)
    raise RequestError(f"there is no {printable(name)}: {advice}")


def session_of(target: str) -> Path | None:
    """The session that MODEL|SESSION on a command line means; None where it is a model."""
    path = find_session(target)
    return path if target != "demo" and path.suffix == ".session" and not path.is_dir() else None


def file_stem(name: str) -> str:
    """A foreign name (of a tap, a model) as part of a file's name: letters, digits and `-_=.`, at most 100 bytes.

    It is one name and no path, is not hidden, and means nothing special to a shell or to Windows. Two names may become
    the same one, so whoever writes a file looks whether it is taken.
    """
    kept = "".join(c if c.isalnum() or c in "-_=." else "-" for c in name[:400])
    kept = re.sub(r"-{2,}|\.{2,}", "-", kept)
    kept = kept.encode()[:100].decode(errors="ignore").strip("-.")
    return f"_{kept}" if kept.partition(".")[0].upper() in _RESERVED else kept or "unnamed"


def new_session_path(stem: str) -> Path:
    """A name in `sessions_directory` that is not taken: STEM-DATE-TIME-PROCESS.session. Two processes that start in
    the same second get two names."""
    named = f"{file_stem(stem)}-{datetime.now().strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    directory = sessions_directory()
    candidates = (
        directory / f"{named}{suffix}.session" for suffix in ("", *(f"-{n}" for n in range(2, 1000)))
    )
    return next(path for path in candidates if not path.exists())
