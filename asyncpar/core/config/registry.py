"""Named kinds of things to which code outside the package may add: codecs, lanes, algorithms, schedules.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from asyncpar.errors import UsageError

_NAME = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII)


class Named(Protocol):
    """A record with a name."""

    @property
    def name(self) -> str: ...


K = TypeVar("K", bound=Named)


class Registry(Generic[K]):
    """The kinds of one thing by name, in the order of registration.

    ``what`` names the thing in errors.  ``reserved`` names have another meaning for users and cannot be taken.
    Registrations apply to this process only: all ranks that use a name must register it.
    """

    def __init__(self, what: str, kinds: Iterable[K] = (), *, reserved: Iterable[str] = ()) -> None:
        self.what = what
        self._reserved = frozenset(reserved)
        self._kinds: dict[str, K] = {}
        self.kinds: Mapping[str, K] = MappingProxyType(self._kinds)
        """A live view, for hot paths."""
        for kind in kinds:
            self.register(kind)

    def register(self, kind: K) -> None:
        """Add ``kind``.  Raises ``UsageError`` for a name that is taken, reserved or malformed."""
        self.check(kind.name)
        self._kinds[kind.name] = kind

    def check(self, name: str) -> None:
        """Raise ``UsageError`` unless a kind may be registered as ``name``."""
        if not _NAME.fullmatch(str(name)):
            raise UsageError(
                f"{self.what}: expected a name of lower-case letters, digits, '_' and '-' that begins with a letter, "
                f"got {name!r}; change the name"
            )
        if name in self._reserved:
            raise UsageError(f"{self.what}: the name {name!r} has a meaning of its own; choose another name")
        if name in self._kinds:
            raise UsageError(
                f"{self.what}: the name {name!r} is taken; choose another name, or unregister {name!r} first"
            )

    def unregister(self, name: str) -> None:
        """Remove the kind called ``name``.  Raises ``UsageError`` if there is none."""
        if name not in self._kinds:
            raise UsageError(f"{self.what}: expected one of {', '.join(self._kinds)}, got {name!r}")
        del self._kinds[name]

    @contextmanager
    def registered(self, *kinds: K) -> Iterator[None]:
        """Register ``kinds`` for the duration of a ``with`` block."""
        added: list[K] = []
        try:
            for kind in kinds:
                self.register(kind)
                added.append(kind)
            yield
        finally:
            for kind in added:
                self._kinds.pop(kind.name, None)

    def get(self, name: str) -> K | None:
        """Return the kind called ``name``, None if there is none."""
        return self._kinds.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._kinds)

    def __iter__(self) -> Iterator[K]:
        return iter(tuple(self._kinds.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._kinds
