"""Recording of a rank's events in its event ring (see ``records``), in a fraction of a microsecond per event.

A launched rank gets the memory of its ring from its agent (``ASYNCPAR_RING_FD``, a file without a name), which can read
it at any time, even after the rank was killed.  Other ranks have anonymous memory.  The ring belongs to a node; in a
process with several nodes, the first one has the agent's memory, and one that starts after its end continues in it.

Operations of collectives write their records themselves (``Engine``, ``Operation``, ``QuickCall``): a function call
would cost as much as the record.  ``Recorder.begin`` and ``Recorder.end`` do the same for everything else.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import msgspec

from asyncpar.core.observe.records import (
    BEGINNING,
    CALLS,
    CAPACITY,
    COUNTS_OFFSET,
    CREATED,
    CREATED_OFFSET,
    ENDING,
    MESSAGE,
    MESSAGE_OFFSET,
    NO_PEER,
    PEER,
    PEER_OFFSET,
    RECORD,
    RECORD_BYTES,
    RECORDS_OFFSET,
    SIZE,
    SIZE_OFFSET,
    STATE_OFFSET,
    EntryKind,
    EventKind,
    EventState,
    GroupIdentity,
    RankIdentity,
    image_bytes,
    is_image,
    parse_image,
    word_of,
    write_entry,
    write_header,
    write_note,
)
from asyncpar.core.private_files import open_unnamed
from asyncpar.errors import ProtocolError, UsageError

RING_FD: Final = "ASYNCPAR_RING_FD"
"""The variable with the number of the inherited descriptor of the ring's memory."""

_PACKAGE: Final = str(Path(__file__).parents[2]) + os.sep
_LIBRARY: Final = str(Path(os.__file__).parent / "asyncio") + os.sep
NO_TICKET: Final = -3
"""The ticket of an event that is not recorded."""

_TRIES: Final = 64
_CALLS_APART: Final = 8192
"""Names of actors are distinguished until this many names are known."""

_NAMES_MOST: Final = 65_536
_LONGEST_NAME: Final = 1000
_COUNT: Final = struct.Struct("<I")

Clock = Callable[[], float]


