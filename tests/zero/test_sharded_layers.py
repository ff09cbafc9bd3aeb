"""Layers whose parameters are there only while they compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from asyncpar.core.concurrency.bridge import LoopBridge, PendingResult
from asyncpar.errors import UsageError
from asyncpar.nn import Array, Initializer, Linear, Parameter, Stage
from asyncpar.nn.linear import TiedLinear
from asyncpar.zero import MemoryExceeded, ZeroEngine, ZeROStage
from tests.zero.layers import Replica, replicas
from tests.zero.replicas import engines, on_all, outcomes, whole_values

T = TypeVar("T")


class RecordingBridge(LoopBridge):
    """Remembers which units were gathered, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[str] = []

    def start(self, make: Callable[[], Coroutine[Any, Any, T]]) -> PendingResult[T]:
        self.gathered.append(make.args[0].name.removeprefix("layer "))  # type: ignore[attr-defined]
        return super().start(make)


async def run_steps(made: Sequence[Replica], *steps: int) -> list[bytes]:
    """Take ``steps`` and return the outputs of all ranks."""
    outputs: list[bytes] = []
    for step in steps:
        outputs += [y.tobytes() for y in await on_all(made, partial(Replica.run, step=step))]
    return outputs


async def train(size: int, stage: ZeROStage, **settings: Any) -> tuple[list[bytes], dict[str, bytes]]:
    """Return the outputs and values of three steps."""
    async with replicas(size, stage, **settings) as made:
        outputs = await run_steps(made, 0, 1, 2)
        values = await on_all([replica.engine for replica in made], whole_values)
        return outputs, {name: v.tobytes() for name, v in values[0].items()}


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_sharded_layers_compute_the_bits_of_whole_ones(size: int, depth: int) -> None:
    whole = await train(size, ZeROStage.STAGE2, overlap_comm=False)
    assert await train(size, ZeROStage.STAGE3, prefetch_depth=depth, bucket_size_mb=1e-5) == whole


async def test_values_are_there_only_while_their_layer_computes() -> None:
    seen: list[list[str]] = []

    class Watching(Linear):
        everything: Sequence[Parameter] = ()

        def forward(self, x: Array) -> tuple[Array, Array]:
            seen.append([parameter.name for parameter in self.everything if not parameter.is_released])
            return super().forward(x)

    def make() -> list[Stage[Any]]:
        initializer = Initializer.from_seed(0)
        made = [Watching(name, 6, 6, initializer=initializer) for name in ("a", "b", "c")]
        everything = [parameter for layer in made for parameter in layer.parameters()]
        for layer in made:
            layer.everything = everything
        return list(made)

    async with replicas(1, make=make) as (replica,):
        await replica.run(0)
        assert seen == [["a/weight", "a/bias"], ["b/weight", "b/bias"], ["c/weight", "c/bias"]]
        assert all(parameter.is_released for parameter in replica.engine.parameters)
        with pytest.raises(UsageError, match="parameter a/weight: its value is released; gather it"):
            _ = replica.engine.parameters[0].value


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0, "0 1 2 3 4 5 5 4 3 2 1 0"),
        (1, "0 1 2 3 4 5 5 4 3 2 1 0"),
        (2, "0 1 2 3 4 5 5 4 3 2 1 0"),
    ],
)
async def test_every_layer_is_gathered_once_a_pass_backwards_in_reverse(depth: int, expected: str) -> None:
    bridges: list[RecordingBridge] = []

    def make_bridge() -> LoopBridge:
        bridges.append(RecordingBridge())
        return bridges[-1]

    async with replicas(2, make_bridge=make_bridge, prefetch_depth=depth) as made:
        await on_all(made, lambda replica: replica.run(0))
    assert [" ".join(bridge.gathered) for bridge in bridges] == [expected, expected]


