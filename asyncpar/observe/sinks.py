"""Sinks: other places that get the summaries of a job, such as experiment trackers; found by the entry point
``asyncpar.sinks``.

A sink runs in the launcher's process, in a thread of its own.  When it is slow, summaries are dropped and counted; when
it fails, this is reported once and the sink is left out.  The job goes on undisturbed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, Protocol

from asyncpar.core.observe.reporting import text_of
from asyncpar.errors import UsageError
from asyncpar.observe.summary import JobSummary

ENTRY_POINTS: Final = "asyncpar.sinks"
KUBEFLOW_URL: Final = "KUBEFLOW_TRAINER_SERVER_URL"
"""The variable by which Kubeflow Trainer requests the status of a job: the sink ``kubeflow`` needs no option."""
_MOST_WAITING: Final = 8
_CLOSE_PATIENCE: Final = 2.0


class Sink(Protocol):
    """Receives the summaries of a job.  All calls are in one thread; an exception ends the sink, not the job."""

    def take(self, job: JobSummary) -> None:
        """Handle the summary of about one second."""
        ...

    def close(self, outcome: str) -> None:
        """End: ``outcome`` describes how the job ended."""
        ...


MakeSink = Callable[[], Sink]


def load_sink(name: str) -> MakeSink:
    """Return the factory of the sink ``name``: an entry point, or ``package.module:NAME``.

    Raises ``UsageError`` if there is none, listing the existing ones.
    """
    import importlib.metadata  # takes long to import, and few jobs have sinks

    found = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    module, colon, attribute = name.partition(":")
    try:
        if name in found:
            make = found[name].load()
        elif colon:
            make = getattr(importlib.import_module(module), attribute)
        else:
            known = ", ".join(sorted(found)) or "none"
            raise UsageError(f"--sink: expected one of those installed ({known}) or package.module:NAME, got {name!r}")
    except (ImportError, AttributeError) as error:
        if name == "opentelemetry":
            raise UsageError(f"--sink: {name} needs its SDK ({error}); install asyncpar[opentelemetry]") from error
        raise UsageError(f"--sink: {name} cannot be imported: {error}") from error
    if not callable(make):
        raise UsageError(f"--sink: {name}: expected a class or function that makes a sink, got {type(make).__name__}")
    return make  # type: ignore[no-any-return]


def names_of_sinks(asked: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the sinks of a job: those that the user ``asked`` for, and the one that its ``environment`` requests."""
    is_wanted = bool(environment.get(KUBEFLOW_URL)) and "kubeflow" not in asked
    return (*asked, "kubeflow") if is_wanted else asked


class SinkThread:
    """Feeds one sink.  ``report`` is called, in the sink's thread, with a description of its failure."""

    def __init__(self, name: str, make: MakeSink, report: Callable[[str], None]) -> None:
        self._name, self._make, self._report = name, make, report
        self._waiting: queue.Queue[JobSummary | str] = queue.Queue(_MOST_WAITING)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"asyncpar sink {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def take(self, job: JobSummary) -> None:
        """Hand over a summary; it is dropped and counted if several are waiting for the sink."""
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            self.dropped += 1

    def close(self, outcome: str) -> None:
        """Report the outcome to the sink and wait for it, at most two seconds."""
        with suppress(queue.Full):
            self._waiting.put(outcome, timeout=_CLOSE_PATIENCE / 2)
            self._thread.join(_CLOSE_PATIENCE)
        if self.dropped:
            self._report(f"sink {self._name}: {self.dropped} summaries were dropped, because it was slow")

    def _run(self) -> None:
        try:
            sink = self._make()
            while not isinstance(item := self._waiting.get(), str):
                sink.take(item)
            sink.close(item)
        except Exception as error:  # noqa: BLE001  # foreign code: it is reported, and the job goes on
            self._report(
                f"sink {self._name} has failed and gets nothing more: {type(error).__name__}: {text_of(error)}"
            )
            while not isinstance(self._waiting.get(), str):
                pass