class Recorder:
    """The events of one node.  ``begin`` and ``end`` may be called in any thread.

    To write a record directly: ``ticket = next(tickets)``; its place is ``ticket & mask``, and if ``owners`` has an
    entry there, ``elsewhere(ticket)`` finds another ticket; ``owners[place] = ticket + 1`` until the event ends.
    """

    def __init__(self, memory: mmap.mmap, identity: RankIdentity, *, capacity: int = CAPACITY, clock: Clock) -> None:
        self._memory = memory
        self._capacity = capacity
        self._entries_start = RECORDS_OFFSET + capacity * RECORD_BYTES
        self._lock = threading.Lock()
        self._codes: list[CodeType] = []
        """Codes whose identities are in ``sites``: kept alive, so that no other code gets the same identity."""
        self.clock = clock
        self.mask = capacity - 1
        self.first: int
        """The ticket of this node's first event: the ring may hold events of earlier nodes."""
        self.lap_bits = self.mask.bit_length()
        self.write = partial(BEGINNING.pack_into, memory)
        self.write_end = partial(ENDING.pack_into, memory)
        self.write_state = memory.__setitem__
        self.owners = [0] * capacity
        """By place: 1 + the ticket of the event there while that is not over, else 0; -1 once the node has ended."""
        self.words: dict[Hashable, int] = {}
        """The words by which records refer to names: see ``word_of``."""
        self.sites: dict[int, int] = {}
        """Numbers of call sites by ``id(code) + f_lasti``, which is an address within the code object."""
        self._places: dict[int, str] = {}
        self._unnamed = self._evicted = 0
        self.passed_over = 0
        """Tickets without an event, because their places were taken: see ``elsewhere``."""
        self.is_closed = False
        """Whether the node has ended; nothing may be written after that."""
        self.step: weakref.ref[object] | None = None
        """A reference to the meter that records the training step under way."""
        self.stepped_at: float | None = None
        """The time of the end of the last training step."""
        self._used, self._entries, self.first = self._take_over()
        self.tickets = count(self.first)
        write_header(memory, capacity, identity)

    def _take_over(self) -> tuple[int, int, int]:
        """Return the bytes and number of entries, and the number of events begun, of the previous node."""
        if not is_image(self._memory):  # fresh memory; copying it would allocate all its pages
            return 0, 0, 0
        try:
            before = parse_image(bytes(self._memory), latest=1)
        except ProtocolError:
            return 0, 0, 0
        for record in before.records:
            if record.state < EventState.COMPLETED:  # it ended with that node
                place = RECORDS_OFFSET + (record.ticket & self.mask) * RECORD_BYTES + STATE_OFFSET
                self.write_end(place, EventState.CANCELLED, self.clock())
        return sum(4 + len(content) for _, content in before.entries.values()), len(before.entries), before.begun

    # -- events ------------------------------------------------------------------------------------------------------

    def begin(
        self,
        kind: EventKind,
        word: int,
        *,
        state: EventState = EventState.STARTED,
        peer: int = NO_PEER,
        group: int = 0,
        sequence: int = 0,
        nbytes: int = 0,
        site: int = 0,
    ) -> int:
        """Record the beginning of an event, and return its ticket, for ``end``.  ``word`` is a result of ``name``."""
        ticket = next(self.tickets)
        if self.owners[ticket & self.mask]:
            ticket = self.elsewhere(ticket)
            if ticket == NO_TICKET:
                return ticket
        place, lap = ticket & self.mask, (ticket >> self.lap_bits) + 1
        self.owners[place] = ticket + 1
        self.write(
            RECORDS_OFFSET + place * RECORD_BYTES,
            lap,
            peer | kind << 16 | state << 24,  # ``head_of``, here: it runs for every event
            0.0,
            self.clock(),
            word,
            group,
            sequence,
            nbytes,
            site,
            lap,
        )
        return ticket

    def end(self, ticket: int, state: EventState = EventState.COMPLETED) -> None:
        """Record the end of the event of ``ticket``; do nothing if it was overwritten."""
        place = ticket & self.mask
        if self.owners[place] == ticket + 1:
            self.owners[place] = 0
            self.write_end(RECORDS_OFFSET + STATE_OFFSET + place * RECORD_BYTES, state, self.clock())

    def meet(self, ticket: int, *, peer: int, group: int, sequence: int, nbytes: int) -> None:
        """Record the message received by the receive of ``ticket``."""
        place = ticket & self.mask
        if self.owners[place] == ticket + 1:
            record = RECORDS_OFFSET + place * RECORD_BYTES
            MESSAGE.pack_into(self._memory, record + MESSAGE_OFFSET, group, sequence, nbytes)
            PEER.pack_into(self._memory, record + PEER_OFFSET, peer)

    def measure(self, ticket: int, nbytes: int) -> None:
        """Record the size of the event of ``ticket``, once it is known."""
        place = ticket & self.mask
        if self.owners[place] == ticket + 1:
            SIZE.pack_into(self._memory, RECORDS_OFFSET + place * RECORD_BYTES + SIZE_OFFSET, nbytes)

    def backdate(self, ticket: int, created: float) -> None:
        """Record the beginning of the event of ``ticket``, if it becomes known later."""
        place = ticket & self.mask
        if self.owners[place] == ticket + 1:
            CREATED.pack_into(self._memory, RECORDS_OFFSET + place * RECORD_BYTES + CREATED_OFFSET, created)

    def before(self, ticket: int, *, most: int, since: float) -> Iterator[tuple[int, float, float]]:
        """Yield kind, begin and end (0.0: not over) of the events before that of ``ticket``, the last one first.

        Ends after ``most`` events, and at the first that began before ``since``.
        """
        for earlier in range(ticket - 1, max(ticket - 1 - min(most, self.mask), -1), -1):
            record = RECORD.unpack_from(self._memory, RECORDS_OFFSET + (earlier & self.mask) * RECORD_BYTES)
            lap, _, kind, _, ended, created, *_, closing = record
            if not lap == closing == (earlier >> self.lap_bits) + 1:
                continue  # another event, or none, has the place
            if created < since:
                return
            yield kind, created, ended

    def awaits(self, ticket: int, peer: int) -> None:
        """Record that the event of ``ticket`` waits for ``peer`` now."""
        place = ticket & self.mask
        if self.owners[place] == ticket + 1:
            PEER.pack_into(self._memory, RECORDS_OFFSET + place * RECORD_BYTES + PEER_OFFSET, peer)

    def elsewhere(self, ticket: int) -> int:
        """Return a ticket whose place is free, because that of ``ticket`` has an event that is not over.

        Returns ``NO_TICKET`` if the node has ended: nothing may be recorded after that.
        """
        if self.is_closed:
            return NO_TICKET
        for _ in range(_TRIES):
            self.passed_over += 1
            ticket = next(self.tickets)
            if not self.owners[ticket & self.mask]:
                return ticket
        self._evicted += 1
        _COUNT.pack_into(self._memory, COUNTS_OFFSET + 8, self._evicted)
        return ticket

    def begin_call(self, kind: EventKind, actor: str, endpoint: str, *, caller: int, call: int, peer: int) -> int:
        """Record the beginning of an actor call, at its caller or where its endpoint runs, as ``begin`` does."""
        key = (actor, endpoint) if len(self.words) < _CALLS_APART else endpoint
        word = self.words.get(key)
        if word is None:
            word = self._add_word(key, f"{actor}.{endpoint}" if key != endpoint else endpoint)
        site = self.site(sys._getframe(2)) if kind is EventKind.ASK else 0
        return self.begin(kind, word, peer=peer, group=CALLS | caller, sequence=call, site=site)

    # -- names -------------------------------------------------------------------------------------------------------

    def name(self, name: str, fields: Mapping[str, object] | None = None) -> int:
        """Return the word of ``name``, and of ``fields`` shown with it."""
        if fields:
            name = f"{name}\n{', '.join(f'{key}={value}' for key, value in fields.items())}"
        return self.words.get(name) or self._add_word(name, name)

    def operation(self, text: str, algorithm: str, fingerprint: int) -> int:
        """Return the word of an operation as it was called, cached by its ``fingerprint``."""
        return self.words.get(fingerprint) or self._add_word(fingerprint, f"{text}@{algorithm}", fingerprint)

    def _add_word(self, key: Hashable, name: str, fingerprint: int = 0) -> int:
        with self._lock:
            word = word_of(self._add(EntryKind.NAME, name[:_LONGEST_NAME].encode("utf-8", "replace")), fingerprint)
            if len(self.words) < _NAMES_MOST:
                self.words[key] = word
        return word

    def add_group(self, group: GroupIdentity) -> None:
        """Record the members of a group."""
        with self._lock:
            self._add(EntryKind.GROUP, msgspec.json.encode(group))

    def site(self, frame: FrameType | None) -> int:
        """Return the number of the call site of ``frame``, or of the next frame above it outside the package."""
        while frame is not None:
            code = frame.f_code
            number = self.sites.get(id(code) + frame.f_lasti)
            if number is not None:
                return number
            if not is_internal(code):
                return self._add_site(frame)
            frame = frame.f_back
        return 0

    def place(self, file: str, line: int, function: str) -> int:
        """Return the number of a call site that is known by its name alone."""
        with self._lock:
            return self._add(EntryKind.SITE, f"{file}:{line} {function}"[-_LONGEST_NAME:].encode("utf-8", "replace"))

    def _add_site(self, frame: FrameType) -> int:
        code = frame.f_code
        with self._lock:
            if len(self.sites) >= _NAMES_MOST:
                return 0
            text = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
            number = self._add(EntryKind.SITE, text[-_LONGEST_NAME:].encode("utf-8", "replace"))
            self._codes.append(code)
            self.sites[id(code) + frame.f_lasti] = number
            self._places[number] = f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        return number

    def site_of(self, ticket: int) -> str:
        """Return the place where the event of ``ticket`` was begun (``train.py:57``); "" if it is not known."""
        if ticket < 0 or self.owners[ticket & self.mask] != ticket + 1:
            return ""
        record = RECORD.unpack_from(self._memory, RECORDS_OFFSET + (ticket & self.mask) * RECORD_BYTES)
        return self._places.get(record[-2], "")

    def _add(self, kind: EntryKind, content: bytes) -> int:
        used = write_entry(self._memory, self._entries_start, self._used, kind, content)
        if not used:
            self._unnamed += 1
            _COUNT.pack_into(self._memory, COUNTS_OFFSET + 4, self._unnamed)
            return 0
        self._used = used
        self._entries += 1
        return self._entries

    # -- the whole ---------------------------------------------------------------------------------------------------

    def note(self, note: bytes) -> None:
        """Replace the note in the image: the rank's description of itself, in 4,088 bytes."""
        with self._lock:
            write_note(self._memory, note)

    def snapshot(self) -> bytes:
        """Return the image as it is now.  From any thread."""
        return self._memory[: self._entries_start + self._used]

    def close(self) -> None:
        """End recording, with the node: another one of this process may go on in the agent's memory.  Idempotent."""
        if not self.is_closed:
            for owner in self.owners:
                if owner:
                    self.end(owner - 1, EventState.CANCELLED)
            self.is_closed = True
            self.owners[:] = [-1] * self._capacity


