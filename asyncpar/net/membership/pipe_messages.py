"""Messages on the socket between an agent and a process of an elastic job: JSON objects, one per line.  Pure.

They stand apart from the end in the process, so that agents import nothing of training.
"""

from __future__ import annotations

from typing import Any, Final

from asyncpar.errors import ProtocolError
from asyncpar.net.membership.lineage import Lineage

MOST_BYTES: Final = 1 << 20
"""The longest line."""


def encode_lineage(lineage: Lineage | None) -> list[Any] | None:
    """Return a lineage as JSON."""
    return None if lineage is None else [lineage.step, lineage.digest.hex()]


def decode_lineage(content: Any) -> Lineage | None:
    """Return the lineage in ``content``.  Raises ``ProtocolError`` if it is none."""
    if content is None:
        return None
    try:
        step, digest = content
        return Lineage(int(step), bytes.fromhex(digest))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"lineage: expected a step and a digest, got {content!r}") from error
