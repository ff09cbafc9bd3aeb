"""Asking and telling, between ranks and on one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.failure import MAX_TEXT
from asyncpar.actors.runtime.system import ActorSystem
from asyncpar.errors import ActorDown, ProtocolError, RemoteError, UsageError
from asyncpar.net.wire.payload import PayloadEncoder


@dataclass
class Sample:
    name: str
    values: npt.NDArray[np.float32]


class Counter(Actor):
    def __init__(self, start: int = 0) -> None:
        self.total = start
        self.seen: list[int] = []

    @endpoint
    async def add(self, n: int, *, times: int = 1) -> int:
        self.total += n * times
        self.seen.append(n)
        return self.total

    @endpoint
    async def history(self) -> list[int]:
        return self.seen

    @endpoint()
    def in_thread(self, n: int) -> int:
        self.total += n
        return self.total

    async def not_an_endpoint(self) -> int:
        return 1


class Arrays(Actor):
    kept: npt.NDArray[Any]

    @endpoint
    async def double(self, array: np.ndarray) -> np.ndarray:
        array *= 2
        return array

    @endpoint
    async def keep(self, array: np.ndarray) -> None:
        self.kept = array

    @endpoint
    async def kept_sum(self) -> float:
        return float(self.kept.sum())

    @endpoint
    async def describe(self, sample: Sample) -> Sample:
        return Sample(sample.name.upper(), sample.values + 1)


class Raiser(Actor):
    @endpoint
    async def fail(self, text: str) -> None:
        raise KeyError(text)

    @endpoint
    def fail_in_thread(self, text: str) -> None:
        raise StopIteration(text)

    @endpoint
    async def fail_oddly(self) -> None:
        raise ValueError("\udcff")

    @endpoint
    async def leave(self) -> None:
        raise SystemExit(3)

    @endpoint
    async def unsendable(self) -> Any:
        return object()

    @endpoint
    async def unprintable(self) -> None:
        raise Unprintable

    @endpoint
    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    @endpoint
    async def fine(self) -> str:
        return "fine"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Forwarder(Actor):
    @endpoint
    async def ask_for_me(self, target: Counter, n: int) -> int:
        return await target.add(n)

    @endpoint
    async def myself(self) -> Forwarder:
        return self.ref

    @endpoint
    async def ask_itself(self) -> Any:
        return await self.ref.myself()


@pytest.fixture(params=[0, 1], ids=["same rank", "other rank"])
def home(request: pytest.FixtureRequest) -> int:
    """The rank of the actor; its caller is rank 0."""
    rank: int = request.param
    return rank


@pytest.mark.promise("ask")
async def test_ask_returns_the_result(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Counter, 10, name="c")
        ref = ranks.systems[0].ref("c", rank=home)
        assert await ref.add(3) == 13
        assert await ref.add(n=2, times=5) == 23
        assert await ref.in_thread(1) == 24


async def test_spawn_returns_a_reference_that_works(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Counter)
        assert await ref.add(3) == 3
        assert await ref.in_thread(3) == 6
        assert (ref.rank, ref.class_name) == (0, "Counter")


async def test_actors_without_a_name_get_different_ones(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        refs = [await ranks.systems[0].spawn(Counter) for _ in range(3)]
        assert len({ref.name for ref in refs}) == 3


@pytest.mark.promise("fifo", "tell")
async def test_tells_and_asks_of_one_sender_are_handled_in_order(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Counter, name="c")
        ref = ranks.systems[0].ref("c", rank=home)
        for n in range(500):
            ref.add.tell(n)
        assert await ref.history() == list(range(500))


async def test_many_concurrent_asks_each_get_their_own_answer(open_ranks: Any) -> None:
    async with open_ranks(3) as ranks:
        await ranks.systems[2].spawn(Counter, name="c")
        refs = [system.ref("c", rank=2) for system in ranks.systems]
        results = await asyncio.gather(*(ref.add(1) for _ in range(300) for ref in refs))
        assert sorted(results) == list(range(1, 901))


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
async def test_big_arrays_travel_both_ways(open_ranks: Any, home: int, dtype: Any) -> None:
    array = np.arange(8 * 1024 * 1024 // np.dtype(dtype).itemsize).astype(dtype).reshape(2, -1)
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Arrays, name="a")
        result = await ranks.systems[0].ref("a", rank=home).double(array)
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result, array * np.asarray(2, dtype))


@pytest.mark.promise("isolation")
async def test_arguments_are_isolated_copies(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Arrays, name="a")
        ref = ranks.systems[0].ref("a", rank=home)
        array = np.ones(10)
        await ref.keep(array)
        array[:] = 100
        assert await ref.kept_sum() == 10.0
        told = np.ones(10)
        ref.keep.tell(told)
        told[:] = 100
        assert await ref.kept_sum() == 10.0


async def test_dataclasses_arrive_typed_where_the_class_is_known(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Arrays, name="a")
        sample = Sample("x", np.zeros(2, np.float32))
        untyped = await ranks.systems[0].ref("a", rank=1).describe(sample)
        typed = await ranks.systems[0].ref("a", rank=1, actor_class=Arrays).describe(sample)
    assert untyped["name"] == "X"
    assert isinstance(typed, Sample)
    assert typed.values.tolist() == [1.0, 1.0]


async def test_references_travel_as_arguments_and_results(open_ranks: Any) -> None:
    async with open_ranks(3) as ranks:
        counter = await ranks.systems[2].spawn(Counter, name="c")
        await ranks.systems[1].spawn(Forwarder, name="f")
        forwarder = ranks.systems[0].ref("f", rank=1, actor_class=Forwarder)
        assert await forwarder.ask_for_me(ranks.systems[0].ref("c", rank=2), 5) == 5
        assert await counter.add(1) == 6
        itself = await forwarder.myself()
        assert itself == forwarder
        assert await itself.ask_for_me(counter, 1) == 7


@pytest.mark.promise("remote-error")
async def test_an_exception_arrives_with_its_type_text_and_traceback(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Raiser, name="r")
        ref = ranks.systems[0].ref("r", rank=home)
        with pytest.raises(RemoteError, match=f"rank {home}: KeyError: 'lost'") as caught:
            await ref.fail("lost")
        assert caught.value.rank == home
        assert caught.value.type_name == "KeyError"
        assert "raise KeyError(text)" in caught.value.remote_traceback
        assert "cell.py" not in caught.value.remote_traceback
        assert await ref.fine() == "fine"


@pytest.mark.parametrize(
    ("name", "arguments", "type_name", "text"),
    [
        ("fail_in_thread", ("x",), "RuntimeError", "StopIteration: x"),
        ("leave", (), "SystemExit", "3"),
        ("unsendable", (), "asyncpar.errors.UsageError", "the result of unsendable"),
        ("unprintable", (), "test_system.Unprintable", "its text cannot be made"),
        ("cancel_itself", (), "CancelledError", "CancelledError"),
    ],
)
@pytest.mark.promise("remote-error")
async def test_whatever_an_endpoint_raises_its_actor_goes_on(
    open_ranks: Any, home: int, name: str, arguments: tuple[Any, ...], type_name: str, text: str
) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Raiser, name="r")
        ref = ranks.systems[0].ref("r", rank=home)
        with pytest.raises(RemoteError, match=text) as caught:
            await getattr(ref, name)(*arguments)
        assert caught.value.type_name.endswith(type_name)
        assert await ref.fine() == "fine"


@pytest.mark.promise("failure", "failure-log", "down")
async def test_a_told_failure_ends_its_actor_and_is_logged_where_it_lived(
    open_ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Raiser, name="r")
        ref = ranks.systems[0].ref("r", rank=1)
        ref.fail.tell("lost")
        with pytest.raises(ActorDown, match=r"rank 1: fine of .*: the actor failed: KeyError: 'lost'"):
            await ref.fine()
    (record,) = caplog.records
    assert record.getMessage() == "rank 1: actor 'r' failed"
    assert record.exc_info is not None
    assert record.exc_info[1] is not None
    assert record.exc_info[1].__notes__ == ["in fail of actor 'r', told by rank 0"]


@pytest.mark.promise("dead-letter")
async def test_told_messages_that_nobody_handles_are_dead_letters(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Raiser, name="r")
        ref = ranks.systems[0].ref("r", rank=1)
        letters = ranks.systems[1].dead_letters
        seen: list[str] = []
        unsubscribe = letters.subscribe(lambda letter: seen.append(letter.actor))
        ref.missing.tell()
        ranks.systems[0].ref("nobody", rank=1).hello.tell()
        assert await ref.fine() == "fine"
        unsubscribe()
        await ranks.systems[1].stop(ref)
        ref.fine.tell()
        await ranks.systems[0].watch(ref)
        assert [str(letter).partition(": ")[2].partition(";")[0] for letter in letters.recent] == [
            "'missing' is no endpoint of Raiser",
            "there is no actor 'nobody' on rank 1",
            "the actor was stopped",
        ]
        assert (letters.count, seen) == (3, ["r", "nobody"])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda ref: ref.add("3"), r"argument 'n' of Counter.add\(\): Expected `int`, got `str`"),
        (lambda ref: ref.add(), r"Counter.add\(\) misses 'n'; it takes \(n, \*, times\)"),
        (lambda ref: ref.add(1, 2), r"Counter.add\(\) takes \(n, \*, times\), got 2 positional arguments"),
        (lambda ref: ref.add(1, n=2), r"Counter.add\(\) got argument 'n' twice"),
        (lambda ref: ref.add(1, m=2), r"Counter.add\(\) takes \(n, \*, times\), got an unknown argument 'm'"),
        (lambda ref: ref.add(1, times=None), r"argument 'times' of Counter.add\(\): Expected `int`, got `None`"),
        (lambda ref: ref.history(1), r"Counter.history\(\) takes no arguments, got 1"),
        (lambda ref: ref.add(object()), r"argument 1 of add\(\): a value of type object cannot be sent"),
        (lambda ref: ref.add(1, times={1}.pop), r"argument 'times' of add\(\): .*builtin_function_or_method"),
        (lambda ref: ref.not_an_endpoint(), "not_an_endpoint"),
        (lambda ref: ref.on_start(), "on_start"),
        (lambda ref: ref._seen(), "_seen: private names"),  # noqa: SLF001  # the access is what is tested: a private name is refused
        (lambda ref: ref.__secret__(), "__secret__: private names"),
    ],
)
@pytest.mark.parametrize("is_typed", [False, True], ids=["by name", "typed"])
@pytest.mark.promise("checked", "no-code")
async def test_wrong_calls_are_usage_errors_at_the_caller(
    open_ranks: Any, home: int, is_typed: bool, call: Any, text: str
) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Counter, name="c")
        ref = ranks.systems[0].ref("c", rank=home, actor_class=Counter if is_typed else None)
        with pytest.raises(UsageError, match=text):
            await call(ref)
        assert await ref.add(1) == 1


async def test_an_unknown_actor_is_a_usage_error(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        with pytest.raises(UsageError, match=f"there is no actor 'nobody' on rank {home}"):
            await ranks.systems[0].ref("nobody", rank=home).hello()


async def test_a_typed_reference_to_an_actor_of_another_class_is_checked_there(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Raiser, name="r")
        with pytest.raises(UsageError, match="'add' is no endpoint of Raiser"):
            await ranks.systems[0].ref("r", rank=1, actor_class=Counter).add(1)


async def test_an_actor_that_asks_itself_gets_an_error_instead_of_hanging(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Forwarder)
        with pytest.raises(RemoteError, match="an actor that asks itself waits for ever"):
            await ref.ask_itself()


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 256, 7])
async def test_names_must_be_printable_text(open_ranks: Any, name: Any) -> None:
    async with open_ranks(1) as ranks:
        with pytest.raises(UsageError, match="name: expected 1 to 255 printable characters"):
            await ranks.systems[0].spawn(Counter, name=name)
        with pytest.raises(UsageError, match="name: expected 1 to 255 printable characters"):
            ranks.systems[0].ref(name)


@pytest.mark.promise("name")
async def test_a_taken_name_is_a_usage_error(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[0].spawn(Counter, name="c")
        with pytest.raises(UsageError, match="name: 'c' is taken by another actor on rank 0"):
            await ranks.systems[0].spawn(Counter, name="c")
        await ranks.systems[1].spawn(Counter, name="c")


async def test_a_system_that_is_not_open_says_so(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        system = ActorSystem(ranks.links[0])
        with pytest.raises(UsageError, match=r"add of .*: the actor system of rank 0 is not open"):
            await system.ref("c").add(1)
        with pytest.raises(UsageError, match="spawn: the actor system of rank 0 is not open"):
            await system.spawn(Counter)


async def test_long_texts_are_cut_and_odd_ones_survive(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Raiser, name="r")
        with pytest.raises(RemoteError) as caught:
            await ranks.systems[0].ref("r", rank=1).fail("x" * 200_000)
        assert caught.value.message.startswith("...xxx")
        assert len(caught.value.message) == MAX_TEXT + 3
        with pytest.raises(RemoteError, match="udcff"):
            await ranks.systems[0].ref("r", rank=1).fail_oddly()


async def test_wrong_ranks_and_classes_are_usage_errors(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        with pytest.raises(UsageError, match=r"rank: expected 0..1, got 2"):
            ranks.systems[0].ref("c", rank=2)
        with pytest.raises(UsageError, match="expected a subclass of Actor, got <class 'int'>"):
            await ranks.systems[0].spawn(int)
        with pytest.raises(UsageError, match="expected a subclass of Actor, got 7"):
            ranks.systems[0].ref("c", actor_class=7)


@pytest.mark.promise("at-most-once")
async def test_a_call_that_comes_twice_is_handled_once(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        ref = await ranks.systems[1].spawn(Counter, name="c")
        await ranks.systems[0].ref("c", rank=1).add(1)
        call = PayloadEncoder().finish(message.CallMessage(99, "c", "add", [msgspec.Raw(b"\x01")], {}), what="a call")
        ranks.systems[1]._router.receive(0, call, lambda: None)  # noqa: SLF001  # a call that no rank of this program sends is handed over in place of its transport
        with pytest.raises(ProtocolError, match="rank 0 sent call 99 twice"):
            ranks.systems[1]._router.receive(0, call, lambda: None)  # noqa: SLF001  # a call that no rank of this program sends is handed over in place of its transport
        assert await ref.add(0) == 2
