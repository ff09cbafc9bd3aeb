"""Outlive the agent by a moment: run as a file by ``python -I -S``, standard library only, in a session of its own.

Reads lines from standard input: ``+PID`` and ``-PID`` register and forget a process group, ``directory PATH`` names a
directory of ours.  When the input ends, which happens however the agent ends, each group still registered is killed and
each directory removed.
"""

import os
import signal
import sys


def follow(lines: "list[bytes]", groups: "set[int]", directories: "set[str]") -> None:
    """Apply ``lines`` to what is registered."""
    for line in lines:
        if line.startswith(b"+"):
            groups.add(int(line[1:]))
        elif line.startswith(b"-"):
            groups.discard(int(line[1:]))
        elif line.startswith(b"directory "):
            directories.add(os.fsdecode(line[len(b"directory ") :]))


def clean_up(groups: "set[int]", directories: "set[str]") -> None:
    """Kill ``groups`` and remove ``directories`` (which hold files only)."""
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    for directory in directories:
        try:
            for name in os.listdir(directory):
                os.unlink(os.path.join(directory, name))
            os.rmdir(directory)
        except OSError:
            continue


def main() -> None:
    """Read until the agent is gone, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    directories: set[str] = set()
    partial = b""
    while chunk := os.read(0, 4096):
        *lines, partial = (partial + chunk).split(b"\n")
        follow(lines, groups, directories)
    clean_up(groups, directories)


if __name__ == "__main__":
    main()
    sys.exit(0)
