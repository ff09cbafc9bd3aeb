"""Odd errors of user code reach their receiver and never harm the node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.ending import DownReason
from asyncpar.errors import ActorDown, AsyncparError, RemoteError, UsageError
from tests.actors.runtime.conftest import OpenRanks

TEXTS = 1 << 20


@dataclass(frozen=True)
class FrozenError(Exception):
    """An exception whose attributes cannot be set, not even its traceback."""

    code: int


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class EmptyError(Exception):
    """An exception that counts as false."""

    def __len__(self) -> int:
        return 0


class AbortError(BaseException):
    """What some libraries raise past every `except Exception`."""


def _with_notes() -> Exception:
    error = ValueError("noted")
    error.__notes__ = "not a list"  # type: ignore[assignment]
    return error


ODD: dict[str, Callable[[], BaseException]] = {
    "frozen": lambda: FrozenError(3),
    "unprintable": UnprintableError,
    "empty": EmptyError,
    "surrogate": lambda: ValueError("\ud800"),
    "huge": lambda: ValueError("x" * TEXTS),
    "abort": AbortError,
    "notes": _with_notes,
    "group": lambda: ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
    "cancelled group": lambda: BaseExceptionGroup("one", [asyncio.CancelledError()]),
}


@dataclass
class Picky:
    """A value that user code checks, in its own way."""

    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise LookupError("negative")


@dataclass(slots=True)
class Holey:
    """A value that may lack an attribute."""

    number: int


class Thrower(Actor):
    def __init__(self) -> None:
        self.gate = asyncio.Event()

    @endpoint
    async def throw(self, kind: str) -> int:
        raise ODD[kind]()

    @endpoint
    def throw_in_thread(self, kind: str) -> int:
        raise ODD[kind]()

    @endpoint(concurrency=2)
    async def throw_beside(self, kind: str) -> int:
        raise ODD[kind]()

    @endpoint
    async def wait(self) -> None:
        await self.gate.wait()

    @endpoint
    async def add_one(self, picky: Picky) -> int:
        return picky.number + 1

    @endpoint
    async def negate(self, number: int) -> Picky:
        picky = Picky(number)
        picky.number = -number
        return picky

    @endpoint
    async def holey(self) -> Holey:
        holey = Holey(1)
        del holey.number
        return holey

    @endpoint
    async def cancel_itself(self) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            return "went on"
        return "was not cancelled"


class Starter(Actor):
    def __init__(self, kind: str) -> None:
        if kind == "stop iteration":
            next(iter(()))
        raise ODD[kind]()


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["throw", "throw_in_thread", "throw_beside"])
async def test_an_odd_error_reaches_who_asked_and_the_actor_goes_on(
    open_ranks: OpenRanks, kind: str, name: str
) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(30):
        await ranks.systems[1].spawn(Thrower, name="t")
        for system in ranks.systems:
            ref = system.ref("t", rank=1, actor_class=Thrower)
            with pytest.raises(RemoteError):
                await getattr(ref, name)(kind)
            assert await ref.add_one(Picky(1)) == 2


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["throw", "throw_beside"])
async def test_an_odd_error_fails_the_actor_that_was_told_and_is_reported(
    open_ranks: OpenRanks, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with open_ranks(2) as ranks, asyncio.timeout(30):
        await ranks.systems[1].spawn(Thrower, name="t")
        ref = ranks.systems[0].ref("t", rank=1, actor_class=Thrower)
        watch = ranks.systems[0].watch(ref)
        waiting = asyncio.ensure_future(ref.wait()) if name == "throw_beside" else None
        await getattr(ref, name).tell(kind)
        later = asyncio.ensure_future(ref.wait())
        down = await watch
        assert down.reason is DownReason.FAILED
        assert isinstance(down.error, RemoteError)
        assert down.error.type_name.endswith(type(ODD[kind]()).__name__)
        for asked in (waiting, later):
            if asked is not None:
                with pytest.raises(ActorDown) as caught:
                    await asked
                assert len(str(caught.value)) < 10_000
        await ranks.systems[1].spawn(Thrower, name="t")


@pytest.mark.parametrize("kind", [*ODD, "stop iteration"])
async def test_an_odd_error_of_a_constructor_ends_the_spawn(open_ranks: OpenRanks, kind: str) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(30):
        with pytest.raises(BaseException) as caught:
            await ranks.systems[0].spawn(Starter, kind)
        assert not isinstance(caught.value, TimeoutError | asyncio.CancelledError)
        with pytest.raises(RemoteError):
            await ranks.systems[0].spawn_on(1, Starter, (kind,))
        assert await (await ranks.systems[1].spawn(Thrower)).add_one(Picky(1)) == 2


async def test_a_usage_error_of_a_constructor_with_any_text_ends_the_remote_spawn(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(30):
        with pytest.raises(UsageError, match="udcff"):
            await ranks.systems[0].spawn_on(1, Misused)


class Misused(Actor):
    def __init__(self) -> None:
        raise UsageError("path: expected a file, got '\udcff'")


async def test_an_argument_that_user_code_refuses_is_a_usage_error(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(30):
        await ranks.systems[0].spawn(Thrower, name="t")
        with pytest.raises(UsageError, match=r"argument 'picky'.*negative"):
            await ranks.systems[0].ref("t").add_one({"number": -1})
        assert await ranks.systems[0].ref("t").add_one({"number": 1}) == 2


async def test_a_result_that_user_code_refuses_is_a_usage_error(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(30):
        await ranks.systems[1].spawn(Thrower, name="t")
        ref = ranks.systems[0].ref("t", rank=1, actor_class=Thrower)
        with pytest.raises(UsageError, match=r"the result of negate.*negative"):
            await ref.negate(1)
        assert await ref.add_one(Picky(1)) == 2


async def test_a_result_that_cannot_even_be_looked_at_is_an_error_for_who_asked(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(30):
        ref = await ranks.systems[0].spawn(Thrower)
        with pytest.raises(AsyncparError):
            await ref.holey()
        assert await ref.add_one(Picky(1)) == 2


async def test_an_endpoint_that_cancelled_its_task_and_went_on_leaves_no_trace(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(30):
        ref = await ranks.systems[0].spawn(Thrower)
        assert await ref.cancel_itself() == "went on"
        waiting = asyncio.ensure_future(ref.wait())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        assert await ref.add_one(Picky(1)) == 2
