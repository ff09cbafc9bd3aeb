"""Every operation takes arrays of other libraries, computes what it does for numpy's, and returns their kind."""

from __future__ import annotations

import array
import asyncio
import ctypes
import mmap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import asyncpar as ap
from asyncpar.blocking import Node
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.testing.blocking_world import blocking_world, run_ranks
from asyncpar.testing.world import local_world
from tests.backends.extras import need

SIZE = 2
LENGTH = 4
SINGLE = np.dtype(np.float32)


class Library(NamedTuple):
    """Arrays of one kind: made of numpy's, and read back; ``changes`` means that operations in place write into it."""

    make: Callable[[np.ndarray, Path], Any]
    changes: bool
    needs: tuple[str, ...] = ()
    dtype: np.dtype[Any] = SINGLE


def _torch(x: np.ndarray, _: Path) -> Any:
    import torch

    return torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16 if x.dtype == ml_dtypes.bfloat16 else torch.float32)


def _jax(x: np.ndarray, _: Path) -> Any:
    import jax

    return jax.numpy.asarray(x)


def _memmap(x: np.ndarray, folder: Path, mode: Any = "w+") -> Any:
    path = folder / f"{len(list(folder.iterdir()))}"
    x.tofile(path)
    return np.memmap(path, x.dtype, "r+" if mode == "w+" else mode, shape=x.shape)


def _pandas(x: np.ndarray, _: Path, dtype: Any = None) -> Any:
    import pandas as pd

    return pd.Series(x, index=[f"row {number}" for number in range(len(x))], name="column", dtype=dtype)


def _polars(x: np.ndarray, _: Path) -> Any:
    import polars as pl

    return pl.Series("column", x)


def _arrow(x: np.ndarray, _: Path, *, chunks: bool = False) -> Any:
    import pyarrow as pa

    return pa.chunked_array([x[:1], x[1:]]) if chunks else pa.array(x)


def _strided(x: np.ndarray, _: Path) -> Any:
    wide = np.zeros(2 * len(x), x.dtype)
    wide[::2] = x
    return wide.data[::2]


LIBRARIES = {
    "torch": Library(_torch, True, ("torch",)),
    "torch bfloat16": Library(_torch, True, ("torch",), np.dtype(ml_dtypes.bfloat16)),
    "jax": Library(_jax, False, ("jax",)),
    "jax bfloat16": Library(_jax, False, ("jax",), np.dtype(ml_dtypes.bfloat16)),
    "pandas": Library(_pandas, False, ("pandas",)),
    "pandas Int32": Library(lambda x, p: _pandas(x, p, "Int32"), False, ("pandas",), np.dtype(np.int32)),
    "pandas of Arrow": Library(
        lambda x, p: _pandas(x, p, "int64[pyarrow]"), False, ("pandas", "pyarrow"), np.dtype(np.int64)
    ),
    "polars": Library(_polars, False, ("polars",)),
    "Arrow": Library(_arrow, False, ("pyarrow",)),
    "Arrow chunks": Library(lambda x, p: _arrow(x, p, chunks=True), False, ("pyarrow",)),
    "memmap": Library(_memmap, True),
    "memmap that is read": Library(lambda x, p: _memmap(x, p, "r"), False),
    "array.array": Library(lambda x, _: array.array("f", x), True),
    "memoryview": Library(lambda x, _: x.copy().data, True),
    "memoryview with strides": Library(_strided, True),
    "memoryview that is read": Library(lambda x, _: memoryview(x.tobytes()).cast("f"), False),
    "bytearray": Library(lambda x, _: bytearray(x.tobytes()), True, (), np.dtype(np.uint8)),
    "bytes": Library(lambda x, _: x.tobytes(), False, (), np.dtype(np.uint8)),
}