class Waiting(Linear):
    """Goes on with its forward pass when ``may_go_on`` is set."""

    may_go_on: threading.Event | None = None

    def forward(self, x: Array) -> tuple[Array, Array]:
        assert self.may_go_on is None or self.may_go_on.wait(10.0), "the next layer was not gathered meanwhile"
        return super().forward(x)


async def test_the_next_layer_is_gathered_while_this_one_computes() -> None:
    waiting: list[Waiting] = []

    def make() -> list[Stage[Any]]:
        initializer = Initializer.from_seed(0)
        waiting.append(Waiting("a", 6, 6, initializer=initializer))
        return [waiting[-1], Linear("b", 6, 6, initializer=initializer)]

    async with replicas(2, make=make, prefetch_depth=1) as made:
        for replica, layer in zip(made, waiting, strict=True):
            continue_once_gathered(replica, 1, layer)
        await on_all(made, lambda replica: replica.run(0))


def continue_once_gathered(replica: Replica, index: int, layer: Waiting) -> None:
    gatherer = replica.engine._recovery.gatherer  # noqa: SLF001  # the gatherer is made by prepare() and shown to nobody
    assert gatherer is not None
    unit, arrived = gatherer._units[index], threading.Event()  # noqa: SLF001  # tells a layer in the middle of its computation that the values of another have come
    gather = unit.gather

    async def notify() -> list[Array]:
        values = await gather()
        arrived.set()
        return values

    layer.may_go_on = arrived
    unit.gather = notify  # type: ignore[method-assign]


async def test_buckets_are_reduced_while_the_backward_pass_goes_on() -> None:
    waiting: list[Waiting] = []

    class WaitingBackward(Waiting):
        def forward(self, x: Array) -> tuple[Array, Array]:
            return Linear.forward(self, x)

        def input_gradient(self, dy: Array) -> Array:
            assert self.may_go_on is not None
            assert self.may_go_on.wait(10.0), "the bucket of the last layer was not reduced meanwhile"
            return super().input_gradient(dy)

    def make() -> list[Stage[Any]]:
        initializer = Initializer.from_seed(0)
        waiting.append(WaitingBackward("a", 6, 6, initializer=initializer))
        return [waiting[-1], Linear("b", 6, 6, initializer=initializer)]

    async with replicas(2, ZeROStage.STAGE2, make=make, bucket_size_mb=1e-5) as made:
        for replica, layer in zip(made, waiting, strict=True):
            share, is_reduced = replica.engine._means.shares[-1], threading.Event()  # noqa: SLF001  # tells a layer in the middle of its computation that a gradient has been reduced
            layer.may_go_on = is_reduced
            add = share.add_reduced

            def notify(part: slice, reduced: Array, add: Any = add, is_reduced: threading.Event = is_reduced) -> None:
                add(part, reduced)
                is_reduced.set()

            share.add_reduced = notify  # type: ignore[method-assign]
        await on_all(made, lambda replica: replica.run(0))


@pytest.mark.parametrize("overlaps", [True, False])
async def test_without_overlap_nothing_is_sent_before_the_end(overlaps: bool) -> None:
    async with replicas(2, ZeROStage.STAGE2, overlap_comm=overlaps) as made:
        await on_all(made, lambda replica: replica.worker.run(replica.compute, replica.draw_inputs(0)))
        # how many buckets were sent before reduce() is no statistic
        rounds = [replica.engine._reducer._round for replica in made]  # noqa: SLF001
        begun = [one and one.begun for one in rounds]
        assert begun == ([1, 1] if overlaps else [0, 0])
        await on_all(made, lambda replica: replica.engine.reduce())


