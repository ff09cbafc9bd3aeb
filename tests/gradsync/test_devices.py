"""Gradients on devices: averaged by NCCL on streams of their own, all or nothing, with nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.core.config.names import Name
from asyncpar.errors import AsyncparError, NonFiniteValue, UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer
from asyncpar.gradsync.config import NonFinitePolicy
from asyncpar.gradsync.schemes.device import DeviceMean
from asyncpar.node import Node
from tests.backends.extras import need
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeCommunicator, FakeFabric
from tests.products import in_turn, sampled

SHAPES = ((3,), (4, 5), (), (0, 2), (1000,))


@dataclass
class Parameter:
    name: str
    grad: Any


def parameters_of(cluster: FakeCluster, rank: int, dtype: Any = np.float32, device: int = 0) -> list[Parameter]:
    """Return gradients that differ between ranks; the mean over two ranks is ``index + 1.5``."""
    return [
        Parameter(f"p{index}", FakeDeviceArray.of(cluster, np.full(shape, index + 1 + rank, dtype), device))
        for index, shape in enumerate(SHAPES)
    ]


@asynccontextmanager
async def synchronizers(size: int, **options: Any) -> AsyncIterator[tuple[FakeCluster, list[GradientSynchronizer]]]:
    cluster = FakeCluster()
    async with device_world(size, cluster=cluster) as nodes:
        made = [GradientSynchronizer.data_parallel(node.world, **options) for node in nodes]
        yield cluster, made
        for one in made:
            one.close()


async def on_all(count: int, call: Callable[[int], Any]) -> list[Any]:
    return list(await asyncio.gather(*(call(rank) for rank in range(count)), return_exceptions=True))


def settled(cluster: FakeCluster, parameters: Sequence[Parameter]) -> list[Any]:
    """Return the gradients as the caller's stream sees them: after what that waits for."""
    for parameter in parameters:
        assert cluster.synchronize(parameter.grad.stream)
    return [parameter.grad.get() for parameter in parameters]


class Model:
    def __init__(self, parameters: list[Parameter]) -> None:
        self._parameters = parameters

    def parameters(self) -> list[Parameter]:
        return self._parameters


@pytest.mark.parametrize(
    ("dtype", "size"), in_turn([np.float32, np.float64, np.float16, ml_dtypes.bfloat16], [2, 3, 1])
)
async def test_gradients_become_their_mean(dtype: Any, size: int) -> None:
    async with synchronizers(size) as (cluster, made):
        for _ in range(3):
            models = [Model(parameters_of(cluster, rank, dtype)) for rank in range(size)]
            outcomes = await on_all(size, lambda rank: made[rank].synchronize_gradients(models[rank]))  # noqa: B023
            assert not any(isinstance(one, BaseException) for one in outcomes), outcomes
            for model in models:
                for index, grad in enumerate(settled(cluster, model.parameters())):
                    assert (grad == np.asarray(index + 1 + (size - 1) / 2).astype(dtype)).all()
        assert made[0].get_sync_stats().total_sync_operations == 3


async def test_buckets_begin_while_other_gradients_are_computed_and_after_their_own() -> None:
    """Each gradient is written on its stream just before ``ready``, so a copy that did not wait would be too early."""
    bucketing = GradientBucketingConfig(bucket_size_mb=1e-6)
    async with synchronizers(2, bucketing=bucketing) as (cluster, made):
        under_way: list[int] = []

        async def step(rank: int) -> list[Any]:
            parameters = parameters_of(cluster, 0)
            stream = cluster.create_stream(0)
            source = parameters_of(cluster, rank)
            async with made[rank].step(parameters) as running:
                for parameter, final in reversed(list(zip(parameters, source, strict=True))):
                    parameter.grad.stream = stream
                    if final.grad.nbytes:
                        cluster.copy(parameter.grad.address, final.grad.address, final.grad.nbytes, stream)
                    running.ready(parameter.name)
                    for _ in range(300):
                        await asyncio.sleep(0)
                under_way.append(len(running.record.intervals))
            found = settled(cluster, parameters)
            cluster.destroy_stream(stream)
            return found

        for found in await on_all(2, step):
            assert not isinstance(found, BaseException), found
            for index, grad in enumerate(found):
                assert (grad == index + 1.5).all()
        assert all(count > 0 for count in under_way), "no bucket was reduced before the last gradient was final"


