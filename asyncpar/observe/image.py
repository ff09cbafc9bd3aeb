"""Image of the event ring of one rank: operations, spans and groups, from a live recorder or from bytes.  Pure.

The bytes may be those of a running rank, or of one that was killed in the middle of a record: torn records are dropped
and counted, and the rest is the rank's latest work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Final, NamedTuple

import msgspec

from asyncpar.core.observe.records import (
    CAPACITY,
    NO_PEER,
    EntryKind,
    EventKind,
    EventState,
    GroupIdentity,
    RankIdentity,
    RawImage,
    parse_image,
)

_KEYED: Final = 1 << 63
_ARRAY = re.compile(r"\b([a-z]+[0-9_a-z]*)\[([\d,?]*)\]")
_ROOT = re.compile(r"\broot=(\d+)")
_KINDS: Final = {int(kind): kind for kind in EventKind}
_STATES: Final = {int(state): state for state in EventState}
_MESSAGES: Final = frozenset((EventKind.SEND, EventKind.RECEIVE))
_OPERATIONS: Final = _MESSAGES | {EventKind.COLLECTIVE}


class CallSite(NamedTuple):
    """A place in a program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a rank; ``ticket`` numbers them in the order in which they began.

    ``created`` and ``ended`` are seconds by the rank's clock, ``ended`` None while it is pending.  ``text`` is an
    operation as it was called (``all_reduce(float32[8], sum)``) or the fields of a span; ``algorithm`` is that of an
    operation, or the codec of a bucket.  ``group`` and ``sequence`` are the same on all ranks of an operation, and on
    both ends of a message or a call; ``peer`` is a rank of the world.  ``own`` is the rank's own part, in seconds, of a
    step and the time since the previous one.
    """

    ticket: int
    kind: EventKind
    state: EventState
    created: float
    ended: float | None
    name: str
    text: str = ""
    algorithm: str = ""
    fingerprint: int = 0
    group: int = 0
    sequence: int = 0
    nbytes: int = 0
    own: float = 0.0
    peer: int | None = None
    site: CallSite | None = None

    @property
    def is_over(self) -> bool:
        return self.state >= EventState.COMPLETED

    @property
    def is_operation(self) -> bool:
        """Whether it is a collective operation or a message between two ranks."""
        return self.kind in _OPERATIONS

    @property
    def is_keyed(self) -> bool:
        """Whether the operation is matched by a name, and not by its place in the order of its group."""
        return self.kind == EventKind.COLLECTIVE and bool(self.sequence & _KEYED)

    @property
    def label(self) -> str:
        """``all_reduce #7``, ``step 7 of gradients``; other events and keyed operations have only their name."""
        if self.kind in _MESSAGES and self.peer is not None:
            return f"{self.name} {'to' if self.kind == EventKind.SEND else 'from'} rank {self.peer}"
        if self.kind == EventKind.STEP:
            return f"step {self.sequence} of {self.name}"
        return f"{self.name} #{self.sequence}" if self.is_operation and not self.is_keyed else self.name

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Dtypes and shapes in its text; a length that ranks do not share is -1."""
        return [
            (dtype, tuple(-1 if part == "?" else int(part) for part in shape.split(",") if part))
            for dtype, shape in _ARRAY.findall(self.text)
        ]

    @property
    def root(self) -> int | None:
        """The root of the operation, as an index in its group."""
        found = _ROOT.search(self.text)
        return None if found is None else int(found[1])


@dataclass(frozen=True)
class RankImage:
    """The content of a ring.  ``read_image`` decodes it; ``Recorder.snapshot`` returns the bytes of a live rank.

    ``torn`` records could not be read, ``overwritten`` ones are gone; ``note`` is the rank's last summary of itself;
    ``evicted`` counts events that were overwritten while pending.  ``capacity`` is the number of events in the ring;
    ``lost`` ones were overwritten between two inspections: see ``merge_images``.
    """

    identity: RankIdentity
    events: tuple[Event, ...]
    groups: dict[int, GroupIdentity] = field(default_factory=dict)
    note: bytes = b""
    torn: int = 0
    overwritten: int = 0
    unnamed: int = 0
    evicted: int = 0
    capacity: int = CAPACITY
    lost: int = 0

    @property
    def rank(self) -> int:
        return self.identity.rank

    @cached_property
    def operations(self) -> tuple[Event, ...]:
        """Collective operations and messages, in the order of their calls."""
        return tuple(event for event in self.events if event.is_operation)

    @cached_property
    def pending(self) -> tuple[Event, ...]:
        """Events that are not over, oldest first."""
        return tuple(event for event in self.events if not event.is_over)

    @cached_property
    def last_at(self) -> float:
        """The latest time in it."""
        return max((event.ended or event.created for event in self.events), default=self.identity.clock)

    def wall(self, clock: float) -> float:
        """Return the time of day, by the rank's own clock, of a time in an event."""
        return self.identity.wall + (clock - self.identity.clock)

    def last_of(self, group: int) -> Event | None:
        """Return the last operation that was called in a group."""
        return next((event for event in reversed(self.operations) if event.group == group), None)

    def find(self, group: int, sequence: int) -> Event | None:
        """Return the operation with this number, None if it is not there."""
        return self._by_number.get((group, sequence))

    @cached_property
    def _by_number(self) -> dict[tuple[int, int], Event]:
        return {(event.group, event.sequence): event for event in self.operations}


