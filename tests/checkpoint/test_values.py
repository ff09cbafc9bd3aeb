"""Plain dictionaries: saved by any number of ranks, loaded by any other, with what each rank has for itself."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import asyncpar as ap
import asyncpar.blocking
from asyncpar.checkpoint import PerRank, latest
from asyncpar.errors import AsyncparError, CheckpointError, PeerCancelled, UsageError
from asyncpar.gradsync import GradientCompressionConfig, GradientSynchronizer
from asyncpar.nn import Initializer, Linear
from asyncpar.node import Node
from asyncpar.parallel.local import DiLoCo
from asyncpar.testing.blocking_world import blocking_world, run_ranks
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.checkpoint.worlds import each, each_fails
from tests.soak import chosen


def assert_equal(got: Any, expected: Any) -> None:
    """Assert that both are the same, in types and bits."""
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_equal(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, np.ndarray | np.generic):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(got)
    else:
        assert got == expected


def values(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "w": random.normal(size=(600, 500)).astype(np.float32),
        "layer": {"b": np.arange(5), "turned": np.arange(6.0).reshape(2, 3).T, "empty": {}, "none": None},
        "a/b": {"c~d": random.normal(size=3)},
        "a": {"b": {"c~d": np.float32(1.5)}},
        "history": [{"loss": 0.5, "at": (1, 2)}, np.zeros((0, 3)), float("nan"), -math.inf],
        "steps": 3,
        "half": np.ones(3, ml_dtypes.bfloat16),
        "scalar": np.array(4, np.int8),
        "words": ["a", ["b", []]],
        "big": 1 << 200,
    }


@pytest.mark.parametrize(("savers", "loaders"), [(1, 1), (3, 1), (1, 2), (4, 3), (2, 2)])
async def test_any_number_of_ranks_loads_what_any_other_saved(savers: int, loaders: int, place: Path) -> None:
    expected = values()
    async with local_world(savers) as nodes:
        saved = await each(nodes, lambda node: ap.checkpoint.save(place, values(), step=7, communicator=node.world))
    assert [one.step for one in saved] == [7] * savers
    async with local_world(loaders) as nodes:
        loaded = await each(nodes, lambda node: ap.checkpoint.load(place, communicator=node.world))
    for one in loaded:
        assert (one.step, one.path) == (7, saved[0].path)
        assert_equal(one.values, expected)


async def test_ranks_share_out_what_they_write(place: Path) -> None:
    whole = {"w": np.arange(1 << 20, dtype=np.float64), "v": np.ones(1 << 19)}
    async with local_world(4) as nodes:
        saved = await each(nodes, lambda node: ap.checkpoint.save(place, whole, step=0, communicator=node.world))
    total = sum(array.nbytes for array in whole.values())
    assert sum(one.nbytes for one in saved) < total + 50_000
    assert max(one.nbytes for one in saved) < total / 4 + 20_000


async def test_alone_without_a_communicator(place: Path) -> None:
    await ap.checkpoint.save(place, values(), step=0)
    await ap.checkpoint.save(place, values(1), step=1, keep=1)
    assert [path.name for path in sorted(place.glob("step_*"))] == ["step_000000001"]
    assert_equal((await ap.checkpoint.load(place)).values, values(1))
    with pytest.raises(CheckpointError, match="is there already"):
        await ap.checkpoint.save(place, values(), step=1)
    async with local_world(2) as nodes:
        for one in await each(nodes, lambda node: ap.checkpoint.load(place, communicator=node.world, step=1)):
            assert_equal(one.values, values(1))


async def test_a_snapshot_may_change_while_it_is_saved(place: Path) -> None:
    array = np.zeros(1000)
    saving = ap.checkpoint.save(place, {"w": array}, step=0, snapshot=True)
    array += 1
    await saving
    assert not (await ap.checkpoint.load(place)).values["w"].any()


# -- what each rank has for itself ------------------------------------------------------------------------------------


def own(rank: int) -> dict[str, Any]:
    return {
        "residual": np.full(3, rank + 1.0, np.float32),
        "order": np.arange(4, dtype=np.uint8),
        "picked": np.arange(rank + 1),
        "codec": "int8",
        "seed": rank,
        "half": np.full(2, rank, ml_dtypes.bfloat16),
    }


async def save_own(place: Path, size: int) -> None:
    async with local_world(size) as nodes:
        await each(
            nodes,
            lambda node: ap.checkpoint.save(
                place, {"w": np.ones(2), "own": PerRank(own(node.rank))}, step=1, communicator=node.world
            ),
        )


async def test_as_many_ranks_get_back_what_they_had(place: Path) -> None:
    await save_own(place, 3)
    async with local_world(3) as nodes:
        loaded = await each(nodes, lambda node: ap.checkpoint.load(place, communicator=node.world))
    for rank, one in enumerate(loaded):
        assert_equal(one.values["own"], own(rank))


async def test_another_number_of_ranks_gets_means_and_what_was_equal(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await save_own(place, 3)
    caplog.set_level(logging.WARNING, "asyncpar.checkpoint")
    async with local_world(2) as nodes:
        loaded = await each(nodes, lambda node: ap.checkpoint.load(place, communicator=node.world))
    expected = {
        "residual": np.full(3, 2.0, np.float32),
        "order": np.arange(4, dtype=np.uint8),
        "codec": "int8",
        "half": np.full(2, 1.0, ml_dtypes.bfloat16),
    }
    for one in loaded:
        assert_equal(one.values["own"], expected)
    assert [record.getMessage() for record in caplog.records] == [
        f"{loaded[0].path}: picked, seed of the 3 ranks that saved cannot be given to another number of ranks, and is "
        "left out"
    ]


@pytest.mark.parametrize("loaders", [2, 3])
async def test_residuals_survive_a_new_number_of_ranks(loaders: int, place: Path) -> None:
    compression = GradientCompressionConfig(codec="int4")

    async def train(node: Node) -> None:
        synchronizer = GradientSynchronizer.data_parallel(node.world, compression=compression)
        gradients = {"w": np.random.default_rng(node.rank).normal(size=64).astype(np.float32)}
        await synchronizer.synchronize_gradients(gradients)
        residuals.append(synchronizer.residuals()["w"])
        await ap.checkpoint.save(place, {"sync": PerRank(synchronizer.state())}, step=0, communicator=node.world)

    async def resume(node: Node) -> Any:
        synchronizer = GradientSynchronizer.data_parallel(node.world, compression=compression)
        loaded = await ap.checkpoint.load(place, communicator=node.world)
        synchronizer.restore(loaded.values["sync"])
        return synchronizer.residuals()["w"]

    residuals: list[Any] = []
    async with local_world(2) as nodes:
        await each(nodes, train)
    async with local_world(loaders) as nodes:
        resumed = await each(nodes, resume)
    np.testing.assert_allclose(np.mean(resumed, axis=0), np.mean(residuals, axis=0), atol=1e-6)
    assert np.abs(residuals).max() > 0


@pytest.mark.parametrize("loaders", [1, 2, 3])
async def test_diloco_goes_on_from_its_state(loaders: int, place: Path) -> None:
    def make(node: Node) -> tuple[Linear, DiLoCo]:
        layer = Linear("layer", 3, 2, initializer=Initializer.from_seed(1))
        compression = GradientCompressionConfig(codec="int8")
        synchronizer = GradientSynchronizer.data_parallel(node.world, compression=compression)
        return layer, DiLoCo(layer.parameters(), synchronizer, every=2)

    def plain(layer: Linear) -> dict[str, Any]:
        return {parameter.name: parameter.value for parameter in layer.parameters()}

    async def train(node: Node) -> dict[str, Any]:
        layer, outer = make(node)
        for _ in range(2):
            for parameter in layer.parameters():
                parameter.value[...] += node.rank + 1.0
            await outer.step()
        values = {"model": plain(layer), "outer": outer.state()}
        await ap.checkpoint.save(place, values, step=2, communicator=node.world)
        return {name: array.copy() for name, array in plain(layer).items()}

    async def resume(node: Node) -> tuple[dict[str, Any], int]:
        layer, outer = make(node)
        loaded = await ap.checkpoint.load(place, communicator=node.world)
        for name, array in plain(layer).items():
            array[...] = loaded.values["model"][name]
        outer.restore(loaded.values["outer"])
        found = {name: array.copy() for name, array in plain(layer).items()}
        for _ in range(2):
            await outer.step()
        return found, outer.rounds

    async with local_world(2) as nodes:
        trained = await each(nodes, train)
    async with local_world(loaders) as nodes:
        for found, rounds in await each(nodes, resume):
            assert rounds == 2
            assert_equal(found, trained[0])


# -- what is refused --------------------------------------------------------------------------------------------------


async def test_arrays_that_differ_name_tensor_and_ranks(place: Path) -> None:
    async with local_world(3) as nodes:
        errors = await each_fails(
            nodes,
            lambda node: ap.checkpoint.save(
                place, {"layer": {"w": np.full(3, node.rank // 2)}}, step=1, communicator=node.world
            ),
        )
    for error in errors:
        assert '"layer/w" (value): replicas have drifted: ranks 0, 1 and rank 2' in str(error)
        assert "PerRank" in str(error)
    assert latest(place) is None


@pytest.mark.parametrize("other", [{"lr": 0.5}, {"lr": 1}, {"lr": 1.0, "more": 1}, {"lr": np.float64(1.0)}])
async def test_plain_values_that_differ_name_the_place(other: dict[str, Any], place: Path) -> None:
    async with local_world(2) as nodes:
        errors = await each_fails(
            nodes,
            lambda node: ap.checkpoint.save(
                place, other if node.rank else {"lr": 1.0}, step=1, communicator=node.world
            ),
        )
    for error in errors:
        assert isinstance(error, AsyncparError)
        assert "rank 0" in str(error)
        assert "lr" in str(error) or "more" in str(error)


class _Matrix(np.ndarray[Any, Any]):
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "list": ([np.zeros(2)], 'values: expected a dict such as {"w": array}, got list'),
    "key": ({"a": {3: 1}}, "values['a']: expected texts as keys, got 3"),
    "complex": ({"a": np.zeros(2, complex)}, "values['a']: expected one of the dtypes"),
    "strings": ({"a": {"b": np.array(["x"])}}, "values['a']['b']: expected one of the dtypes"),
    "object": ({"a": [1, object()]}, "values['a'][1]: expected a dict, list or tuple, an array"),
    "set": ({"a": {1}}, "values['a']: expected a dict"),
    "subclass": ({"a": np.zeros(2).view(_Matrix)}, "values['a']: expected a dict, list or tuple, an array"),
    "nested marks": ({"a": PerRank({"b": PerRank(1)})}, "values: PerRank 0['b']: expected a dict"),
    "bytes": ({"a": b"x"}, "values['a']: expected a dict"),
    "long": ({"a" * 600: np.zeros(1)}, "expected keys of at most 512 characters together"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_would_not_come_back_is_refused_by_place_on_all_ranks(case: str, place: Path) -> None:
    wrong, reason = REFUSED[case]
    with pytest.raises(UsageError) as raised:
        await ap.checkpoint.save(place, wrong, step=1)
    assert reason in str(raised.value)
    async with local_world(2) as nodes:
        errors = await each_fails(
            nodes,
            lambda node: ap.checkpoint.save(place, wrong if node.rank else {}, step=1, communicator=node.world),
        )
        await each(nodes, lambda node: ap.checkpoint.save(place, {"w": 1}, step=2, communicator=node.world))
    assert reason in str(errors[0])


async def test_a_rank_that_is_cancelled_ends_the_save_on_all(place: Path) -> None:
    async with local_world(2) as nodes:
        saving = asyncio.ensure_future(ap.checkpoint.save(place, {"w": 1}, step=1, communicator=nodes[0].world))
        await asyncio.sleep(0)
        saving.cancel()
        with pytest.raises((PeerCancelled, CheckpointError)):
            await ap.checkpoint.save(place, {"w": 1}, step=1, communicator=nodes[1].world)


async def test_a_sharded_checkpoint_and_damage_are_refused(place: Path) -> None:
    await ap.checkpoint.save_checkpoint(place, step=1, pieces=[], model={"hidden": 3}, communicator=None)
    with pytest.raises(CheckpointError, match="this is a checkpoint of another model"):
        await ap.checkpoint.load(place)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        await ap.checkpoint.load(place / "nowhere")
    with pytest.raises(UsageError, match=r"asyncpar\.checkpoint\.blocking"):
        await ap.checkpoint.load(place, communicator=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [{"path": ["a"], "kind": "dict"}],
        [{"path": [], "kind": "dict"}, {"path": ["a"], "kind": "array", "dtype": "float99"}],
        [{"path": [], "kind": "list"}, {"path": [3], "kind": "plain"}],
        [{"path": [], "kind": "dict"}, {"path": ["a"], "kind": "rank", "value": 4}],
        [{"path": [], "kind": "dict"}, {"path": ["a"], "kind": "float", "value": "x"}],
    ],
)
async def test_descriptions_that_do_not_fit_are_damage(entries: Any, place: Path) -> None:
    extra = {"entries": entries, "of_rank": []}
    await ap.checkpoint.save_checkpoint(
        place, step=1, pieces=[], model={"values": "plain"}, communicator=None, extra=extra
    )
    with pytest.raises(CheckpointError, match=r"description is damaged|is unknown"):
        await ap.checkpoint.load(place)


# -- everything else --------------------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    arrays_of.arrays(
        st.sampled_from([np.dtype(name) for name in ("float32", "float64", "int16", "uint8", "bool")]),
        arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    st.floats(width=32).map(np.float32),
)
TREES = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.dictionaries(st.text(max_size=4), inner, max_size=3),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(max_examples=chosen(20, soak=300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES, step=st.integers(0, 10**12))
def test_whatever_is_saved_comes_back_as_it_was(tree: dict[str, Any], step: int, place: Path) -> None:
    async def main() -> None:
        saved = await ap.checkpoint.save(place, tree, step=step, keep=1)
        assert_equal((await ap.checkpoint.load(saved.path)).values, tree)

    for old in place.glob("step_*"):
        subprocess.run(["rm", "-r", str(old)], check=True)
    run_virtual(main())


def test_blocking_programs_save_and_load(place: Path) -> None:
    def main(node: asyncpar.blocking.Node) -> None:
        mine = {"w": np.ones(3), "own": PerRank(node.rank)}
        saved = ap.checkpoint.blocking.save(place, mine, step=4, communicator=node.world, timeout=30)
        assert saved.step == 4
        loaded = ap.checkpoint.blocking.load(place, communicator=node.world)
        assert_equal(loaded.values, {"w": np.ones(3), "own": node.rank})

    with blocking_world(2) as nodes:
        run_ranks(nodes, main)
    assert_equal(ap.checkpoint.blocking.load(place).values["w"], np.ones(3))
    with pytest.raises(UsageError, match="expected that of a blocking node"):
        ap.checkpoint.blocking.load(place, communicator=3)  # type: ignore[arg-type]


@pytest.mark.soak
@pytest.mark.process
def test_a_kill_amid_a_save_keeps_the_last_one(place: Path) -> None:
    folder, complete = place / "checkpoints", -1
    for seed in range(chosen(2, soak=100)):
        command = [sys.executable, "-W", "error", "-m", "tests.checkpoint.values_victim", str(folder), str(seed)]
        victim = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, check=False)
        assert victim.returncode == -signal.SIGKILL
        complete = max([complete, *map(int, victim.stdout.split())])
        last = latest(folder)
        assert last is not None
        assert complete <= last.step <= complete + 1
        complete = last.step
        loaded = asyncio.run(ap.checkpoint.load(folder))
        assert_equal(loaded.values, values(complete) | {"own": loaded.values["own"]})