@pytest.mark.parametrize("codec", [None, "int8", "powersgd:1"])
async def test_a_stream_that_hangs_ends_the_step_on_all_ranks_in_time(codec: str | None) -> None:
    compression = GradientCompressionConfig(codec=Name(codec)) if codec else None
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        for node in nodes:
            node.world.timeout = 0.3
        made = [GradientSynchronizer.data_parallel(node.world, compression=compression) for node in nodes]
        models = [Model(parameters_of(cluster, rank)) for rank in range(2)]
        stuck = models[1].parameters()[0].grad
        stuck.stream = cluster.create_stream(0)
        cluster.longest_delay = 10**9
        cluster.copy(stuck.address, stuck.address, stuck.nbytes, stuck.stream)
        cluster.longest_delay = 1
        async with asyncio.timeout(30):
            outcomes = await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))
        assert all(isinstance(one, AsyncparError) for one in outcomes), outcomes
        cluster.end_waits(stuck.stream)
        assert cluster.synchronize(stuck.stream)
        cluster.destroy_stream(stuck.stream)
        stuck.stream = 1
        for node in nodes:
            node.world.timeout = 30.0
        outcomes = await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))
        assert not any(isinstance(one, BaseException) for one in outcomes), outcomes
        for model in models:
            settled(cluster, model.parameters())
        for one in made:
            one.close()


@pytest.mark.parametrize("codec", [None, "int8", "powersgd:1"])
async def test_streams_of_earlier_steps_may_be_gone_and_events_do_not_pile_up(codec: str | None) -> None:
    compression = GradientCompressionConfig(codec=Name(codec)) if codec else None
    async with synchronizers(2, compression=compression) as (cluster, made):
        events = 0
        for turn in range(4):
            models = [Model(parameters_of(cluster, rank)) for rank in range(2)]
            streams = [cluster.create_stream(0) for _ in models]
            for model, stream in zip(models, streams, strict=True):
                for parameter in model.parameters():
                    parameter.grad.stream = stream
            outcomes = await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))  # noqa: B023
            assert not any(isinstance(one, BaseException) for one in outcomes), outcomes
            assert settled(cluster, models[0].parameters())[0].size
            for stream in streams:
                assert cluster.synchronize(stream)
                cluster.destroy_stream(stream)
            if turn == 1:  # then buckets follow the order of gradients
                events = cluster.events
        assert cluster.events == events


@pytest.mark.parametrize("policy", [NonFinitePolicy.ABORT, NonFinitePolicy.SKIP_STEP])
@pytest.mark.parametrize("value", [np.nan, np.inf])
async def test_values_that_are_not_finite_are_named_and_nothing_is_written(
    policy: NonFinitePolicy, value: float
) -> None:
    async with synchronizers(2, when_not_finite=policy) as (cluster, made):
        models = [Model(parameters_of(cluster, rank)) for rank in range(2)]
        bad = np.full((4, 5), 1, np.float32)
        bad[2, 2] = value
        models[1].parameters()[1].grad.set(bad)
        outcomes = await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))
        for outcome in outcomes:
            if policy is NonFinitePolicy.ABORT:
                assert isinstance(outcome, NonFiniteValue)
                assert "rank 1" in str(outcome)
                assert "p1" in str(outcome)
            else:
                assert outcome.is_skipped
        assert (models[0].parameters()[0].grad.get() == 1).all()
        again = [Model(parameters_of(cluster, rank)) for rank in range(2)]
        outcomes = await on_all(2, lambda rank: made[rank].synchronize_gradients(again[rank]))
        assert not any(isinstance(one, BaseException) for one in outcomes), outcomes
        assert (settled(cluster, again[0].parameters())[0] == 1.5).all()


