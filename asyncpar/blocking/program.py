"""Reports of a program's failures to its launcher, and its end by signals, as ``asyncpar.run`` does for coroutines."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import cast

from asyncpar.core.observe.reporting import Reporter, open_closed_streams, record_failures
from asyncpar.core.signals import AskToLeave, OwnHandler, Termination
from asyncpar.runner import SIGINT_EXIT, SIGNAL_SECONDS, SIGTERM_EXIT, is_left_behind

_reporter: Reporter | None = None


def report_failures() -> None:
    """Report the exception that ends this program to the agent that started it, if any.  Further calls do nothing.

    Ctrl-C, which every rank gets, is then not shown.
    """
    global _reporter  # noqa: PLW0603
    if _reporter is not None:
        return
    open_closed_streams()
    _reporter = reporter = Reporter.from_environment(os.environ)
    if not reporter.is_connected:
        return
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt):
            shown(kind, error, where)

    sys.excepthook = show
    record_failures(reporter)


@contextmanager
def ended_in_order(ask: AskToLeave | None = None) -> Iterator[None]:
    """Turn SIGTERM into an exception meanwhile, which leaves all contexts; the process ends with status 143.

    With ``ask`` the first SIGTERM calls that instead, within the signal handler, where nothing may wait for the loop.
    Under a launcher Ctrl-C ends it with status 130 and shows nothing.  It has an effect only in the main thread, and
    only if the program has no handler of its own.
    """
    before = signal.getsignal(signal.SIGTERM)
    termination = Termination(_exit)
    termination.ask_first(ask)
    terminate = OwnHandler(lambda _number, _frame: termination.handle(), before)
    is_ours = threading.current_thread() is threading.main_thread() and before is signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, terminate)
    try:
        try:
            yield
        except Exception as error:
            if _reporter is not None and _reporter.is_connected and is_left_behind(error):
                _reporter.failure(error)
                with suppress(SystemExit):  # SIGTERM, which explains nothing
                    time.sleep(SIGNAL_SECONDS)
            raise
    except KeyboardInterrupt:
        if _reporter is not None and _reporter.is_connected:
            raise SystemExit(SIGINT_EXIT) from None
        raise
    finally:
        if is_ours and signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, before)


def terminate_main_thread() -> None:
    """Make the main thread handle a SIGTERM, even while it waits.  Thread-safe."""
    signal.pthread_kill(cast("int", threading.main_thread().ident), signal.SIGTERM)


def _exit() -> None:
    raise SystemExit(SIGTERM_EXIT)
