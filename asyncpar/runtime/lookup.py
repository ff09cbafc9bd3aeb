"""Find the class of an actor that another rank wants to start here.

Only classes that this process has already defined can be found: nothing is imported, and no code travels.
"""

from __future__ import annotations

from asyncpar.errors import UsageError
from asyncpar.runtime.actor import Actor


def class_path(actor_class: type[Actor]) -> str:
    """Return ``module:qualified name``, by which other ranks find the class."""
    return f"{actor_class.__module__}:{actor_class.__qualname__}"


def find_actor_class(path: str) -> type[Actor]:
    """Return the subclass of ``Actor`` at ``path``, the newest if it was defined again.

    Raises ``UsageError`` if this process knows none.
    """
    found = None
    waiting: list[type[Actor]] = [Actor]
    seen: set[type[Actor]] = set()
    while waiting:
        for kind in waiting.pop().__subclasses__():
            if kind not in seen:
                seen.add(kind)
                waiting.append(kind)
                if class_path(kind) == path:
                    found = kind
    if found is None:
        raise UsageError(f"actor class: {path} is not known to this rank; import its module there before the spawn")
    return found