async def test_gradients_on_a_device_of_one_rank_and_on_the_host_of_another_are_refused_on_both() -> None:
    async with synchronizers(2) as (cluster, made):
        host = [Parameter(f"p{index}", np.full(shape, 1, np.float32)) for index, shape in enumerate(SHAPES)]
        models = [Model(parameters_of(cluster, 0)), Model(host)]
        outcomes = await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))
        assert all(isinstance(one, SettingsDiffer) for one in outcomes), outcomes
        assert all("cuda float32" in str(one) for one in outcomes)


async def test_gradients_of_one_rank_in_two_places_are_refused_and_the_others_told() -> None:
    async with synchronizers(2) as (cluster, made):
        mixed = parameters_of(cluster, 0)
        mixed[0].grad = np.ones(3, np.float32)
        models = [Model(parameters_of(cluster, 0)), Model(mixed)]
        outcomes = await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))
        assert isinstance(outcomes[1], UsageError)
        assert "expected all gradients of a rank in one place, got p0 on the host and p1 on cuda:0" in str(outcomes[1])
        assert isinstance(outcomes[0], AsyncparError)
        assert "in one place" in str(outcomes[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"bucketing": GradientBucketingConfig(gradient_as_bucket_view=True)},
            "gradient_as_bucket_view: expected False with",
        ),
        ({"when_not_finite": NonFinitePolicy.DROP}, "when_not_finite: expected abort or skip_step"),
    ],
)
async def test_settings_that_devices_do_not_have_are_refused(options: dict[str, Any], message: str) -> None:
    async with synchronizers(2, **options) as (cluster, made):
        models = [Model(parameters_of(cluster, rank)) for rank in range(2)]
        outcomes = await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))
        assert all(message in str(one) for one in outcomes), outcomes


CODECS = ("bf16", "fp16", "int8", "topk:0.3", "topk:0.3+int8", "powersgd:1")
SUMMED = ("bf16", "fp16")
"""Whose encoded forms NCCL adds, in an order of its own."""


def use_kernels(cluster: FakeCluster, library: str) -> None:
    """Let ``library`` compute with the arrays of ``cluster``."""
    if library == "none":
        cluster.kernels = None
    elif library == "torch":
        need("torch", 'pip install "asyncpar[torch]"')
        from tests.device.torch_kernels import TorchOnFake

        cluster.kernels = TorchOnFake(cluster)


async def steps_here_and_there(
    made: Sequence[GradientSynchronizer], cluster: FakeCluster, dtype: Any, **options: Any
) -> list[tuple[list[Any], list[Any]]]:
    """Take steps with equal gradients on devices and on the host; return what they became on each rank."""
    size = len(made)
    host = [
        GradientSynchronizer.data_parallel(one._groups.everyone, name="host", **options)  # noqa: SLF001  # the same ranks, beside the first
        for one in made
    ]
    found = []
    for turn in range(3):
        random = [np.random.default_rng([rank, turn]) for rank in range(size)]
        drawn = [[np.asarray(one.normal(size=shape), dtype) for shape in SHAPES] for one in random]
        there = [
            Model([Parameter(f"p{i}", FakeDeviceArray.of(cluster, grad)) for i, grad in enumerate(grads)])
            for grads in drawn
        ]
        here = [Model([Parameter(f"p{i}", grad.copy()) for i, grad in enumerate(grads)]) for grads in drawn]
        for side, models in ((made, there), (host, here)):
            outcomes = await on_all(size, lambda rank: side[rank].synchronize_gradients(models[rank]))  # noqa: B023
            assert not any(isinstance(one, BaseException) for one in outcomes), outcomes
        for device, numpy in zip(there, here, strict=True):
            found.append((settled(cluster, device.parameters()), [one.grad for one in numpy.parameters()]))
    for one, other in zip(made, host, strict=True):
        assert one.residuals().keys() == other.residuals().keys()
        found.append((list(one.residuals().values()), list(other.residuals().values())))
        other.close()
    return found


