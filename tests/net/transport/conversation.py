"""Surroundings of the pure halves of a link in their tests: a referee, waiters, and what was emitted."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncpar.net.wire.frame import FrameHeader, FrameKind, Key


@dataclass
class Judge:
    """A referee that writes down mismatches."""

    stale: set[tuple[int, int]] = field(default_factory=set)
    mismatches: list[FrameHeader] = field(default_factory=list)

    def is_stale(self, group: int, sequence: int) -> bool:
        return (group, sequence) in self.stale

    def mismatch(self, header: FrameHeader) -> None:
        self.mismatches.append(header)


@dataclass
class Outcome:
    """How a receive ended: the part of a future that an inbox needs."""

    is_done: bool = False
    error: BaseException | None = None

    def done(self) -> bool:
        return self.is_done

    def cancel(self) -> None:
        self.is_done = True

    def set_result(self, result: None, /) -> None:
        assert not self.is_done
        self.is_done = True

    def set_exception(self, exception: BaseException, /) -> None:
        assert not self.is_done
        self.is_done, self.error = True, exception

    def exception(self) -> BaseException | None:
        return self.error


@dataclass
class Emitted:
    """The frames that were emitted: kind, key, fingerprint, value."""

    frames: list[tuple[FrameKind, Key, int, int]] = field(default_factory=list)

    def __call__(self, kind: FrameKind, key: Key, fingerprint: int, value: int) -> None:
        self.frames.append((kind, key, fingerprint, value))

    def take(self) -> list[tuple[FrameKind, Key, int, int]]:
        """Return what was emitted since the last time."""
        taken, self.frames = self.frames, []
        return taken


def frame(kind: FrameKind, key: Key, length: int, *, fingerprint: int = 7) -> FrameHeader:
    """Return the header of a frame for ``key``."""
    return FrameHeader(kind, 0, *key, fingerprint, length)
