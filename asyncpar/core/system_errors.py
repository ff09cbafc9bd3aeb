"""Reasons given by the operating system, and advice when a limit is reached."""

from __future__ import annotations

import errno
from typing import Final

FULL: Final = {
    errno.EMFILE: "raise this process's limit: ulimit -n",
    errno.ENFILE: "raise the system's limit: sysctl fs.file-max",
}
"""Errors of too many open files, and what to do about them."""


def os_reason(error: BaseException) -> str:
    """Return the system's reason for an error, for messages; for too many open files with the limit to raise."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    advice = FULL.get(error.errno or 0)
    return error.strerror if advice is None else f"{error.strerror}; {advice}"


def note_limit(error: OSError) -> None:
    """Add the limit to raise to an error of too many open files, as a note shown with its traceback."""
    advice = FULL.get(error.errno or 0)
    if advice is not None and advice not in getattr(error, "__notes__", ()):
        error.add_note(advice)