async def test_prefetching_stays_within_the_memory_allowed() -> None:
    room = 1000
    settings: dict[str, Any] = {
        "bucket_size_mb": 1e-5,
        "reduce_bucket_size": 2,
        "prefetch_depth": 5,
        "pin_memory": False,
    }

    async def peak(most: float) -> int:
        async with replicas(2, max_memory_usage_mb=most, **settings) as made:
            await on_all(made, lambda replica: replica.run(0))
            return made[0].engine.memory_stats().transient_peak

    for _ in range(100):  # how far prefetching gets ahead depends on when threads run
        if await peak(1024) > room:
            break
    else:
        raise AssertionError(f"no run took more than {room} bytes, though there was room")
    assert max([await peak(room / 2**20) for _ in range(3)]) <= room


async def test_a_layer_that_does_not_fit_is_refused_on_all_ranks() -> None:
    async with replicas(2, bucket_size_mb=1e-5, max_memory_usage_mb=5e-4, is_prepared=False) as made:
        results = await on_all(made, refused)
        assert all("max_memory_usage_mb: expected room for" in text for text in results)
        assert all("(one/weight, one/bias)" in text for text in results)
        assert not any(parameter.is_released for replica in made for parameter in replica.engine.parameters)


async def refused(replica: Replica) -> str:
    with pytest.raises(MemoryExceeded) as refusal:
        await replica.engine.prepare()
    return str(refusal.value)


async def test_a_sharded_layer_on_the_loop_is_refused() -> None:
    async with replicas(2) as made:
        with pytest.raises(UsageError, match="must run in a compute thread"):
            made[0].model.forward(made[0].draw_inputs(0))


async def test_layers_that_share_a_parameter_share_it_while_it_is_there() -> None:
    def make() -> list[Stage[Any]]:
        first = Linear("a", 6, 6, initializer=Initializer.from_seed(0), has_bias=False)
        return [first, TiedLinear("tied", first.weight, reports=False)]

    results = []
    for stage in (ZeROStage.STAGE2, ZeROStage.STAGE3):
        async with replicas(2, stage, make=make) as made:
            await run_steps(made, 0, 1)
            values = await whole_values_of(made)
            results.append(values["a/weight"].tobytes())
            assert made[0].engine.memory_stats().gathered == 0
    assert results[0] == results[1]


async def whole_values_of(made: Sequence[Replica]) -> dict[str, Array]:
    return (await on_all([replica.engine for replica in made], whole_values))[0]


async def test_weight_gradients_may_come_later() -> None:
    def compute(replica: Replica) -> None:
        y, saved = replica.model.forward(replica.draw_inputs(0))
        _, deferred = replica.model.backward_input(saved, y / y.size)
        replica.model.backward_weight(deferred, replica.engine.ready)

    gradients = []
    for split in (False, True):
        async with replicas(2) as made:
            if split:
                await on_all(made, lambda replica: replica.worker.run(compute, replica))
            else:
                await on_all(made, lambda replica: replica.worker.run(replica.compute, replica.draw_inputs(0)))
            await on_all(made, lambda replica: replica.engine.reduce())
            gradients.append({name: g.tobytes() for name, g in made[0].engine.reduced().items()})
    assert gradients[0] == gradients[1]


async def test_values_gathered_too_early_are_out_of_date_after_a_step() -> None:
    """A forward pass that ends in the middle leaves values behind that were gathered for the next layer."""

    async def half_pass(replica: Replica) -> None:
        await replica.worker.run(replica.model.stages[0].forward, replica.draw_inputs(0))
        await replica.engine.reduce()
        for gradient in replica.engine.reduced().values():
            gradient += 1.0
        await replica.engine.step(0.5)
        replica.engine.zero_grad()

    outputs = []
    for depth in (0, 2):
        async with replicas(2, prefetch_depth=depth) as made:
            await on_all(made, half_pass)
            assert made[0].engine.memory_stats().gathered == 0
            outputs.append(await run_steps(made, 1))
    assert outputs[0] == outputs[1]


async def test_values_are_released_when_a_layer_fails() -> None:
    async with replicas(1) as (replica,):
        with pytest.raises(UsageError, match="expected an input of shape"):
            await replica.worker.run(replica.model.forward, np.zeros((2, 5), np.float32))
        assert all(parameter.is_released for parameter in replica.engine.parameters)
        await replica.run(0)


