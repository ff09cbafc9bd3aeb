"""Fill what the conformance suite of engines looks at."""

from __future__ import annotations

from asyncpar.engines.interface import PlaceOutput, PlaceProgress
from asyncpar.engines.output import Console
from asyncpar.observe.progress_line import plain_line
from asyncpar.testing.engines import EngineOutput


class RecordingConsole(Console):
    """Keeps what ranks print and how far they are."""

    def __init__(self, seen: EngineOutput | None = None) -> None:
        self.seen = seen or EngineOutput()

    def output(self, output: PlaceOutput) -> None:
        text = output.text.decode()
        if output.is_error:
            self.seen.errors += text
        else:
            self.seen.text += text

    def progress(self, progress: PlaceProgress) -> None:
        self.seen.progress.append(plain_line(progress.record))
