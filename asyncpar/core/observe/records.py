"""The layout of an event ring: a rank's recent events, in memory that another process can read at any time.  Pure.

Theory of operation.  One event, of an operation or of a span, is one record of 64 bytes.  It is written when the event
begins and completed in place when that ends, so that events under way are always present; a writer skips records of
events that are not over.  There are no locks: a record has the number of its lap in its first and in its last bytes,
and a reader drops one in which they differ.  Names, call sites and groups are entries of a table that only grows;
records refer to them by number.  When the table is full, new names are no longer distinguished, and that is counted.

The image begins with a page for the rank's identity and a page for a note (its state at the last update), followed by
records, then entries.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final, NamedTuple

import msgspec

from asyncpar.errors import ProtocolError

CAPACITY: Final = 4096
"""Records of a ring; a power of two."""

RECORD: Final = struct.Struct("<IHBBddIIQQQII")
"""Lap, peer, kind, state, time of the end, time of the begin, fingerprint, name, group, sequence, bytes, site, lap."""

BEGINNING: Final = struct.Struct("<IIddQQQQII")
"""The same bytes in fewer parts: lap, ``head_of``, times, ``word_of``, group, sequence, bytes, site, lap."""

ENDING: Final = struct.Struct("<Bd")
"""State and time of the end, at ``STATE_OFFSET`` of a record."""

RECORD_BYTES: Final = RECORD.size
STATE_OFFSET: Final = 7
NO_PEER: Final = 0xFFFF
UNBOUND: Final = (1 << 64) - 1
"""The sequence of a receive that does not know its message yet."""

PEER: Final = struct.Struct("<H")
PEER_OFFSET: Final = 4
MESSAGE: Final = struct.Struct("<QQQ")
"""Group, sequence and bytes, at ``MESSAGE_OFFSET`` of a record."""

MESSAGE_OFFSET: Final = 32
SIZE: Final = struct.Struct("<Q")
"""Bytes, at ``SIZE_OFFSET`` of a record."""

SIZE_OFFSET: Final = 48
KIND_OFFSET: Final = 6
CREATED: Final = struct.Struct("<d")
"""The time of the begin, at ``CREATED_OFFSET`` of a record."""

CREATED_OFFSET: Final = 16

HEADER: Final = struct.Struct("<8sIII")
"""Magic, capacity in records, where entries begin, and where the image ends."""

COUNTS_OFFSET: Final = 32
COUNTS: Final = struct.Struct("<III")
"""Bytes of entries, names for which there was no room, and records that overwrote events that were not over."""

IDENTITY_OFFSET: Final = 64
NOTE_OFFSET: Final = 4096
RECORDS_OFFSET: Final = 8192
NOTE_BYTES: Final = RECORDS_OFFSET - NOTE_OFFSET - 8
ENTRIES_BYTES: Final = 1 << 20

_MAGIC: Final = b"apring01"
_ENTRY: Final = struct.Struct("<BxH")
_LENGTH: Final = struct.Struct("<I")
_NOTE: Final = struct.Struct("<II")
ENTRY_BYTES_MOST: Final = 0xFFFF


class EventKind(IntEnum):
    """The kind of an event."""

    COLLECTIVE = 1
    SEND = 2
    RECEIVE = 3
    ASK = 4
    """An actor call as seen by its caller, until the reply."""
    HANDLE = 5
    """An endpoint running for a caller."""
    BUCKET = 6
    """A bucket of gradients, from its first to its last byte."""
    PIPELINE = 7
    CHECKPOINT = 8
    WORLD = 9
    """A change of the world, or of this rank's role in it."""
    SPAN = 10
    """A span of the user: ``ap.span``."""
    BLOCKED = 11
    """Code that keeps the event loop from going on."""
    STEP = 12
    """A training step.  Its bytes are the rank's own microseconds in it and since the previous one."""


class EventState(IntEnum):
    """The progress of an event.  From ``COMPLETED`` on it is over."""

    CALLED = 1
    """It has its place in the order of its group, but nobody awaits it yet."""
    STARTED = 2
    COMPLETED = 3
    FAILED = 4
    CANCELLED = 5


_STEPS: Final = re.compile(bytes([EventKind.STEP]))
_PAUSES: Final = re.compile(b"[%c%c]" % (EventKind.SPAN, EventKind.BLOCKED))
_OVER: Final = int(EventState.COMPLETED)  # accessing a member of an enumeration takes longer than a comparison


class EntryKind(IntEnum):
    """The kind of name in an entry of the table."""

    NAME = 1
    """``name``, ``text@algorithm`` of an operation, ``name@codec`` of a bucket, or ``name\\nfields`` of a span."""
    SITE = 2
    """``file:line function``."""
    GROUP = 3
    """A ``GroupIdentity`` as JSON."""


class RankIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a ring.  ``clock`` and ``wall`` are one moment, on the records' clock and on the wall clock.

    Records of ranks with the same ``clock_domain`` have times by the same clock.
    """

    rank: int
    size: int
    host: str = ""
    host_id: str = ""
    job: str = ""
    generation: int = 0
    pid: int = 0
    clock: float = 0.0
    wall: float = 0.0
    clock_domain: str = ""


class GroupIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A group of ranks of the world under its ``number``.  ``parent`` is the group whose messages it numbers."""

    number: int
    name: str
    ranks: tuple[int, ...]
    parent: int | None = None


class RawRecord(NamedTuple):
    """One record as it is stored; ``ticket`` is the number of events that began before it."""

    ticket: int
    peer: int
    kind: int
    state: int
    ended: float
    created: float
    fingerprint: int
    name: int
    group: int
    sequence: int
    nbytes: int
    site: int


class RawImage(NamedTuple):
    """The parts of an image: records in the order in which they began, entries by number (from 1)."""

    identity: RankIdentity
    records: list[RawRecord]
    entries: dict[int, tuple[int, bytes]]
    note: bytes
    torn: int
    capacity: int
    begun: int
    """Events that have begun in all."""
    unnamed: int
    """Names for which there was no room."""
    evicted: int
    """Events that were overwritten although they were not over."""


def head_of(peer: int, kind: int, state: int) -> int:
    """Pack peer, kind and state of a record into one number."""
    return peer | kind << 16 | state << 24


def word_of(name: int, fingerprint: int = 0) -> int:
    """Pack fingerprint and name of a record into one number."""
    return fingerprint | name << 32


def bucket_name(index: int, codec: str) -> str:
    """Return the name of the events of bucket ``index``, which ``codec`` encodes (``"none"``: not encoded)."""
    return f"bucket {index}@{codec}"


CALLS: Final = 0xCA11 << 48
"""Combined with a rank: the group under which its actor calls are numbered, on both ends."""


def image_bytes(capacity: int = CAPACITY) -> int:
    """Return the size in bytes of an image with ``capacity`` records."""
    return RECORDS_OFFSET + capacity * RECORD_BYTES + ENTRIES_BYTES


def write_header(image: Any, capacity: int, identity: RankIdentity) -> None:
    """Write a rank's header to ``image``, a writable buffer; the rest of its content stays."""
    encoded = msgspec.json.encode(identity)
    if len(encoded) > NOTE_OFFSET - IDENTITY_OFFSET - 4:
        raise ProtocolError(f"the identity of a rank is too long: {len(encoded)} bytes")
    entries = RECORDS_OFFSET + capacity * RECORD_BYTES
    _LENGTH.pack_into(image, IDENTITY_OFFSET, len(encoded))
    image[IDENTITY_OFFSET + 4 : IDENTITY_OFFSET + 4 + len(encoded)] = encoded
    HEADER.pack_into(image, 0, _MAGIC, capacity, entries, entries + ENTRIES_BYTES)


def write_note(image: Any, note: bytes) -> None:
    """Replace the note in ``image``; a ``note`` that is too long is cut."""
    note = note[:NOTE_BYTES]
    version, _ = _NOTE.unpack_from(image, NOTE_OFFSET)
    begun = (version | 1) & 0xFFFF_FFFF
    _NOTE.pack_into(image, NOTE_OFFSET, begun, 0)
    image[NOTE_OFFSET + 8 : NOTE_OFFSET + 8 + len(note)] = note
    _NOTE.pack_into(image, NOTE_OFFSET, (begun + 1) & 0xFFFF_FFFF, len(note))


def write_entry(image: Any, start: int, used: int, kind: EntryKind, content: bytes) -> int:
    """Append an entry; return the bytes used after that, or 0 if there is no room."""
    size = _ENTRY.size + len(content)
    place = start + used
    if used + size > ENTRIES_BYTES or len(content) > ENTRY_BYTES_MOST:
        return 0
    image[place + _ENTRY.size : place + size] = content
    _ENTRY.pack_into(image, place, kind, len(content))
    _LENGTH.pack_into(image, COUNTS_OFFSET, used + size)
    return used + size


def is_image(image: Any) -> bool:
    """Return whether ``image``, a buffer, begins like an image; memory that was never written to does not."""
    return bytes(image[: len(_MAGIC)]) == _MAGIC


