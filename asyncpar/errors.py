"""Every exception that asyncpar raises on purpose, sorted by who must act.

``UsageError``: the caller.  ``ProtocolError``: whoever runs the other end of a connection.  ``PeerError``: the operator
of the named rank.  ``StaleGeneration``: nobody, a newer world exists.  ``RemoteError``: the author of the remote code.
"""

from __future__ import annotations


class AsyncparError(Exception):
    """Base of every error raised by asyncpar."""


class UsageError(AsyncparError, ValueError):
    """An argument, option or setting is wrong; the message names it, what was expected and what was given."""


class NotFound(UsageError):  # noqa: N818
    """There is no such actor, or it has no such endpoint."""


class OperationMismatch(UsageError):  # noqa: N818
    """Two ranks issued different operations at the same place; the message names both ranks and both operations."""


class NonFiniteValue(UsageError):  # noqa: N818
    """Numbers that must be finite contain NaN or infinity; the message says where.  Nothing was changed."""


class ArenaFull(AsyncparError, MemoryError):  # noqa: N818
    """There is no shared memory for what was asked for; the message says how much was needed and how much there is."""


class ProtocolError(AsyncparError):
    """Bytes from a connection break the protocol; the connection is closed."""


class AuthenticationError(ProtocolError):
    """The other end could not prove that it holds the job secret."""


class CheckpointError(AsyncparError):
    """A checkpoint cannot be written, or is not what was asked for, or is damaged; the message names file and rank.

    It is raised on every rank, and nothing was restored.  ``rank`` (in world numbering) is the one that failed or is
    lost, None where none is.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class LaunchError(AsyncparError):
    """The launcher could not start or keep the job; the message says what to change."""


class StaleGeneration(AsyncparError):  # noqa: N818
    """Something belongs to an older generation of the world than the one in force."""


class PeerError(AsyncparError):
    """Another rank is the cause.

    ``rank`` is the culprit in world numbering (None when unknown), ``host`` where it ran, ``operation`` what this rank
    was doing, ``cause`` what was seen of the failure.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        operation: str | None = None,
        cause: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.operation = operation
        self.cause = cause


class PeerLost(PeerError):  # noqa: N818
    """A rank is gone: its connection closed or it stopped answering."""


class LinkDamaged(PeerLost):
    """Bytes from ``rank`` did not arrive as they were sent, so the link is closed.  What they were for has no result.

    ``cause`` names both ranks with their hosts, the lane, and what was wrong.
    """


class PeerTimeout(PeerError, TimeoutError):  # noqa: N818
    """A rank did not do its part in time; the message says who is missing and where it was last heard of."""


class PeerCancelled(PeerError):  # noqa: N818
    """Another rank cancelled the operation (or failed inside it); the group stays usable."""


class ActorDown(PeerCancelled):
    """An actor ended before it answered, or had ended already; the message says how."""


class MailboxFull(PeerError):  # noqa: N818
    """The mailbox of an actor had no room for a message; what happens then is the actor's ``mailbox`` policy."""


class RestartsExceeded(AsyncparError):  # noqa: N818
    """A supervisor gave up: its children failed more often than it was told to bear; the message says which and how."""


class RemoteError(AsyncparError):
    """An exception was raised inside a remote actor.

    ``type_name`` and ``message`` describe it, ``remote_traceback`` is its formatted traceback as text, never code.
    """

    def __init__(self, message: str, *, rank: int, type_name: str, remote_traceback: str) -> None:
        quoted = "\n".join(f"  | {line}" for line in remote_traceback.rstrip().splitlines())
        super().__init__(f"rank {rank}: {type_name}: {message}" + (f"\n{quoted}" if quoted else ""))
        self.rank = rank
        self.type_name = type_name
        self.message = message
        self.remote_traceback = remote_traceback