def is_internal(code: CodeType) -> bool:
    """Return whether it is code of this package or of asyncio, which no user looks for."""
    return code.co_filename.startswith((_PACKAGE, _LIBRARY))


class _ProcessRings:
    """The recorders of this process, and the memory that its agent gave it."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._owner: weakref.ref[Recorder] | None = None
        self._is_inherited = True
        self.recorders: list[weakref.ref[Recorder]] = []

    def take(self, environment: Mapping[str, str]) -> mmap.mmap | None:
        """Return the agent's memory, if there is any and no other node uses it."""
        owner = None if self._owner is None else self._owner()
        if owner is not None and not owner.is_closed:
            return None
        if self._memory is None and self._is_inherited:
            self._is_inherited = False
            self._memory = _inherited(environment)
        return self._memory

    def add(self, recorder: Recorder, *, owns: bool) -> None:
        """Add a ``recorder``; ``owns`` means that it has the agent's memory."""
        self.recorders = [known for known in self.recorders if (old := known()) is not None and not old.is_closed]
        self.recorders.append(weakref.ref(recorder))
        if owns:
            self._owner = weakref.ref(recorder)

    def forked(self) -> None:
        """Forget the rings in a child of a rank, which must not write to its parent's ring."""
        self.__init__()  # type: ignore[misc]
        self._is_inherited = False