def parse_image(image: bytes, *, latest: int | None = None) -> RawImage:
    """Parse ``image`` into its parts; truncated or torn ones are missing.  Raises ``ProtocolError`` if it is none.

    With ``latest``, parse only records of unfinished events, of that many last events, and of that many last steps and
    pauses, however long ago: this takes a tenth of the time.
    """
    if len(image) < NOTE_OFFSET or not is_image(image):
        raise ProtocolError("this is no image of an event ring (its first bytes are others)")
    _, capacity, entries_start, end = HEADER.unpack_from(image, 0)
    if (
        not 0 < capacity <= 1 << 20
        or entries_start != RECORDS_OFFSET + capacity * RECORD_BYTES
        or end != entries_start + ENTRIES_BYTES
    ):
        raise ProtocolError("the header of the image of an event ring is damaged")
    used, unnamed, evicted = COUNTS.unpack_from(image, COUNTS_OFFSET)
    records, torn = _parse_records(image[RECORDS_OFFSET:entries_start], capacity, latest)
    return RawImage(
        identity=_parse_identity(image),
        records=records,
        entries=_parse_entries(image[entries_start : entries_start + min(used, ENTRIES_BYTES)]),
        note=_parse_note(image),
        torn=torn,
        capacity=capacity,
        begun=records[-1].ticket + 1 if records else 0,
        unnamed=unnamed,
        evicted=evicted,
    )


def _parse_identity(image: bytes) -> RankIdentity:
    (length,) = _LENGTH.unpack_from(image, IDENTITY_OFFSET)
    start = IDENTITY_OFFSET + _LENGTH.size
    try:
        return msgspec.json.decode(image[start : min(start + length, NOTE_OFFSET)], type=RankIdentity)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the identity in the image of an event ring is damaged: {error}") from error


def _parse_note(image: bytes) -> bytes:
    if len(image) < RECORDS_OFFSET:
        return b""
    version, length = _NOTE.unpack_from(image, NOTE_OFFSET)
    return b"" if version & 1 or length > NOTE_BYTES else image[NOTE_OFFSET + 8 : NOTE_OFFSET + 8 + length]


def _parse_records(part: bytes, capacity: int, latest: int | None) -> tuple[list[RawRecord], int]:
    """Return the intact records, in the order in which they began, and the number of torn ones.

    The fields that decide which records are wanted are read by columns; rows are made of the wanted ones alone.
    """
    whole = memoryview(part)[: len(part) - len(part) % RECORD_BYTES]
    words = whole.cast("I")
    first, last = words[:: RECORD_BYTES // 4].tolist(), words[RECORD_BYTES // 4 - 1 :: RECORD_BYTES // 4].tolist()
    slots: Iterable[int] = range(len(first))
    kept: set[int] = set()
    if latest is not None and any(first) and first == last:  # if some are torn, the newest is harder to find
        newest = max(first)
        slot = len(first) - 1 - first[::-1].index(newest)
        states = bytes(whole[STATE_OFFSET::RECORD_BYTES])
        slots = {(slot - back) % capacity for back in range(min(latest, capacity))}
        slots |= {slot for slot, state in enumerate(states) if state < _OVER}
        kept = _find_kept(bytes(whole[KIND_OFFSET::RECORD_BYTES]), slot + 1, latest)
        slots |= kept
    tickets = [
        ((first[slot] - 1) * capacity + slot, slot)
        for slot in slots
        if slot < len(first) and first[slot] and first[slot] == last[slot]
    ]
    if latest is not None:
        since = max(tickets, default=(0, 0))[0] - latest + 1
        tickets = [
            found
            for found in tickets
            if found[0] >= since or found[1] in kept or whole[found[1] * RECORD_BYTES + STATE_OFFSET] < _OVER
        ]
    tickets.sort()
    unpack = RECORD.unpack_from
    records = [RawRecord(ticket, *unpack(part, slot * RECORD_BYTES)[1:-1]) for ticket, slot in tickets]
    return records, sum(map(operator.ne, first, last))


def _find_kept(kinds: bytes, start: int, latest: int) -> set[int]:
    """Return the places of the last steps and pauses, ``latest`` of each; ``start`` is the place of the oldest event.

    ``kinds`` has the kinds of all places.
    """
    in_order = kinds[start:] + kinds[:start]
    kept: set[int] = set()
    for pattern in (_STEPS, _PAUSES):
        found = [match.start() for match in pattern.finditer(in_order)]
        kept.update((place + start) % len(kinds) for place in found[-latest:])
    return kept


def _parse_entries(part: bytes) -> dict[int, tuple[int, bytes]]:
    entries: dict[int, tuple[int, bytes]] = {}
    place = 0
    while place + _ENTRY.size <= len(part):
        kind, length = _ENTRY.unpack_from(part, place)
        content = part[place + _ENTRY.size : place + _ENTRY.size + length]
        if kind == 0 or len(content) < length:
            break
        entries[len(entries) + 1] = (kind, content)
        place += _ENTRY.size + length
    return entries
