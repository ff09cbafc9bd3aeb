"""Become a rank: run as a file by ``python -I -S``, standard library only, so it starts in milliseconds.

``trampoline.py GO AGENT PROGRAM [ARGUMENT...]`` waits for a byte on the descriptor GO, then replaces itself by PROGRAM.
The agent writes that byte once the reaper knows this process; if the agent dies before, the pipe ends and so does this
process.  It asks the kernel (Linux: PR_SET_PDEATHSIG) to be killed when its parent, process AGENT, dies.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_EXECUTE = 126
_NOT_FOUND = 127


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when ``parent`` dies; does nothing on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def restore_signals() -> None:
    """Give the command the dispositions that programs expect, not those of Python or of a shell's background jobs."""
    for name in ("SIGINT", "SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the agent starts us with it blocked


def main(go: int, agent: int, command: list[str]) -> None:
    """Wait for the byte, then execute ``command``."""
    restore_signals()
    die_with_parent(agent)
    if not os.read(go, 1):
        os._exit(1)
    os.close(go)
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        os.write(2, f"asyncpar launch: {command[0]}: program not found\n".encode())
        os._exit(_NOT_FOUND)
    except OSError as error:
        os.write(2, f"asyncpar launch: {command[0]}: {error.strerror}\n".encode())
        os._exit(_CANNOT_EXECUTE)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
