"""Mistakes with references are refused with errors that say what to change."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.errors import RemoteError, UsageError


class Giver(Actor):
    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def give(self, what: str) -> Any:
        own: list[Any] = []
        own.append(own)
        return {"lambda": lambda: 1, "huge": [1 << 100], "recursive": own, "self": self}[what]

    @endpoint
    async def items(self) -> AsyncIterator[Any]:
        yield object()

    async def forgotten(self) -> None: ...


class Starting(Actor):
    async def on_start(self) -> None:
        raise OSError("no database")


async def test_a_method_that_is_not_marked_says_so(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        ref: Any = await ranks.systems[0].spawn(Giver)
        with pytest.raises(
            UsageError, match="forgotten: Giver has no endpoint of this name; it is a method, but not ma"
        ):
            await ref.forgotten()
        with pytest.raises(UsageError, match="ecco: Giver has no endpoint of this name; it has echo, give, items"):
            await ref.ecco(1)
        assert {"echo", "give", "items"} <= set(dir(ref))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("lambda", r"the result of give\(\): a value of type function cannot be sent; expected plain data"),
        ("huge", r"the result of give\(\), at \S+: a value of type int cannot be sent: .*can't serialize ints"),
        ("recursive", r"the result of give\(\): a value of type list cannot be sent: .*maximum recursion depth"),
        ("self", r"the result of give\(\): an actor itself .*Giver. cannot be sent; send the actor's reference"),
    ],
)
async def test_a_result_that_cannot_be_sent_is_named_without_a_stack_of_ours(
    open_ranks: Any, what: str, text: str
) -> None:
    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Giver)
        with pytest.raises(RemoteError, match=text) as caught:
            await ref.give(what)
        assert caught.value.remote_traceback == ""


async def test_an_item_that_cannot_be_sent_is_named_without_a_stack_of_ours(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Giver)
        with pytest.raises(RemoteError, match="a value of type object cannot be sent") as caught:
            await anext(ref.items.stream())
        assert "payload.py" not in caught.value.remote_traceback


async def test_an_argument_that_cannot_be_sent_is_named_once(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Giver)
        with pytest.raises(UsageError, match=r"argument 1 of echo\(\): a value of type function") as caught:
            await ref.echo(lambda: 1)
        assert "another exception" not in "".join(traceback.format_exception(caught.value))


async def test_an_actor_that_does_not_start_elsewhere_says_where_it_raised(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        with pytest.raises(RemoteError, match="no database") as caught:
            await ranks.systems[0].spawn_on(1, Starting)
        assert caught.value.remote_traceback.splitlines()[1].startswith(f'  File "{__file__}"')


async def test_actors_their_classes_and_endpoints_are_not_sent(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Giver)
        for wrong in (Giver(), Giver, ref.echo):
            with pytest.raises(
                UsageError, match=r"argument 1 of echo\(\): .* cannot be sent; send the actor's reference"
            ):
                await ref.echo(wrong)


async def test_a_rank_is_a_number(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        for wrong in ("1", 1.0, 2, -1):
            with pytest.raises(UsageError, match=f"rank: expected 0..1, got {wrong!r}"):
                ranks.systems[0].ref("a", rank=wrong)
        assert type(ranks.systems[0].ref("a", rank=np.int64(1)).rank) is int


async def test_a_long_name_is_not_repeated_in_full(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        with pytest.raises(UsageError, match="name: expected 1 to 255 printable characters") as caught:
            ranks.systems[0].ref("x" * 5000)
        assert len(str(caught.value)) < 200


async def test_a_call_that_is_not_awaited_is_named_as_the_program_names_it(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Giver, name="g")
        untyped = ranks.systems[0].ref("g")
        for forgetful, name in ((ref, "Giver.echo"), (untyped, "echo")):
            call = forgetful.echo(1)
            assert call.__qualname__ == name  # Python warns that this coroutine was never awaited
            call.close()


async def test_references_are_values_but_not_for_pickle(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        ref: Any = await ranks.systems[0].spawn(Giver, name="g")
        assert copy.deepcopy({"ref": ref}) == {"ref": ref}
        with pytest.raises(TypeError, match=r"cannot be pickled; send it to an actor"):
            pickle.dumps(ref)