_rings = _ProcessRings()
if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(after_in_child=_rings.forked)


def current_recorder() -> Recorder | None:
    """Return the recorder of the node of this process that was started last; None if there is none."""
    for reference in reversed(_rings.recorders):
        recorder = reference()
        if recorder is not None and not recorder.is_closed:
            return recorder
    return None


def open_recorder(identity: RankIdentity, loop: asyncio.AbstractEventLoop | None = None) -> Recorder:
    """Return the recorder of a new node, which takes the time from the machine's monotonic clock.

    A ``loop`` that keeps its own time has ``clock_domain``, the name of its clock; then the time is the loop's.
    """
    domain = getattr(loop, "clock_domain", None)
    clock, wall = (time.perf_counter, time.time) if loop is None or domain is None else (loop.time, loop.time)
    identity = msgspec.structs.replace(
        identity, pid=os.getpid(), clock=clock(), wall=wall(), clock_domain=domain or clock_domain()
    )
    memory = _rings.take(os.environ)
    recorder = Recorder(memory or mmap.mmap(-1, image_bytes()), identity, clock=clock)
    _rings.add(recorder, owns=memory is not None)
    return recorder


def _inherited(environment: Mapping[str, str]) -> mmap.mmap | None:
    """Map the memory that ``ASYNCPAR_RING_FD`` names.  Raises ``UsageError`` if it names no ring's memory."""
    text = environment.get(RING_FD, "")
    if not text:
        return None
    try:
        descriptor = int(text)
        os.set_inheritable(descriptor, False)
        memory = mmap.mmap(descriptor, image_bytes())
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{RING_FD}: descriptor {text} is no memory of a ring ({error}); a program that a rank starts is no rank: "
            "start it without the ASYNCPAR_ variables"
        ) from error
    with suppress(OSError):
        os.close(descriptor)
    return memory


def make_ring(name: str) -> int:
    """Return a descriptor of memory for a ring, to be passed to a rank: the agent's part."""
    descriptor = open_unnamed(name)
    os.ftruncate(descriptor, image_bytes())
    return descriptor


def read_ring(descriptor: int) -> bytes:
    """Return the image in the memory that ``make_ring`` made, whatever happened to its rank."""
    return os.pread(descriptor, image_bytes(), 0)


def clock_domain() -> str:
    """Return a name shared by all processes with the same monotonic clock, and by no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        offsets = Path("/proc/self/timens_offsets").read_text("ascii").split()
    except OSError:
        return socket.gethostname()
    return f"{boot} {offsets[1]}" if len(offsets) > 1 else boot