Made = Callable[[np.ndarray], Any]
OPERATIONS: dict[str, Callable[[Communicator, Any, Made], Awaitable[Any]]] = {
    "all_reduce": lambda c, x, _: c.all_reduce(x),
    "all_reduce max": lambda c, x, _: c.all_reduce(x, "max", key="a key"),
    "all_reduce_many": lambda c, x, _: c.all_reduce_many([x]),
    "reduce": lambda c, x, _: c.reduce(x, root=1),
    "reduce_scatter": lambda c, x, _: c.reduce_scatter(x),
    "all_gather": lambda c, x, _: c.all_gather(x),
    "all_gather_v": lambda c, x, _: c.all_gather_v(x[: LENGTH - c.rank]),
    "gather": lambda c, x, _: c.gather(x, root=1),
    "scatter": lambda c, x, make: c.scatter(
        x[:SIZE] if c.rank == 0 else None, out=make(np.zeros(())) if c.rank else None
    ),
    "broadcast": lambda c, x, _: c.broadcast(x, root=1),
    "all_to_all": lambda c, x, _: c.all_to_all(x[:SIZE]),
    "all_to_all_v": lambda c, x, _: c.all_to_all_v(x, [1, LENGTH - 1]),
}
IN_PLACE = ("all_reduce", "all_reduce max", "all_reduce_many", "broadcast")


def kind_of_rows(x: Any) -> str:
    """Return what has a result of two dimensions for an array like ``x``: its library, or the type for a buffer."""
    top = type(x).__module__.partition(".")[0]
    return "memoryview" if top in ("array", "builtins") else top


def values(result: Any) -> Any:
    """Return a result as plain lists: of its values, and of what comes with them."""
    if isinstance(result, tuple | list):
        return [values(part) for part in result]
    if result is None or isinstance(result, int):
        return result
    if isinstance(result, bytes | bytearray):
        return list(result)
    if type(result).__module__.startswith("torch"):
        return result.double().tolist()
    if hasattr(result, "to_pylist"):
        return result.to_pylist()
    if hasattr(result, "to_list"):
        return [list(row) if hasattr(row, "__len__") else row for row in result.to_list()]
    return np.asarray(result).tolist()


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    found = LIBRARIES[request.param]
    for module in found.needs:
        need(module, f"pip install {module}")
    return found


async def on_both(run: Callable[[Communicator], Awaitable[Any]], transport: str = "inproc") -> list[Any]:
    async with local_world(SIZE, transport=transport) as nodes, asyncio.timeout(60):
        return await asyncio.gather(*(run(node.world) for node in nodes))


def content(rank: int, dtype: np.dtype[Any]) -> np.ndarray:
    return (np.arange(LENGTH) + 1 + 4 * rank).astype(dtype)


@pytest.mark.parametrize("transport", ["inproc", "shm"])
async def test_every_operation_computes_what_it_does_for_numpy(
    library: Library, transport: str, tmp_path: Path
) -> None:
    def make(x: np.ndarray) -> Any:
        return library.make(x.astype(library.dtype), tmp_path)

    async def run(communicator: Communicator) -> None:
        rank = communicator.rank
        for name, operation in OPERATIONS.items():
            if name == "scatter" and library.needs[:1] != ("torch",):
                continue  # an array without dimensions is none of the others
            x, expected = make(content(rank, library.dtype)), content(rank, library.dtype)
            wanted = await operation(communicator, expected, lambda x: x.astype(library.dtype))
            found = await operation(communicator, x, make)
            assert values(found) == values(wanted), name
            if name in IN_PLACE:
                last = found[0] if isinstance(found, list) else found
                assert (last is x) == library.changes, name
                assert values(x) == values(expected if library.changes else content(rank, library.dtype)), name
            if name == "all_gather":
                assert kind_of_rows(x) in (type(found).__module__.partition(".")[0], type(found).__name__), name
            if name in (*IN_PLACE, "all_gather_v", "all_to_all", "reduce_scatter") and not isinstance(found, list):
                assert type(found) is type(x) or isinstance(x, np.memmap), name

    await on_both(run, transport)