@pytest.mark.parametrize(("codec", "size", "library"), sampled(CODECS, [1, 2, 3], ["numpy", "torch", "none"]))
async def test_with_a_codec_gradients_and_residuals_have_the_bits_of_those_on_the_host(
    codec: str, size: int, library: str
) -> None:
    compression = GradientCompressionConfig(codec=Name(codec))
    bucketing = GradientBucketingConfig(bucket_size_mb=1e-3)
    async with synchronizers(size, compression=compression, bucketing=bucketing) as (cluster, made):
        use_kernels(cluster, library)
        found = await steps_here_and_there(made, cluster, np.float32, compression=compression, bucketing=bucketing)
        is_other_order = codec in SUMMED and size > 2 and library != "none"
        for there, here in found:
            for grad, other in zip(there, here, strict=True):
                if is_other_order:
                    np.testing.assert_allclose(grad, other, atol=0.05)
                else:
                    assert grad.tobytes() == other.tobytes()
        if is_other_order:
            for (there, _), (others, _) in zip(found[0:9:3], found[1:9:3], strict=True):
                assert all(one.tobytes() == other.tobytes() for one, other in zip(there, others, strict=True))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
async def test_gradients_of_other_dtypes_are_encoded_as_those_on_the_host(dtype: Any) -> None:
    compression = GradientCompressionConfig(codec="int8")
    async with synchronizers(3, compression=compression) as (cluster, made):
        for there, here in await steps_here_and_there(made, cluster, dtype, compression=compression):
            assert [one.tobytes() for one in there] == [one.tobytes() for one in here]


@pytest.mark.parametrize(("codec", "size", "share"), [("int8", 2, 0.27), ("topk:0.01", 2, 0.02), ("int8", 3, 0.27)])
async def test_what_crosses_to_other_ranks_is_encoded_and_to_the_host_a_few_bytes(
    codec: str, size: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compression = GradientCompressionConfig(codec=Name(codec))
    crossed: list[int] = []
    for name in ("send", "all_gather"):
        whole = getattr(FakeCommunicator, name)

        def counted(self: Any, pointer: int, *arguments: Any, whole: Any = whole, name: str = name) -> Any:
            crossed.append(arguments[0] if name == "send" else arguments[1])
            return whole(self, pointer, *arguments)

        monkeypatch.setattr(FakeCommunicator, name, counted)
    async with synchronizers(size, compression=compression) as (cluster, made):
        count = 100_000
        arrays = [FakeDeviceArray.of(cluster, np.random.default_rng(rank).normal(size=count)) for rank in range(size)]
        models = [Model([Parameter("p", FakeDeviceArray.of(cluster, one.get().astype(np.float32)))]) for one in arrays]
        outcomes = await on_all(size, lambda rank: made[rank].synchronize_gradients(models[rank]))
        assert not any(isinstance(one, BaseException) for one in outcomes), outcomes
        assert 0 < sum(crossed) < share * 4 * count * size
        assert sum(cluster.bytes_on(-1)) < 100
        assert f"gradients of device arrays  {codec}, encoded on the device by tests" in (
            made[0]._groups.everyone.algorithm_table()  # noqa: SLF001  # its communicator
        )


@pytest.mark.parametrize(
    ("codec", "options", "reason"),
    [
        ("powersgd:2", {}, "tests has no powersgd:2 on devices"),
        ("int8", {"when_not_finite": NonFinitePolicy.DROP}, "devices have no policy drop"),
    ],
)
async def test_codecs_that_devices_do_not_have_are_staged_and_the_table_and_the_log_say_why(
    codec: str, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with synchronizers(2, compression=GradientCompressionConfig(codec=Name(codec)), **options) as (cluster, made):
        for _ in range(2):
            models = [Model(parameters_of(cluster, rank)) for rank in range(2)]
            await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))  # noqa: B023
            for model in models:
                settled(cluster, model.parameters())
        table = made[0]._groups.everyone.algorithm_table()  # noqa: SLF001  # its communicator
        assert f"gradients of device arrays  {codec}, staged: {reason}" in table
        messages = [record.getMessage() for record in caplog.records]
        assert messages == [f"gradients: through pinned memory of the host, where {codec} works, because {reason}"] * 2


