"""Messages of a rank and its agent over the rank's pipe, translated for the leader.  Pure."""

from __future__ import annotations

from typing import Any

from asyncpar.errors import ProtocolError
from asyncpar.net.membership.lineage import Lineage, MemberReport
from asyncpar.net.membership.pipe_messages import decode_lineage, encode_lineage
from asyncpar.net.membership.world_messages import (
    HostEvent,
    MemberArrived,
    MemberDied,
    MemberFailed,
    MemberLeft,
    MemberProgressed,
    MemberReady,
    MemberReported,
    MemberWithdrawn,
    WorldAnnounced,
)
from asyncpar.net.security.identity import role_in


def heard_from_rank(member: str, host: str, message: dict[str, Any]) -> HostEvent:
    """Return what the leader has to know of ``message``.  Raises ``ProtocolError`` if it is none that ranks send."""
    try:
        match message["kind"]:
            case "join":
                lineage, address = _lineage(message), str(message["address"])
                settings = tuple(sorted((str(name), str(value)) for name, value in message.get("settings", {}).items()))
                return MemberArrived(member=member, host=host, lineage=lineage, settings=settings, address=address)
            case "progress":
                return MemberProgressed(member, _lineage(message))
            case "withdraw":
                return MemberWithdrawn(member)
            case "address":
                return MemberReady(member, int(message["generation"]), str(message["address"]))
            case "report":
                return MemberReported(member=member, report=_report(message))
            case "leave" if message.get("failed") is not None:
                return MemberFailed(member, int(message["failed"]), str(message["why"]))
            case "leave" if message.get("why"):  # not in a step: it is not done
                return MemberDied(member, f"ended with {message['why']}")
            case "leave":
                return MemberLeft(member)
            case kind:
                raise ProtocolError(f"{member}: expected a message that ranks send, got {kind!r}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"{member}: a message of the rank cannot be read: {error}") from error


def _lineage(message: dict[str, Any]) -> Lineage:
    lineage = decode_lineage(message["lineage"])
    if lineage is None:
        raise ProtocolError(f"lineage: expected one in {message['kind']!r}, got none")
    return lineage


def _report(message: dict[str, Any]) -> MemberReport:
    return MemberReport(
        generation=int(message["generation"]),
        lineage=_lineage(message),
        prepared=decode_lineage(message["prepared"]),
        suspects=tuple((int(rank), str(why)) for rank, why in message["suspects"]),
    )


def world_for_rank(announced: WorldAnnounced, member: str, *, job: str) -> dict[str, Any] | None:
    """Return what ``member`` hears of its new world; None if it has no place there."""
    names = [placed.name for placed in announced.members]
    if member not in names:
        return None
    change = announced.change
    return {
        "kind": "world",
        "generation": announced.generation,
        "rank": names.index(member),
        "hosts": [placed.host for placed in announced.members],
        "job": job,
        "lineage": encode_lineage(announced.lineage),
        "decision": announced.decision,
        "joined": list(change.joined),
        "left": list(change.left),
        "why": change.why,
        "is_by_loss": change.is_by_loss,
        "certified": _certified(names),
    }


def _certified(names: list[str]) -> list[int] | None:
    """Return the numbers in the certificates of members, None if they have none."""
    roles = [role_in(name) for name in names]
    numbers = [role.number for role in roles if role is not None and role.number is not None]
    return numbers if len(numbers) == len(names) else None