async def test_an_out_of_any_kind_receives_the_result_and_is_returned(library: Library, tmp_path: Path) -> None:
    async def run(communicator: Communicator) -> None:
        x, out = (library.make(content(communicator.rank, library.dtype), tmp_path) for _ in range(2))
        if not library.changes:
            with pytest.raises(UsageError, match=r"^out: expected an array that can be written, got a read-only one"):
                await communicator.all_reduce(x, out=out)
            with pytest.raises(UsageError, match=r"^out: expected an array that can be written, got a read-only one"):
                await communicator.recv(1 - communicator.rank, out=out)
            with pytest.raises(PeerCancelled, match="read-only"):
                await communicator.send(x, 1 - communicator.rank)
            out = np.zeros(LENGTH, library.dtype)
        assert await communicator.all_reduce(x, out=out) is out
        if library.changes:
            copy = library.make(content(communicator.rank, library.dtype), tmp_path)
            assert await communicator.all_reduce(copy, out=copy) is copy
            assert values(copy) == values(out)
        assert values(out) == values(content(0, library.dtype) + content(1, library.dtype))
        assert values(x) == values(content(communicator.rank, library.dtype))
        if communicator.rank == 0:
            await communicator.send(x, 1)
        else:
            assert await communicator.recv(0, out=out) is out
            assert values(out) == values(content(0, library.dtype))

    await on_both(run)


async def test_whatever_has_a_buffer_is_an_array() -> None:
    async def run(communicator: Communicator) -> None:
        numbers = (ctypes.c_float * 2)(1.0, 2.0)
        assert await communicator.all_reduce(numbers) is numbers
        assert list(numbers) == [2.0, 4.0]
        with mmap.mmap(-1, 3) as shared:
            shared[:] = b"abc" if communicator.rank else bytes(3)
            assert await communicator.broadcast(shared, root=1) is shared
            assert shared[:] == b"abc"

    await on_both(run)


async def test_ranks_may_pass_arrays_of_different_libraries() -> None:
    async def run(communicator: Communicator) -> Any:
        x = np.ones(3) if communicator.rank else array.array("d", [1.0, 2.0, 3.0])
        return await communicator.all_reduce(x)

    first, second = await on_both(run)
    assert (first, second.tolist()) == (array.array("d", [2.0, 3.0, 4.0]), [2.0, 3.0, 4.0])


async def test_many_of_several_kinds_are_reduced_together(tmp_path: Path) -> None:
    async def run(communicator: Communicator) -> list[Any]:
        mixed = [np.ones(2), array.array("d", [1.0]), memoryview(bytes([1, 2])), _memmap(np.ones(3), tmp_path)]
        results: list[Any] = await communicator.all_reduce_many(mixed)
        assert [result is one for result, one in zip(results, mixed, strict=True)] == [True, True, False, True]
        return results

    for results in await on_both(run):
        assert values(results) == [[2.0, 2.0], [2.0], [2, 4], [2.0] * 3]


async def test_late_ranks_and_parts_know_them_too() -> None:
    async def run(communicator: Communicator) -> None:
        x = array.array("d", [1.0, 2.0])
        reduced = await communicator.all_reduce(x, until=ap.Quorum(1.0))
        result: Any = reduced.values
        assert result is x
        assert x.tolist() == [2.0, 4.0]
        found = [part.tolist() async for _, part in communicator.all_reduce.parts(x)]
        assert found == [[4.0, 8.0]]
        assert x.tolist() == [4.0, 8.0]

    await on_both(run)


async def test_the_labels_of_a_column_stay_where_elements_keep_their_places() -> None:
    need("pandas", "pip install pandas")
    import pandas as pd

    async def run(communicator: Communicator) -> None:
        x = pd.Series([1.0, 2.0], index=["a", "b"], name="loss")
        found = await communicator.all_reduce(x, "mean")
        pd.testing.assert_series_equal(found, x)
        pd.testing.assert_series_equal(
            await communicator.all_to_all(x), pd.Series([1.0, 1.0], name="loss") * (communicator.rank + 1)
        )
        pd.testing.assert_frame_equal(await communicator.all_gather(x), pd.DataFrame([[1.0, 2.0]] * 2))

    await on_both(run)


def _missing(library: str) -> Any:
    match library:
        case "pandas":
            import pandas as pd

            return pd.Series([1, None], dtype="Int64")
        case "polars":
            import polars as pl

            return pl.Series([1, None])
        case _:
            import pyarrow as pa

            return pa.array([1, None])