def read_image(image: bytes, *, latest: int | None = None) -> RankImage:
    """Decode ``image``, the bytes of a ring.  Raises ``ProtocolError`` if it is not one.

    With ``latest``, only pending events, the last ``latest`` ones, and as many steps and pauses.  A rank that inspects
    its own ring needs no more.
    """
    raw = parse_image(image, latest=latest)
    return RankImage(
        identity=raw.identity,
        events=tuple(_events_of(raw)),
        groups=_groups_of(raw),
        note=raw.note,
        torn=raw.torn,
        overwritten=max(0, raw.begun - len(raw.records) - raw.torn),
        unnamed=raw.unnamed,
        evicted=raw.evicted,
        capacity=raw.capacity,
    )


def read_operation_names(image: bytes) -> dict[int, str]:
    """Return the names of operations by their numbers in the records of a ring."""
    raw = parse_image(image, latest=1)
    return {
        number: _split_name(_text(raw, number, EntryKind.NAME))[0]
        for number, (kind, _) in raw.entries.items()
        if kind == EntryKind.NAME
    }


def _events_of(raw: RawImage) -> Iterable[Event]:
    """Yield the events of all records with known kinds and states; each name and place is read once."""
    names: dict[int, tuple[str, str, str, int]] = {}
    sites: dict[int, CallSite | None] = {}
    for record in raw.records:
        kind, state = _KINDS.get(record.kind), _STATES.get(record.state)
        if kind is None or state is None:
            continue
        if record.name not in names:
            split = _split_name(_text(raw, record.name, EntryKind.NAME))
            names[record.name] = (*split, _nbytes(split[1]))
        if record.site not in sites:
            sites[record.site] = _parse_site(_text(raw, record.site, EntryKind.SITE))
        name, text, algorithm, nbytes = names[record.name]
        created, is_step = record.created, kind is EventKind.STEP
        yield Event(
            ticket=record.ticket,
            kind=kind,
            state=state,
            created=created,
            ended=max(record.ended, created) if record.state >= EventState.COMPLETED else None,
            name=name,
            text=text,
            algorithm=algorithm,
            fingerprint=record.fingerprint,
            group=record.group,
            sequence=record.sequence,
            nbytes=0 if is_step else record.nbytes or nbytes,
            own=record.nbytes * 1e-6 if is_step else 0.0,
            peer=None if record.peer == NO_PEER else record.peer,
            site=sites[record.site],
        )


def _nbytes(text: str) -> int:
    """Return the bytes of the arrays that a text names, as far as it has their lengths."""
    return sum(
        _itemsize(dtype) * prod(int(part) for part in shape.split(",") if part)
        for dtype, shape in _ARRAY.findall(text)
        if "?" not in shape
    )


def _itemsize(dtype: str) -> int:
    bits = re.search(r"(\d+)$", dtype)
    return 1 if bits is None else max(1, int(bits[1]) // 8)


def _text(raw: RawImage, number: int, kind: EntryKind) -> str:
    found, content = raw.entries.get(number, (0, b""))
    return content.decode("utf-8", "replace") if found == kind else ""


def _split_name(entry: str) -> tuple[str, str, str]:
    """Return name, text and algorithm of an entry."""
    name, separator, fields = entry.partition("\n")
    if separator:
        return name, fields, ""
    text, _, algorithm = entry.rpartition("@")
    if not text:
        return entry or "?", "", ""
    return text.partition("(")[0], text, algorithm


def _parse_site(entry: str) -> CallSite | None:
    place, _, function = entry.partition(" ")
    file, _, line = place.rpartition(":")
    return CallSite(file, int(line), function) if file and line.isdecimal() else None


def _groups_of(raw: RawImage) -> dict[int, GroupIdentity]:
    groups = {}
    for kind, content in raw.entries.values():
        if kind == EntryKind.GROUP:
            try:
                group = msgspec.json.decode(content, type=GroupIdentity)
            except msgspec.MsgspecError:
                continue  # torn: the events of the group have its number
            groups[group.number] = group
    return groups