async def test_residuals_on_devices_are_saved_and_taken_up_again() -> None:
    compression = GradientCompressionConfig(codec=Name("topk:0.3"))

    def drawn(cluster: FakeCluster, rank: int, turn: int) -> Model:
        random = np.random.default_rng([rank, turn])
        return Model(
            [
                Parameter(f"p{i}", FakeDeviceArray.of(cluster, np.asarray(random.normal(size=shape), np.float32)))
                for i, shape in enumerate(SHAPES)
            ]
        )

    async with synchronizers(2, compression=compression) as (cluster, made):
        begun = [drawn(cluster, rank, 0) for rank in range(2)]
        await on_all(2, lambda rank: made[rank].synchronize_gradients(begun[rank]))
        states = [one.state() for one in made]
        norm = made[0].get_sync_stats().residual_norm
        assert norm > 0
        models = [drawn(cluster, rank, 1) for rank in range(2)]
        await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))
        for one, state in zip(made, states, strict=True):
            one.clear_buffers()
            one.restore(state)
        again = [drawn(cluster, rank, 1) for rank in range(2)]
        await on_all(2, lambda rank: made[rank].synchronize_gradients(again[rank]))
        for first, second in zip(models, again, strict=True):
            for one, other in zip(
                settled(cluster, first.parameters()), settled(cluster, second.parameters()), strict=True
            ):
                assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk:0.5"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
async def test_encoded_gradients_that_are_not_finite_are_named_and_nothing_is_written(
    codec: str, size: int, value: float
) -> None:
    async with synchronizers(size, compression=GradientCompressionConfig(codec=Name(codec))) as (cluster, made):
        models = [Model(parameters_of(cluster, rank)) for rank in range(size)]
        bad = np.full((4, 5), 1, np.float32)
        bad[2, 2] = value
        models[1].parameters()[1].grad.set(bad)
        for outcome in await on_all(size, lambda rank: made[rank].synchronize_gradients(models[rank])):
            assert isinstance(outcome, NonFiniteValue)
            assert "rank 1" in str(outcome)
            assert "p1" in str(outcome)
        assert (models[0].parameters()[0].grad.get() == 1).all()


async def test_buckets_follow_gradients_to_another_device() -> None:
    cluster = FakeCluster()
    fabrics = [FakeFabric(cluster, visible=[2 * rank, 2 * rank + 1]) for rank in range(2)]
    async with device_world(2, cluster=cluster, fabrics=fabrics) as nodes:
        made = [GradientSynchronizer.data_parallel(node.world) for node in nodes]
        for device in (0, 1):
            models = [Model(parameters_of(cluster, rank, device=device)) for rank in range(2)]
            outcomes = await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))  # noqa: B023
            assert not any(isinstance(one, BaseException) for one in outcomes), outcomes
            for model in models:
                assert (settled(cluster, model.parameters())[0] == 1.5).all()
            layout = made[0]._layouts.layout  # noqa: SLF001  # where buckets are is seen from outside by their speed only
            assert layout is not None
            for scheme in layout.schemes:
                assert isinstance(scheme, DeviceMean)
                assert scheme.memory.place.device == device
        for one in made:
            one.close()


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("seed", range(3))
async def test_micro_steps_on_devices_count_like_those_of_the_host(seed: int, codec: str | None) -> None:
    compression = GradientCompressionConfig(codec=Name(codec)) if codec else None
    cluster = FakeCluster(seed=seed, longest_delay=30)
    async with device_world(2, cluster=cluster) as nodes:
        make = GradientSynchronizer.data_parallel
        there = [make(node.world, compression=compression, name="there") for node in nodes]
        here = [make(node.world, compression=compression, name="here") for node in nodes]

        def drawn(rank: int, micro: int) -> list[np.ndarray[Any, Any]]:
            random = np.random.default_rng([seed, rank, micro])
            return [random.normal(size=shape).astype(np.float32) for shape in SHAPES]

        async def step(rank: int) -> tuple[list[Any], list[Any]]:
            held = [Parameter(f"p{i}", FakeDeviceArray.of(cluster, x)) for i, x in enumerate(drawn(rank, 0))]
            host = [Parameter(f"p{i}", x) for i, x in enumerate(drawn(rank, 0))]
            for micro in range(1, 4):
                there[rank].accumulate(Model(held))
                here[rank].accumulate(Model(host))
                for one, other, x in zip(held, host, drawn(rank, micro), strict=True):
                    assert cluster.synchronize(one.grad.stream)
                    assert not one.grad.get().any(), "it is zero for the next micro-step"
                    one.grad.set(x)
                    other.grad[...] = x
            await there[rank].synchronize_gradients(Model(held))
            await here[rank].synchronize_gradients(Model(host))
            return settled(cluster, held), [one.grad for one in host]

        for _ in range(2):
            for found, wanted in await asyncio.gather(*map(step, range(2))):
                for one, other in zip(found, wanted, strict=True):
                    np.testing.assert_array_equal(one, other)
        for synchronizer in (*there, *here):
            assert synchronizer.get_memory_usage().accumulation == 0
            synchronizer.close()


