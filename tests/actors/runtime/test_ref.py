"""References as values."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.ref import ActorRef, Messenger, RefExtension, Told
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.wire.payload import PayloadDecoder, PayloadEncoder, encode_payload


class Nobody(Messenger):
    """Carries nothing."""

    is_closed = False

    async def ask(self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        raise AssertionError("nothing is sent in these tests")

    def tell(self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Told:
        raise AssertionError("nothing is sent in these tests")

    def stream(
        self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        raise AssertionError("nothing is sent in these tests")


class Counter(Actor):
    @endpoint
    async def add(self, n: int) -> int:
        return n

    async def hidden(self, n: int) -> int:
        return n


EXTENSION = RefExtension(Nobody(), world_size=4)


def make(name: str = "c", rank: int = 1, actor_class: type[Counter] | None = Counter) -> ActorRef[Counter]:
    return ActorRef(Nobody(), name=name, rank=rank, actor_class=actor_class)


def test_references_to_one_actor_are_equal() -> None:
    assert make() == make(actor_class=None)
    assert hash(make()) == hash(make(actor_class=None))
    assert make() != make(rank=2)
    assert make() != make(name="d")
    assert make() != "c"


def test_references_say_what_they_refer_to() -> None:
    assert repr(make()) == "<Counter 'c' on rank 1>"
    assert repr(make(actor_class=None)) == "<actor 'c' on rank 1>"
    assert repr(make().add) == "<endpoint add of <Counter 'c' on rank 1>>"


def test_notebooks_show_the_endpoints_of_a_reference_and_escape_its_name() -> None:
    html = make(name="<b>&")._repr_html_()  # the name that notebooks call
    assert html.startswith("<table><thead><tr><th>Counter</th><th>&lt;b&gt;&amp;</th></tr></thead>")
    assert "<td>rank</td><td>1</td>" in html
    assert f"<td>endpoints</td><td>{', '.join(sorted(Counter.endpoints))}</td>" in html
    assert "<td>unknown here</td>" in make(actor_class=None)._repr_html_()


def test_names_that_are_no_endpoints_are_attribute_and_usage_errors() -> None:
    for name in ("hidden", "missing", "on_start", "_private", "__dunder__"):
        assert not hasattr(make(), name)
        with pytest.raises(UsageError, match=name):
            getattr(make(), name)
    assert hasattr(make(actor_class=None), "missing")


def test_typed_endpoints_must_be_endpoints() -> None:
    assert repr(make().add) == "<endpoint add of <Counter 'c' on rank 1>>"
    with pytest.raises(UsageError, match="hidden: Counter has no endpoint of this name"):
        _ = make().hidden


def test_references_can_be_copied() -> None:
    assert copy.copy(make()) == make()


def test_references_travel_with_the_name_of_their_class() -> None:
    payload = PayloadEncoder(extension=EXTENSION).finish({"who": [make()]}, what="x")
    arrived = PayloadDecoder[Any](Any, extension=EXTENSION).decode(payload, what="x")["who"][0]
    assert (arrived, arrived.class_name, arrived.actor_class) == (make(), "Counter", None)
    typed = PayloadDecoder[Any](dict[str, list[ActorRef[Counter]]], extension=EXTENSION).decode(payload, what="x")
    assert typed["who"][0].actor_class is Counter


def test_a_reference_where_another_value_is_wanted_is_a_usage_error() -> None:
    payload = PayloadEncoder(extension=EXTENSION).finish(make(), what="x")
    with pytest.raises(UsageError, match="argument n: Expected `int`, got `ext`"):
        PayloadDecoder[int](int, extension=EXTENSION).decode(payload, what="argument n")
    with pytest.raises(UsageError, match=r"argument r: Expected `asyncpar.actors.runtime.ref.ActorRef.*`, got `str`"):
        PayloadDecoder[Any](ActorRef, extension=EXTENSION).decode(encode_payload("c", what="x"), what="argument r")


@pytest.mark.parametrize(
    "content",
    [b"", b"\xc1", *map(msgspec.msgpack.encode, ([1, "c"], [4, "c", ""], [-1, "c", ""], [1, 2, ""], {"rank": 1}))],
)
def test_damaged_references_are_protocol_errors(content: bytes) -> None:
    payload = encode_payload(msgspec.msgpack.Ext(16, content), what="x")
    with pytest.raises(ProtocolError, match="actor reference"):
        PayloadDecoder[Any](Any, extension=EXTENSION).decode(payload, what="x")


def test_unknown_extensions_are_protocol_errors() -> None:
    payload = encode_payload(msgspec.msgpack.Ext(18, b""), what="x")
    with pytest.raises(ProtocolError, match="extension type 18"):
        PayloadDecoder[Any](Any, extension=EXTENSION).decode(payload, what="x")