def _with_gradient() -> Any:
    import torch

    return torch.ones(2, requires_grad=True)


def _sparse() -> Any:
    import torch

    return torch.eye(2).to_sparse()


def _words(library: str) -> Any:
    import polars as pl

    return pl.Series(["a", "b"])


REFUSED = {
    "a gradient": ("torch", _with_gradient, r"x: expected a tensor outside of autograd.*pass x\.detach\(\)"),
    "sparse": ("torch", _sparse, r"x: torch Tensor does not hand out its memory: "),
    "pandas": ("pandas", lambda: _missing("pandas"), r"without missing values, got one with 1; pass x\.fillna"),
    "polars": ("polars", lambda: _missing("polars"), r"without missing values, got one with 1; pass x\.fill_null"),
    "pyarrow": ("pyarrow", lambda: _missing("pyarrow"), r"without missing values, got one with 1; pass x\.fill_null"),
    "words": ("polars", lambda: _words("polars"), r"x: expected a numeric dtype in native byte order"),
    "another byte order": ("array", lambda: np.ones(2, ">f4").data, r"x: expected a numeric dtype in native"),
    "characters": ("array", lambda: memoryview(b"ab").cast("c"), r"x: expected a numeric dtype in native byte order"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_no_plain_array_is_refused_in_words_on_all_ranks(name: str) -> None:
    module, make, message = REFUSED[name]
    need(module, f"pip install {module}")

    async def run(communicator: Communicator) -> None:
        for operation in ("all_reduce", "all_gather", "broadcast", "all_reduce_many"):
            x = make() if communicator.rank else np.ones(2, np.float32)
            if operation == "all_reduce_many":
                x = [x]
            pattern = message.replace("x: ", r"(x|arrays\[0\]): ").replace(r"x\.", r".*\.")
            error, text = (UsageError, pattern) if communicator.rank else (PeerCancelled, "rank 1")
            with pytest.raises(error, match=text):
                await getattr(communicator, operation)(x)
        assert (await communicator.all_reduce(np.ones(1)))[0] == SIZE, "the group is as good as before"

    await on_both(run)


async def test_a_tensor_that_requires_grad_is_taken_without_autograd() -> None:
    need("torch", "pip install torch==2.13.0")
    import torch

    async def run(communicator: Communicator) -> None:
        x = torch.ones(2, requires_grad=True)
        assert await communicator.all_reduce(x) is x
        assert x.tolist() == [2.0, 2.0]

    with torch.no_grad():  # around both ranks: it belongs to their thread
        await on_both(run)
    assert torch.is_grad_enabled()


async def test_a_call_that_is_forgotten_or_cancelled_ends_on_the_other_rank() -> None:
    async def run(communicator: Communicator) -> None:
        x = array.array("d", [1.0])
        if communicator.rank:
            with pytest.raises(PeerCancelled, match="never awaited"):
                await communicator.all_reduce(x)
            with pytest.raises(PeerCancelled, match="cancelled"):
                await communicator.all_reduce(x)
        else:
            with pytest.warns(RuntimeWarning, match=r"Communicator\.all_reduce.*never awaited"):
                communicator.all_reduce(x)  # type: ignore[unused-coroutine]
            task = asyncio.ensure_future(communicator.all_reduce(x))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            communicator.all_reduce(x).close()
        if communicator.rank:
            with pytest.raises(PeerCancelled, match="never awaited"):
                await communicator.all_reduce(x)
        assert (await communicator.all_reduce(x))[0] == SIZE

    await on_both(run)


@pytest.mark.parametrize("transport", ["inproc", None])
def test_blocking_operations_take_them_too(transport: str | None) -> None:
    def work(node: Node) -> list[Any]:
        x = array.array("d", [1.0, 2.0])
        assert node.world.all_reduce(x) is x
        pending = node.world.start.all_gather(memoryview(x))
        return [x.tolist(), pending.wait().tolist()]

    with blocking_world(SIZE, transport=transport) as nodes:
        assert run_ranks(nodes, work) == [[[2.0, 4.0], [[2.0, 4.0]] * 2]] * 2
