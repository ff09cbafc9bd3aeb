"""Elastic states commit, undo, compare and refuse."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncpar.elasticity.lineage import ArrayShape, block_of, checksums, state_digest
from asyncpar.elasticity.memory import check_room
from asyncpar.elasticity.plain import decode_plain, encode_plain
from asyncpar.elasticity.state import ElasticState
from asyncpar.errors import ProtocolError, SnapshotTooLarge, UsageError
from asyncpar.hybrid.loss_scaling import LossScaler, LossScaling
from asyncpar.nn.half import HalfParameter
from asyncpar.nn.optimizers import SGD, Adam, Optimizer
from asyncpar.nn.parameter import Parameter


class Everything:
    """A state with one of each kind."""

    def __init__(self) -> None:
        self.weight = Parameter("weight", np.arange(6, dtype=np.float32).reshape(2, 3))
        self.half = HalfParameter("half", np.ones((2, 2), np.float32))
        self.bias = Parameter("bias", np.ones(3, np.float32))
        self.adam = Optimizer([self.weight, self.half], Adam())
        self.sgd = Optimizer([self.bias], SGD(momentum=0.9))
        self.average = np.zeros(4)
        self.rng = np.random.default_rng(1)
        self.old = np.random.Generator(np.random.MT19937(2))
        self.scaler = LossScaler(LossScaling(interval=2))
        self.names: list[str] = ["a"]
        self.state = ElasticState(
            [self.weight, self.half, self.bias],
            [self.adam, self.sgd],
            self.rng,
            {"average": self.average, "old": self.old, "scaler": self.scaler, "names": self.names, "epoch": 0},
        )

    async def change(self, step: float) -> None:
        """Change all of it, as a step does."""
        state = self.state
        for optimizer in (self.adam, self.sgd):
            await state.open(optimizer)
            for parameter in optimizer.parameters:
                parameter.grad.fill(step)
            optimizer.step(0.1)
        self.average += step
        self.rng.random()
        self.old.random()
        self.scaler.update(has_overflowed=step > 1)
        self.names.append(str(step))
        state["epoch"] += 1

    def content(self) -> bytes:
        """Return all of it, read as the program reads it."""
        arrays = [self.weight.value, self.half.stored, self.bias.value, self.average]
        for optimizer in (self.adam, self.sgd):
            arrays += [array for flat in optimizer.ranges for array in flat.arrays().values()]
        values = [
            self.rng.bit_generator.state,
            self.old.bit_generator.state,
            self.scaler.state(),
            self.names,
            self.state["epoch"],
            self.adam.step_count,
            self.sgd.step_count,
        ]
        return b"".join(array.tobytes() for array in arrays) + encode_plain(values, "values")


async def commit(everything: Everything, step: float) -> None:
    await everything.state.begin()
    await everything.change(step)
    everything.state.prepare()
    await everything.state.commit()


async def test_an_abort_restores_everything_exactly() -> None:
    one, undisturbed = Everything(), Everything()
    for number in range(4):
        await commit(undisturbed, number)
        await one.state.begin()
        before = one.content()
        await one.change(99.0)
        assert one.content() != before
        if number % 2:
            one.state.prepare()
        await one.state.abort()
        assert one.content() == before
        await commit(one, number)
        assert one.content() == undisturbed.content()
        assert await one.state.lineage() == await undisturbed.state.lineage()
    await one.state.close()
    await undisturbed.state.close()


async def test_what_is_prepared_has_the_lineage_that_is_committed() -> None:
    one = Everything()
    await one.state.begin()
    await one.change(1.0)
    one.state.prepare()
    prepared = await one.state.prepared_lineage()
    assert (await one.state.lineage()).step == 0
    await one.state.commit()
    assert await one.state.lineage() == prepared
    await one.state.close()


@pytest.mark.parametrize(
    "what", ["weight", "half", "bias", "moment", "average", "rng", "old", "scaler", "names", "epoch"]
)
async def test_the_digest_sees_a_change_of_every_part(what: str) -> None:
    one, other = Everything(), Everything()
    for everything in (one, other):
        await everything.state.begin()
        await everything.change(1.0)
    match what:
        case "weight" | "bias":
            getattr(other, what).value.reshape(-1)[0] = np.nextafter(getattr(other, what).value.reshape(-1)[0], 9)
        case "half":
            other.half.stored[0, 0] = 3
        case "moment":
            next(iter(other.adam.ranges[0].states.values()))[0] += 1
        case "average":
            other.average[3] = np.nextafter(other.average[3], 9)
        case "rng" | "old":
            getattr(other, what).random()
        case "scaler":
            other.scaler.update(has_overflowed=True)
        case "names":
            other.names[0] = "b"
        case "epoch":
            other.state["epoch"] = 1.0
    for everything in (one, other):
        everything.state.prepare()
        await everything.state.commit()
    assert await one.state.lineage() != await other.state.lineage()
    for everything in (one, other):
        await everything.state.close()


async def test_equal_states_of_other_histories_have_other_lineages() -> None:
    one, other = Everything(), Everything()
    await commit(one, 1.0)
    await one.state.begin()
    for state in (one.state, other.state):
        assert (await state.identity()).digest
    assert (await one.state.lineage()).digest != (await one.state.identity()).digest
    await one.state.close()


async def test_threads_that_are_left_behind_do_not_touch_what_is_restored() -> None:
    one = Everything()
    await one.state.begin()
    await one.state.open(one.adam)
    stray = one.weight.value
    await one.state.abort()
    before = one.content()
    stray.fill(7.0)
    assert one.content() == before
    undisturbed = Everything()
    for everything in (undisturbed, one):
        await everything.state.open(everything.adam)
        stray.fill(8.0)
        everything.adam.step(0.1)
    assert one.content() == undisturbed.content()
    await one.state.close()
    await undisturbed.state.close()


async def test_an_update_that_is_refused_changes_nothing_and_two_in_one_step_add_up() -> None:
    one, plain = Everything(), Everything()
    before = one.content()
    await one.state.begin()
    await one.state.open(one.adam)
    one.state.withdraw(one.adam)
    assert one.content() == before
    for _ in range(2):
        await one.state.open(one.adam)
        one.adam.step(0.1)
    one.state.withdraw(one.adam)  # of a third update: the first two stay
    for _ in range(2):
        plain.adam.step(0.1)
    assert one.content() == plain.content()
    await one.state.close()
    await plain.state.close()


class Unhashable:
    """Nothing that could be compared."""


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"hook": Unhashable()}, "hook"),
        ({"table": {"a": [1, Unhashable()]}}, r"table\['a'\]\[1\]"),
        ({"objects": np.array([None])}, "objects"),
        ({"view": np.zeros((4, 4))[:, 1]}, "view"),
        ({"names": {1, 2}}, "names"),
        ({"weight": 1}, "weight"),
    ],
)
async def test_what_cannot_be_hashed_is_refused_by_name(extra: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=name):
        ElasticState([Parameter("weight", np.zeros(2))], extra=extra)


async def test_a_value_that_becomes_unhashable_is_named_when_the_step_is_prepared() -> None:
    values: dict[str, Any] = {}
    state = ElasticState({"w": np.zeros(2)}, extra={"values": values})
    await state.begin()
    values["hook"] = Unhashable()
    with pytest.raises(UsageError, match=r"values\['hook'\]"):
        state.prepare()
    await state.abort()
    assert values == {}
    await state.close()


async def test_wrong_parts_are_refused() -> None:
    weight = Parameter("weight", np.zeros(2))
    for parameters, optimizers in (
        ([weight, Parameter("weight", np.zeros(2))], []),
        ([np.zeros(2)], []),
        ({"other": weight}, []),
        ({"w": 3}, []),
        ([], [Optimizer([weight], SGD())]),
        ([weight], [object()]),
        ([weight], [Optimizer([weight], SGD()), Optimizer([weight], SGD())]),
    ):
        with pytest.raises(UsageError):
            ElasticState(parameters, optimizers)  # type: ignore[arg-type]
    state = ElasticState([weight], extra={"epoch": 1})
    with pytest.raises(UsageError, match="epoch"):
        state["step"]
    with pytest.raises(UsageError, match="epoch"):
        state["step"] = 2
    with pytest.raises(UsageError, match="optimizer"):
        await state.open(Optimizer([weight], SGD()))


def test_a_state_that_does_not_fit_into_memory_is_refused_before_anything_happens() -> None:
    check_room(90, "it", available=100)
    with pytest.raises(SnapshotTooLarge, match="it need 96 bytes of memory, and there are 95"):
        check_room(96, "it", available=100)


PLAIN = [
    None,
    True,
    0,
    -(2**200),
    1.5,
    float("inf"),
    -0.0,
    "é\ud800",
    b"\0\xff",
    [1, (2, {"a": [3.0]})],
    {(1, 2): b"x"},
]


def test_plain_values_come_back_as_they_were() -> None:
    for value in [*PLAIN, PLAIN, {1: "a", "1": "b", None: 2}]:
        back = decode_plain(encode_plain(value, "value"))
        assert (back, type(back)) == (value, type(value))
    assert str(decode_plain(encode_plain(-0.0, "value"))) == "-0.0"
    assert np.isnan(decode_plain(encode_plain(float("nan"), "value")))
    array = decode_plain(encode_plain(np.arange(3, dtype=">i2"), "value"))
    assert array.tolist() == [0, 1, 2]
    scalar = decode_plain(encode_plain(np.float32(1.5), "value"))
    assert (scalar, scalar.dtype) == (1.5, np.float32)


def test_the_order_in_which_dicts_were_filled_does_not_show() -> None:
    assert encode_plain({"a": 1, "b": 2}, "v") == encode_plain({"b": 2, "a": 1}, "v")
    assert encode_plain([1, 2], "v") != encode_plain([2, 1], "v")
    assert encode_plain(1, "v") != encode_plain(1.0, "v") != encode_plain(True, "v")


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="loop"):
        encode_plain(loop, "loop")


@pytest.mark.parametrize("content", [b"", b"[", b'["q",1]', b'["i","x"]', b'["b"]', b'["a","<f4"]', b'["f",3]'])
def test_damaged_plain_values_are_a_protocol_error(content: bytes) -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        decode_plain(content)


def test_every_block_has_a_checksum_of_its_own() -> None:
    array = np.zeros((9 << 20) // 8)
    shape = ArrayShape.of("a", array)
    assert shape.blocks == len(checksums(array)) == 3
    assert sum(len(block_of(array, number)) for number in range(3)) == array.nbytes
    before = checksums(array)
    array[-1] = 1e-300
    after = checksums(array)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, False]
    assert state_digest([(shape, before)], {}) != state_digest([(shape, after)], {})
    assert checksums(np.zeros(0)) == ()


async def test_closing_in_the_middle_of_a_step_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    one = Everything()
    await commit(one, 1.0)
    await one.state.begin()
    await one.change(2.0)
    one.state.prepare()
    await one.state.close()
    assert asyncio.all_tasks() == before


async def test_what_is_lent_stays_as_it_was_whatever_becomes_of_the_steps_after_it() -> None:
    one, undisturbed = Everything(), Everything()
    lent: list[tuple[dict[str, Any], dict[str, bytes]]] = []
    for number in range(5):
        await one.state.begin()
        arrays = one.state.lend_all()
        lent.append((arrays, {name: array.tobytes() for name, array in arrays.items()}))
        if number % 2:
            await one.change(99.0)
            await one.state.abort()
            await one.state.begin()
        await one.change(float(number + 1))
        one.state.prepare()
        await one.state.commit()
        await commit(undisturbed, float(number + 1))
        assert one.content() == undisturbed.content()
        assert await one.state.lineage() == await undisturbed.state.lineage()
    for arrays, contents in lent:
        assert {name: array.tobytes() for name, array in arrays.items()} == contents
    assert len({contents["weight"] for _, contents in lent}) == len(lent)
    await one.state.close()
    await undisturbed.state.close()
