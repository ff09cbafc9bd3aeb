"""The reports of a host: all that a leader has not taken in reach the next one, too."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from asyncpar.hosts.group import HostFacts
from asyncpar.hosts.lineage import MemberReport, first_lineage
from asyncpar.hosts.messages import HostEvent, MemberArrived, MemberProgressed, WorldTerms

START = first_lineage(b"state")
VALUES = {
    "member": "h0/0/a",
    "host": "h0",
    "address": "h0:1",
    "number": 1,
    "terms": WorldTerms(least_hosts=1, most_hosts=2, members=1, last_call=5.0, report_within=10.0),
    "record": b"record",
    "lineage": START,
    "generation": 3,
    "report": MemberReport(generation=3, lineage=START),
    "is_draining": True,
    "how": "is stopped",
    "step": 4,
    "steps": 4,
    "why": "it failed",
    "settings": (),
    "name": "end 1",
    "content": b"content",
}


def example(kind: type) -> HostEvent:
    """Return an event of this kind."""
    wanted = [field.name for field in msgspec.structs.fields(kind) if field.required]
    return kind(**{name: VALUES[name] for name in wanted})  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", get_args(HostEvent), ids=lambda kind: kind.__name__)
def test_every_kind_of_report_is_sent_to_the_next_leader_too(kind: type) -> None:
    facts = HostFacts()
    if kind is MemberProgressed:
        facts.note(example(MemberArrived))
    facts.note(example(kind))
    assert example(kind) in facts.all()
