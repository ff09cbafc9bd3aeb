"""``python -m asyncpar`` is the command ``asyncpar``.  It imports as little as possible before it handles Ctrl-C."""

import atexit
import gc
import os
import signal

_YOUNG_OBJECTS = 20_000


def _end(number: int, frame: object) -> None:  # noqa: ARG001
    """End at once, as a shell expects of a program that Ctrl-C ends: nothing is begun yet, or all is over."""
    os._exit(128 + number)


def main(prog_name: str = "asyncpar") -> None:
    """Run the command; Ctrl-C gives 130 from the first line on, while modules are imported, and to the end."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    gc.set_threshold(_YOUNG_OBJECTS)  # modules make many objects, which all stay
    atexit.register(gc.freeze)  # nor is there anything among them to look for at the end
    from asyncpar.core.observe.reporting import open_closed_streams

    # Before the rest is imported: libffi, which ctypes loads, keeps a file open, under the number of a closed stream.
    open_closed_streams()
    from asyncpar.launch.cli import main as command

    command(prog_name=prog_name)


if __name__ == "__main__":
    main()
