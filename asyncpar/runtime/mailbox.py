"""Mailboxes: how many messages may wait in front of an actor, and what becomes of those that find no room.

Whatever the policy, a sender may have about ``window.WINDOW`` bytes under way to one actor (see ``window``), so that no
mailbox grows without bound.  With the policy ``wait`` that is all: the rest waits at the senders.  The other two
policies bound the number of waiting messages and never make a sender wait for long.

The module decides only.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from asyncpar.errors import UsageError

DEFAULT_LIMIT: Final = 1000


class WhenFull(enum.StrEnum):
    """What happens to a message that finds the mailbox full."""

    WAIT = "wait"
    """It waits at its sender: asks by themselves, tells if they are awaited."""
    FAIL = "fail"
    """It is refused: an ask raises ``MailboxFull``, a tell becomes a dead letter."""
    DROP_OLDEST = "drop_oldest"
    """It gets the place of the oldest waiting message, which is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """The policy of an actor class: ``mailbox = Mailbox(limit=100, when_full="drop_oldest")`` in its body.

    ``limit`` is how many messages may wait (default 1000); with ``wait`` there is none, since senders are slowed down
    by bytes.
    """

    limit: int | None = None
    when_full: WhenFull | str = WhenFull.WAIT

    def __post_init__(self) -> None:
        try:
            policy = WhenFull(self.when_full)
        except ValueError:
            words = ", ".join(repr(str(word)) for word in WhenFull)
            raise UsageError(f"when_full: expected one of {words}, got {self.when_full!r}") from None
        object.__setattr__(self, "when_full", policy)
        if policy is WhenFull.WAIT:
            if self.limit is not None:
                raise UsageError(
                    f"limit: expected None with when_full='wait', got {self.limit!r}: senders wait by bytes; choose "
                    "'fail' or 'drop_oldest' for a limit in messages"
                )
        elif self.limit is None:
            object.__setattr__(self, "limit", DEFAULT_LIMIT)
        elif not _is_count(self.limit):
            raise UsageError(f"limit: expected at least 1 message, got {self.limit!r}")


def _is_count(limit: object) -> bool:
    return isinstance(limit, int) and limit >= 1
