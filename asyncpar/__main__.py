"""The command ``asyncpar`` as ``python -m asyncpar``.  It imports as little as possible before it handles Ctrl-C."""

import atexit
import gc
import os
import signal

_YOUNG_OBJECTS = 20_000


def _end(number: int, frame: object) -> None:  # noqa: ARG001
    """Exit at once, with the status a shell expects after Ctrl-C: nothing has begun yet, or everything is over."""
    os._exit(128 + number)


def main(prog_name: str = "asyncpar") -> None:
    """Run the command; Ctrl-C exits with 130 at any time: while modules are imported, and until the end."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    gc.set_threshold(_YOUNG_OBJECTS)  # modules make many objects, all long-lived
    atexit.register(gc.freeze)  # and collecting them at exit is useless, too
    from asyncpar.core.observe.reporting import open_closed_streams

    # Before other imports: libffi, which ctypes loads, keeps a file open, which may take the number of a closed stream.
    open_closed_streams()
    from asyncpar.launch.cli import main as command

    command(prog_name=prog_name)


if __name__ == "__main__":
    main()
