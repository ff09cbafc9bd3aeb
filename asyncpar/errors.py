"""Every exception that asyncpar raises on purpose, sorted by who must act.

``UsageError``: the caller.  ``ProtocolError``: the operator of the other end of a connection.  ``PeerError``: the
operator of the named rank.  ``StaleGeneration``: no one, a newer world exists.  ``RemoteError``: the author of the
remote code.
"""

from __future__ import annotations

from typing import Self

from asyncpar.harmless import harmless


class AsyncparError(Exception):
    """Base of every error raised by asyncpar.

    Its text may quote other processes, and is shown by any code that catches it; it contains no terminal control
    sequences.
    """

    def __str__(self) -> str:
        return harmless(super().__str__())


class UsageError(AsyncparError, ValueError):
    """An argument, option or setting is wrong; the message names it, what was expected and what was given."""


class NotFound(UsageError):  # noqa: N818
    """There is no such actor, or it has no such endpoint."""


class OperationMismatch(UsageError):  # noqa: N818
    """Two ranks issued different operations at the same place; the message names both ranks and both operations.

    ``call`` is this rank's call there, "" if it is not known.
    """

    def __init__(self, message: str, *, call: str = "") -> None:
        super().__init__(message)
        self.call = call


class NonFiniteValue(UsageError):  # noqa: N818
    """Values that must be finite contain NaN or infinity; the message says where.  Nothing was changed."""


class ArenaFull(AsyncparError, MemoryError):  # noqa: N818
    """There is not enough shared memory; the message states how much was needed and how much there is."""


class SnapshotTooLarge(AsyncparError, MemoryError):  # noqa: N818
    """A second copy of a state does not fit into memory; the message states how much it needs and how much there is."""


class ProtocolError(AsyncparError):
    """Bytes from a connection break the protocol; the connection is closed."""


class AuthenticationError(ProtocolError):
    """The other end could not prove that it holds the job secret."""


class CheckpointError(AsyncparError):
    """A checkpoint cannot be written, is not the requested one, or is damaged; the message names file and rank.

    It is raised on every rank, and nothing was restored.  ``rank`` (in world numbering) is the one that failed or is
    lost, or None.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class StateLost(AsyncparError):  # noqa: N818
    """Parts of a sharded state are lost with every rank that held them; all survivors raise it.

    ``step`` steps were committed: resume from a checkpoint of that step or an earlier one.  ``parts`` are the numbers
    of the lost parts.
    """

    def __init__(self, message: str, *, step: int, parts: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.parts = parts


class LaunchError(AsyncparError):
    """The launcher could not start or keep the job; the message says what to change."""


class StaleGeneration(AsyncparError):  # noqa: N818
    """Something belongs to an older generation of the world than the one in force."""


class PeerError(AsyncparError):
    """Another rank is the cause.

    ``rank`` is the culprit in world numbering (None when unknown), ``host`` where it ran, ``operation`` what this rank
    was doing, and ``cause`` the observed failure.
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


class NodeClosed(PeerLost):
    """The node of this rank is closed: the block that opened it has ended, or ``stop`` was called.

    Every operation of a closed node raises this, and so does every one that was under way when it closed.
    """

    @classmethod
    def of(cls, rank: int | None, operation: str | None = None) -> Self:
        """Return the error for ``operation`` on ``rank``."""
        text = "this node is closed; use it, its communicators and its actors inside the block that opens it"
        return cls(
            text if operation is None else f"{operation}: {text}", rank=rank, operation=operation, cause="closed"
        )


class LinkDamaged(PeerLost):
    """Bytes from ``rank`` did not arrive as sent, so the link is closed.  The operation they belonged to has no result.

    ``cause`` names both ranks with their hosts, the lane, and what was wrong.
    """


class WorldChanged(PeerError):  # noqa: N818
    """The world of this step has ended, and the step with it: leave its block; the next step has the new world.

    Raised from the ``PeerLost`` or other error that revealed the change.  ``generation`` is that of the old world.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        cause: str | None = None,
        generation: int,
    ) -> None:
        super().__init__(message, rank=rank, host=host, cause=cause)
        self.generation = generation


class DivergedState(PeerError):  # noqa: N818
    """Two ranks have committed the same number of steps, but their states differ: the bits of one of them are wrong.

    It is reported, never settled by majority.
    """


class PeerTimeout(PeerError, TimeoutError):  # noqa: N818
    """A rank did not do its part in time; the message says who is missing and where it was last seen."""


class PeerCancelled(PeerError):  # noqa: N818
    """Another rank cancelled the operation (or failed inside it); the group stays usable."""


class WorldRevoked(PeerError):  # noqa: N818
    """A group, or one that it was made from, was revoked: its operations have ended on all ranks; no more can begin.

    ``revoked_by`` is the rank that revoked it, ``rank`` the one that this rank blames (the same if it blames none),
    ``cause`` the reason, and ``generation`` that of the world.  ``Communicator.shrink`` and ``agree`` still work.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        operation: str | None = None,
        cause: str | None = None,
        revoked_by: int | None = None,
        generation: int = 0,
    ) -> None:
        super().__init__(message, rank=rank, host=host, operation=operation, cause=cause)
        self.revoked_by = revoked_by
        self.generation = generation


class ActorDown(PeerCancelled):
    """An actor ended before it answered, or had ended already; the message says how."""


class MailboxFull(PeerError):  # noqa: N818
    """The mailbox of an actor had no room for a message; the actor's ``mailbox`` policy decides what happens then."""


class RestartsExceeded(AsyncparError):  # noqa: N818
    """A supervisor gave up: its children failed more often than it may tolerate; the message says which and how."""


class RemoteError(AsyncparError):
    """An exception was raised inside a remote actor.

    ``type_name`` and ``message`` describe it, ``remote_traceback`` is its formatted traceback as text, never code.
    ``str`` is short; the traceback is a note of the exception, so Python prints it wherever it prints tracebacks.
    """

    def __init__(self, message: str, *, rank: int, type_name: str, remote_traceback: str) -> None:
        quoted = "\n".join(f"  | {line}" for line in remote_traceback.rstrip().splitlines())
        super().__init__(f"rank {rank}: {type_name}: {message}")
        if quoted:
            self.add_note(harmless(quoted))
        self.rank = rank
        self.type_name = type_name
        self.message = message
        self.remote_traceback = remote_traceback