async def test_layers_are_sharded_before_the_first_step_and_from_stage_3_on() -> None:
    layer = Linear("a", 2, 2, initializer=Initializer.from_seed(0))
    async with engines(1, ZeROStage.STAGE3, is_prepared=False) as (engine,):
        with pytest.raises(UsageError, match="expected parameters of this engine, got another one, 'a/weight'"):
            engine.shard(layer)
        await engine.prepare()
        with pytest.raises(UsageError, match=r"shard: this must come before prepare\(\)"):
            engine.shard(layer)
    async with replicas(1, ZeROStage.STAGE1) as (replica,):
        assert not any(type(stage).__name__ == "ShardedStage" for stage in replica.model.stages)


async def test_only_stage_3_gathers_and_releases() -> None:
    async with engines(2, ZeROStage.STAGE2) as made:
        for act in (lambda engine: engine.gather(), _release):
            for engine in made:
                with pytest.raises(UsageError, match="expected stage 3, which shards parameters, got stage2"):
                    await act(engine)


async def _release(engine: ZeroEngine) -> None:
    engine.release()


async def test_some_parameters_may_be_gathered_by_name() -> None:
    async with engines(2, ZeROStage.STAGE3) as made:
        await on_all(made, lambda engine: engine.gather(["scale", "head"]))
        for engine in made:
            there = [parameter.name for parameter in engine.parameters if not parameter.is_released]
            assert there == ["scale", "head"]
        with pytest.raises(UsageError, match="names: expected parameters of this engine, got 'other'"):
            await made[0].gather(["other"])


async def test_replicas_that_gather_different_parameters_are_refused_on_all() -> None:
    async with engines(2, ZeROStage.STAGE3) as made:
        names = [["scale"], ["head"]]
        for result in await outcomes(made, lambda engine: engine.gather(names[engine.communicator.rank])):
            assert isinstance(result, UsageError)
        await on_all(made, ZeroEngine.gather)


async def test_parameters_that_do_not_fit_are_not_gathered() -> None:
    async with engines(2, ZeROStage.STAGE3, bucket_size_mb=1e-5, max_memory_usage_mb=0.0005) as made:
        for result in await outcomes(made, ZeroEngine.gather):
            assert isinstance(result, MemoryExceeded)
        await on_all(made, lambda engine: engine.gather(["layer/weight"]))


async def test_a_step_is_refused_while_parameters_are_gathered() -> None:
    async with engines(2, ZeROStage.STAGE3) as made:
        await on_all(made, ZeroEngine.gather)
        await on_all(made, ZeroEngine.reduce)
        for engine in made:
            with pytest.raises(UsageError, match=r"step: parameters are gathered, 'embedding' for one; release\(\)"):
                await engine.step(0.1)
            engine.release()
        await on_all(made, lambda engine: engine.step(0.1))


@pytest.mark.parametrize("size", [2, 3])
async def test_a_training_step_sends_one_and_a_half_times_what_an_all_reduce_sends(size: int) -> None:
    """Two gathers and a reduction, without padding where parameters can be divided."""

    def make() -> list[Stage[Any]]:
        initializer = Initializer.from_seed(0)
        return [Linear(name, 6, 6, initializer=initializer) for name in ("a", "b", "c")]

    async with replicas(size, make=make, algorithm="ring") as made:
        before = [replica.engine.communicator.traffic.payload_bytes for replica in made]
        await on_all(made, lambda replica: replica.run(0))
        whole = 4 * 3 * (36 + 6)
        agreed = (size - 1) * 4 * 8
        for replica, earlier in zip(made, before, strict=True):
            sent = replica.engine.communicator.traffic.payload_bytes - earlier - agreed
            assert sent == 3 * whole * (size - 1) // size
