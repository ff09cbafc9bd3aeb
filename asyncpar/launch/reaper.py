"""Outlive the agent briefly: run as a file by ``python -I -S``, standard library only, in a session of its own.

Reads lines from standard input: ``+PID`` and ``-PID`` register and forget a process group, ``remove PATH`` names a file
or a directory (of files) of ours, ``explain PATH`` and ``-explain PATH`` register and forget the folder of a
post-mortem.  When the input ends, which happens however the agent ends, each group that is still registered is killed,
each path removed, and for each folder the program that explains it is started.
"""

import os
import signal
import sys


def follow(lines: "list[bytes]", groups: "set[int]", paths: "set[str]", folders: "set[str]") -> None:
    """Apply ``lines`` to the registrations."""
    for line in lines:
        if line.startswith(b"explain "):
            folders.add(os.fsdecode(line[len(b"explain ") :]))
        elif line.startswith(b"-explain "):
            folders.discard(os.fsdecode(line[len(b"-explain ") :]))
        elif line.startswith(b"+"):
            groups.add(int(line[1:]))
        elif line.startswith(b"-"):
            groups.discard(int(line[1:]))
        elif line.startswith(b"remove "):
            paths.add(os.fsdecode(line[len(b"remove ") :]))


def clean_up(groups: "set[int]", paths: "set[str]") -> None:
    """Kill ``groups`` and remove ``paths``."""
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    for path in paths:
        try:
            remove(path)
        except OSError:
            continue


def explain(folders: "set[str]") -> None:
    """Start the program that writes the summary of each of ``folders``."""
    for folder in folders:
        command = [sys.executable, "-m", "asyncpar.launch.post_mortem", folder]
        try:
            os.posix_spawn(sys.executable, command, os.environ)
        except OSError:
            continue


def remove(path: str) -> None:
    """Remove the file, or the directory of files, at ``path``; of a link, only the link."""
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    for name in os.listdir(path):
        os.unlink(os.path.join(path, name))
    os.rmdir(path)


def main() -> None:
    """Read until the agent is gone, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    paths: set[str] = set()
    folders: set[str] = set()
    partial = b""
    while chunk := os.read(0, 4096):
        *lines, partial = (partial + chunk).split(b"\n")
        follow(lines, groups, paths, folders)
    clean_up(groups, paths)
    explain(folders)


if __name__ == "__main__":
    main()
    sys.exit(0)
