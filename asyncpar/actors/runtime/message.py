"""Messages between actor systems: one payload per message, with a tagged union of structs in its envelope.

Structs travel as arrays that begin with their tag.  A newer version may add tags, and fields (with defaults) at the
end: an older one ignores unknown fields and refuses unknown tags.  Arguments and results stay encoded
(``msgspec.Raw``) until their types are known.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

CallId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Amount: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=1 << 62)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=255)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]

USAGE: Final = "usage"
"""The call was wrong: the arguments do not fit."""
ABSENT: Final = "absent"
"""There is no such actor, or it has no such endpoint."""
RAISED: Final = "raised"
"""The endpoint raised, or its result cannot be sent."""
STOPPED: Final = "stopped"
"""The actor ended before it answered, or had ended."""
CLOSED: Final = "closed"
"""The node was closed before it answered."""
FULL: Final = "full"
"""The mailbox had no room."""
DEADLINE: Final = "deadline"
"""The deadline of the call has passed."""


class MeshPlace(msgspec.Struct, frozen=True, array_like=True):
    """One actor of a mesh.

    ``mesh`` names the mesh: equal for all its actors, and unique in the world.  ``ranks`` are in row-major order of the
    ``axes`` of the given ``sizes``.
    """

    mesh: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]


class CallMessage(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Ask ``endpoint`` of ``actor``; answered by one ``Reply`` or ``FailureMessage`` with the same ``call``.

    ``seconds`` is the time that the caller will wait, if known.  With ``wants_stream`` the endpoint yields; its items
    come before the answer, which is then empty.
    """

    call: CallId
    actor: str
    endpoint: str
    arguments: list[msgspec.Raw]
    keywords: dict[str, msgspec.Raw]
    seconds: Seconds | None = None
    wants_stream: bool = False


class TellMessage(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Like ``CallMessage``, never answered."""

    actor: str
    endpoint: str
    arguments: list[msgspec.Raw]
    keywords: dict[str, msgspec.Raw]


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The endpoint returned ``value``."""

    call: CallId
    value: msgspec.Raw


class FailureMessage(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """There is no result.  ``reason`` is one of the constants above; an unknown one counts as ``RAISED``."""

    call: CallId
    reason: str
    text: str
    type_name: str = ""
    traceback: str = ""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Cancel a call or request; it gets no answer."""

    call: CallId


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """``actor`` took messages that cost ``amount`` from its mailbox (see ``window``)."""

    actor: str
    amount: Amount


class Spawn(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Start an actor of the class ``module:qualified name``; answered with the actor's name.

    ``name`` may be empty: then one is generated.  ``place`` is its place in a mesh, if it has one.
    """

    call: CallId
    actor_class: str
    name: str
    arguments: list[msgspec.Raw]
    keywords: dict[str, msgspec.Raw]
    place: MeshPlace | None = None


class Deadline(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The caller of ``call`` will wait for at most ``seconds`` more; infinity withdraws an earlier deadline."""

    call: CallId
    seconds: Seconds


class EndMessage(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Stop ``actor``, or kill it; answered when it has ended."""

    call: CallId
    actor: str
    is_kill: bool


class WatchMessage(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Report the end of ``actor`` by one ``Downed`` with the same ``watch``."""

    watch: CallId
    actor: str


class Unwatch(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Cancel a watch; no ``Downed`` follows."""

    watch: CallId


class Downed(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The watched actor has ended.  ``reason`` is a ``DownReason``; the other fields are set if it failed."""

    watch: CallId
    reason: str
    text: str = ""
    type_name: str = ""
    traceback: str = ""


class Yield(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """The endpoint that was called by ``call`` yields ``value``."""

    call: CallId
    value: msgspec.Raw


class YieldCredit(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """The caller read items that cost ``amount`` (see ``flow``)."""

    call: CallId
    amount: Amount


class FeedMessage(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The next item of a stream among the arguments of ``call``."""

    call: CallId
    stream: Number
    value: msgspec.Raw


class FeedEnd(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """That stream has ended; if it failed, the other fields describe the failure."""

    call: CallId
    stream: Number
    is_failure: bool = False
    text: str = ""
    type_name: str = ""
    traceback: str = ""


class FeedCredit(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """The endpoint wants items of that stream, or read some, that cost ``amount`` (see ``flow``)."""

    call: CallId
    stream: Number
    amount: Amount


class Abandon(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """A call of the actors of ``mesh`` on ``ranks`` failed on one of them: their collectives end, see ``text``.

    Their groups start again with number ``attempt``.
    """

    mesh: str
    attempt: Count
    ranks: list[int]
    failed: Count
    text: str


class AskLink(msgspec.Struct, frozen=True, array_like=True):
    """A call of an actor of ``rank`` that waits for its answer; ``site`` is where it was made, "" if unknown."""

    rank: Count
    call: CallId
    actor: str
    endpoint: str
    site: str = ""


class AskInquiry(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """Report, by ``AskAnswer`` with the same ``number``, what ``actor`` does with the ``call`` of rank ``caller``."""

    number: CallId
    caller: Count
    call: CallId
    actor: str


class AskAnswer(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """The actor currently works for the ``call`` of rank ``caller`` (None: for none that has a number).

    ``waits_for`` is an ask of its own for which it waits, if any; ``text`` is its place.
    """

    number: CallId
    text: str
    caller: Count | None = None
    call: CallId | None = None
    waits_for: AskLink | None = None


Message: TypeAlias = (
    CallMessage
    | TellMessage
    | Reply
    | FailureMessage
    | Cancel
    | Credit
    | Spawn
    | Deadline
    | EndMessage
    | WatchMessage
    | Unwatch
    | Downed
    | Yield
    | YieldCredit
    | FeedMessage
    | FeedEnd
    | FeedCredit
    | Abandon
    | AskInquiry
    | AskAnswer
)
