"""The encoding of messages between agents: msgpack, with the name of the type.  Pure."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from asyncpar.errors import AsyncparError, ProtocolError
from asyncpar.hosts import consensus_messages as consensus
from asyncpar.hosts import messages as worlds
from asyncpar.hosts.consensus_messages import Entry
from asyncpar.hosts.group import GroupState

Value = TypeVar("Value")

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        consensus.PreVote,
        consensus.PreVoteGranted,
        consensus.Prepare,
        consensus.Promise,
        consensus.AcceptEntry,
        consensus.EntryAccepted,
        consensus.Refused,
        consensus.Heartbeat,
        consensus.HeartbeatAck,
        consensus.Behind,
        consensus.Learn,
        worlds.JobOpened,
        worlds.JobClosed,
        worlds.MemberHealing,
        worlds.MemberArrived,
        worlds.MemberProgressed,
        worlds.MemberWithdrawn,
        worlds.MemberReady,
        worlds.MemberReported,
        worlds.MemberStopped,
        worlds.MemberResumed,
        worlds.MemberDraining,
        worlds.MemberLeft,
        worlds.MemberFailed,
        worlds.MemberDied,
        worlds.MemberNotice,
        worlds.HostDraining,
        worlds.HostLeaving,
        worlds.CommandsWanted,
        worlds.WorldAnnounced,
        worlds.WorldStarted,
        worlds.WorldEnded,
        worlds.ChangePending,
        worlds.MembersWanted,
        worlds.MemberDismissed,
        worlds.MemberWaits,
        worlds.WorldNotice,
        worlds.JobWaits,
        worlds.JobStopped,
        worlds.HostLost,
        worlds.ViewWanted,
        worlds.ViewGiven,
    )
}


def encode_message(message: object) -> bytes:
    """Encode a message from one agent to another."""
    return msgspec.msgpack.encode((type(message).__name__, message))


def decode_message(content: bytes) -> Any:
    """Decode the message in ``content``.  Raises ``ProtocolError`` if there is none."""
    try:
        name, raw = msgspec.msgpack.decode(content, type=tuple[str, msgspec.Raw])
        return msgspec.msgpack.decode(raw, type=_KINDS[name])
    except (msgspec.DecodeError, KeyError, AsyncparError) as error:
        raise ProtocolError(f"a message of another agent cannot be read: {error}") from error


def encode_entry(entry: Entry) -> bytes:
    """Encode an entry."""
    return msgspec.msgpack.encode(entry)


def decode_entry(content: bytes) -> Entry:
    """Decode the entry in ``content``.  Raises ``ProtocolError`` if there is none."""
    return _decode(content, Entry)


def encode_group(state: GroupState) -> bytes:
    """Encode the state of a group as the content of an entry."""
    return msgspec.msgpack.encode(state)


def decode_group(content: bytes) -> GroupState:
    """Decode the state in ``content``.  Raises ``ProtocolError`` if there is none."""
    return _decode(content, GroupState)


def _decode(content: bytes, kind: type[Value]) -> Value:
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.DecodeError, AsyncparError) as error:
        raise ProtocolError(f"what was decided cannot be read: {error}; all agents must be of one version") from error
