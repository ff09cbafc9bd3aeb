"""Mistakes in the body of an actor class are shown where they are made."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.declaration import MailboxPolicy
from asyncpar.errors import UsageError

T = TypeVar("T")


def method() -> Any:
    async def take(self: Any, n: int) -> int:
        return n

    return take


def define(**body: Any) -> type[Actor]:
    return type("Wrong", (Actor,), body)


@pytest.mark.parametrize("kind", [staticmethod, classmethod, property])
def test_an_endpoint_inside_another_decorator_is_a_usage_error(kind: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match=rf"expected a method \(async def or def\), Wrong.take is a {kind.__name__}"):
        define(take=kind(endpoint(method())))


@pytest.mark.parametrize("kind", [staticmethod, classmethod, property, functools.lru_cache, functools.partial])
def test_what_is_no_function_cannot_be_an_endpoint(kind: Callable[[Any], Any]) -> None:
    mark: Any = endpoint
    with pytest.raises(UsageError, match=r"expected a method \(async def or def\), got"):
        mark(kind(method()))


def test_an_endpoint_without_self_is_a_usage_error() -> None:
    async def alone(*, n: int = 0) -> int:
        return n

    mark: Any = endpoint
    with pytest.raises(UsageError, match="alone cannot be a method: expected self as its first parameter"):
        mark(alone)


@pytest.mark.parametrize("count", ["8", 2.5, True, 0])
def test_concurrency_is_a_number_of_at_least_one(count: Any) -> None:
    with pytest.raises(UsageError, match=f"concurrency: expected at least 1, got {count!r}"):
        endpoint(concurrency=count)


def test_the_limit_of_a_mailbox_is_a_number() -> None:
    limit: Any = "3"
    with pytest.raises(UsageError, match="limit: expected at least 1 message, got '3'"):
        MailboxPolicy(limit=limit, when_full="fail")


@pytest.mark.parametrize("hook", ["on_start", "on_stop", "on_down", "on_child_down"])
def test_a_hook_that_is_not_async_is_a_usage_error(hook: str) -> None:
    async def yields(self: Any) -> AsyncIterator[int]:
        yield 1

    for wrong in (lambda self: None, yields):
        with pytest.raises(UsageError, match=f"{hook}: expected async def, Wrong.{hook} is none"):
            define(**{hook: wrong})


def test_a_decorated_hook_is_a_hook() -> None:
    inner = method()

    @functools.wraps(inner)
    def wrapped(self: Any, n: int) -> Any:
        return inner(self, n)

    assert define(on_start=wrapped).endpoints == frozenset()


def test_a_constructor_that_is_async_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"Wrong.__init__ is async; what must be awaited belongs into on_start"):
        define(__init__=method())


class Speaking(ABC):
    @abstractmethod
    def word(self) -> str: ...


class Mixin:
    @endpoint
    async def speak(self: Any) -> str:
        return str(self.word())


class Holder(Actor, Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    @endpoint
    async def get(self) -> T:
        return self.value


async def test_mixins_abstract_bases_and_generic_actors_work(open_ranks: Any) -> None:
    class Speaker(Mixin, Holder[int], Speaking):
        def word(self) -> str:
            return f"word {self.value}"

    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Speaker, 3)
        assert (await ref.speak(), await ref.get()) == ("word 3", 3)
        abstract: Any = type("Silent", (Speaking, Actor), {})
        with pytest.raises(TypeError, match="abstract"):
            await ranks.systems[0].spawn(abstract)