async def test_micro_steps_that_cannot_be_added_up_are_refused_with_what_to_do() -> None:
    async with synchronizers(2, compression=GradientCompressionConfig(codec="powersgd:2")) as (cluster, made):
        models = [Model(parameters_of(cluster, rank)) for rank in range(2)]
        made[0].accumulate(models[0])
        other = cluster.create_stream(0)
        models[0].parameters()[0].grad.stream = other
        with pytest.raises(UsageError, match="as in earlier micro-steps"):
            made[0].accumulate(models[0])
        models[0].parameters()[0].grad.stream = 1
        made[1].accumulate(models[1])
        outcomes = await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))
        for one in outcomes:
            assert isinstance(one, UsageError | SettingsDiffer), one
            assert "let their library add them up" in str(one)
        cluster.destroy_stream(other)
        cluster.kernels = None
        with pytest.raises(UsageError, match="let their library do that"):
            GradientSynchronizer.accumulate(made[0], Model(parameters_of(cluster, 0)))


async def test_ranks_without_nccl_refuse_gradients_on_devices() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster, fabrics=[None, None]) as nodes:
        made = [GradientSynchronizer.data_parallel(node.world) for node in nodes]
        models = [Model(parameters_of(cluster, rank)) for rank in range(2)]
        outcomes = await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))
        assert all(
            "gradients on devices need NCCL on every rank; here there is no driver" in str(one) for one in outcomes
        )


async def test_a_step_that_is_cancelled_writes_nothing_and_the_next_one_works() -> None:
    async with synchronizers(2) as (cluster, made):
        models = [Model(parameters_of(cluster, rank)) for rank in range(2)]
        first = asyncio.create_task(made[0].synchronize_gradients(models[0]))
        for _ in range(20):
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(AsyncparError):
            await made[1].synchronize_gradients(models[1])
        assert [model.parameters()[0].grad.get().tolist() for model in models] == [[1.0] * 3, [2.0] * 3]
        outcomes = await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))
        assert not any(isinstance(one, BaseException) for one in outcomes), outcomes
        assert (settled(cluster, models[1].parameters())[4] == 5.5).all()


async def test_closing_frees_streams_events_and_memory() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        models = [Model(parameters_of(cluster, rank)) for rank in range(2)]
        before = cluster.allocations
        made = [GradientSynchronizer.data_parallel(node.world) for node in nodes]
        await on_all(2, lambda rank: made[rank].synchronize_gradients(models[rank]))
        assert cluster.allocations > before
        for one in made:
            one.close()
            one.close()
        assert cluster.allocations == before
        assert isinstance(nodes[0], Node)
