"""Actors that are dataclasses, and annotations that name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Optional

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.endpoint import with_references
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.errors import UsageError


@dataclass
class Account(Actor):
    name: str
    cents: int = 0

    @endpoint
    async def pay(self, cents: int) -> int:
        self.cents += cents
        return self.cents


@dataclass(frozen=True)
class Frozen(Actor):
    value: int = 3

    @endpoint
    async def get(self) -> int:
        return self.value


class Payer(Actor):
    @endpoint
    async def pay(self, to: Account, cents: int) -> int:
        return await to.pay(cents)

    @endpoint
    async def pay_all(self, to: list[Account], last: Account | None = None) -> list[int]:
        return [await each.pay(1) for each in [*to, *([] if last is None else [last])]]


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Account, ActorRef[Account]),
        (Payer, Payer),
        (Account | None, ActorRef[Account] | None),
        (Optional[Account], ActorRef[Account] | None),  # noqa: UP045
        (dict[str, list[Account]], dict[str, list[ActorRef[Account]]]),
        (Sequence[Account], Sequence[ActorRef[Account]]),
        (tuple[Account, ...], tuple[ActorRef[Account], ...]),
        (Annotated[Account, 1], Annotated[ActorRef[Account], 1]),
        (ActorRef[Account], ActorRef[Account]),
        (Literal["x"], Literal["x"]),
        (list[int], list[int]),
        (Any, Any),
    ],
)
def test_dataclass_actors_stand_for_references(annotation: Any, expected: Any) -> None:
    assert with_references(annotation) == expected


async def test_references_to_dataclass_actors_travel(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        account = await ranks.systems[0].spawn(Account, "mine", name="a")
        payer = await ranks.systems[1].spawn(Payer, name="p")
        assert await payer.pay(account, 5) == 5
        assert await payer.pay_all([account], account) == [6, 7]
        far = ranks.systems[0].ref("p", rank=1, actor_class=Payer)
        assert await far.pay_all([account]) == [8]


async def test_a_dataclass_actor_itself_is_no_reference(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        payer = await ranks.systems[0].spawn(Payer)
        with pytest.raises(UsageError, match=r"argument 'to' of Payer.pay\(\): Expected .*ActorRef.*got `dict`"):
            await payer.pay(Account("mine"), 5)


async def test_a_frozen_dataclass_may_be_an_actor(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        assert await (await ranks.systems[0].spawn(Frozen)).get() == 3


async def test_data_that_holds_references_can_be_taken_apart(open_ranks: Any) -> None:
    @dataclass
    class Job:
        account: Account

    async with open_ranks(1) as ranks:
        account = await ranks.systems[0].spawn(Account, "mine")
        assert asdict(Job(account)) == {"account": account}
