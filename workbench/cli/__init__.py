"""The command line. Imported before anything else of it: what it imports must not come from the working directory."""

# Python has loaded both already. Even `typing` or `__future__` would be searched for, and found where it should not.
import os
import sys


def _unsearch_working_directory() -> None:
    """Take out of `sys.path` what an empty or relative entry of PYTHONPATH, or `python -m`, put in: the working
    directory may hold a stranger's `torch.py`. The folder of these packages stays."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed: nothing is found there
        return
    if not sys.flags.safe_path and sys.path[0] in ("", here):
        del sys.path[0]
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    relative = {os.path.abspath(entry) for entry in entries if not os.path.isabs(entry)} - set(entries)
    sys.path[:] = [entry for entry in sys.path if entry not in relative]
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
    if root not in sys.path:
        sys.path.append(root)


_unsearch_working_directory()
