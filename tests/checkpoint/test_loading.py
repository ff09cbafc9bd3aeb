"""A missing checkpoint, another model, or other tensors are refused on every rank, with the reason."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.checkpoint import Wanted, latest, load_checkpoint
from asyncpar.core.config.slicing import TensorSlice
from asyncpar.errors import CheckpointError, PeerCancelled, UsageError
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.checkpoint.layouts import Layout, small_model
from tests.checkpoint.worlds import MODEL, assert_all_raise, each_fails, load_and_check, load_fails, loading, save

F32 = np.dtype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of step 1."""
    made = tmp_path_factory.mktemp("saved")
    run_virtual(save(made, small_model(), Layout(tp=2)))
    return made


async def loads_fail(folder: Path, wanted: Wanted, *, by: int = 1) -> list[BaseException]:
    """Want something on one of three ranks."""
    async with local_world(3) as nodes:
        return await each_fails(
            nodes,
            lambda node: load_checkpoint(
                folder, [wanted] if node.rank == by else [], model=MODEL, communicator=node.world
            ),
        )


def wanted(name: str, shape: tuple[int, ...], *, kind: str = "value", dtype: Any = F32) -> Wanted:
    size = int(np.prod(shape))
    return Wanted(name=name, kind=kind, slice=TensorSlice.whole(shape), flat=(0, size), dtype=dtype)


@pytest.mark.parametrize(
    ("tensor", "texts"),
    [
        (wanted("embeding", (11, 6)), ['tensor "embeding" (value) is not in this checkpoint; it has embedding']),
        (wanted("xyz", (1,)), ['tensor "xyz" (value) is not in this checkpoint, which has 6 others']),
        (wanted("bias", (7,), kind="second"), ['tensor "bias" (second) is not', "of that tensor it has value"]),
        (wanted("embedding", (12, 6)), ["shape: the checkpoint has (11, 6) (saved by rank 0), and (12, 6) is wanted"]),
        (wanted("embedding", (6, 11)), ["shape: the checkpoint has (11, 6)"]),
        (wanted("embedding", (11, 6), dtype=np.float64), ["dtype: the checkpoint has float32", "float64 is wanted"]),
        (wanted("bias", (7,), dtype=np.float16), ["dtype: the checkpoint has bfloat16"]),
    ],
)
def test_a_tensor_that_is_not_there_or_is_another_is_named_on_all_ranks(
    folder: Path, tensor: Wanted, texts: list[str]
) -> None:
    errors = run_virtual(loads_fail(folder, tensor))
    assert_all_raise(errors, *texts)
    assert ["rank 1 failed" in str(error) for error in errors] == [True, False, True]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"hidden": 7, "layers": 2}, "model.hidden is 6 for the checkpoint, and 7 for the one here"),
        ({"hidden": 6}, "model.layers is 2 for the checkpoint, and the one here has none"),
        ({"hidden": 6, "layers": 2, "heads": 1}, "model.heads is 1 for the one here, and the checkpoint has none"),
        ({"hidden": 6.0, "layers": 2}, "model.hidden is 6 for the checkpoint, and 6.0"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_naming_the_field(
    folder: Path, model: dict[str, Any], text: str
) -> None:
    assert_all_raise(run_virtual(load_fails(folder, small_model(), Layout(dp=2), model=model)), "another model", text)


def test_a_model_that_only_one_rank_has_is_refused_on_all(folder: Path) -> None:
    async def main() -> None:
        async with local_world(2) as nodes:
            models: list[Any] = [MODEL, {**MODEL, "hidden": 7}]
            errors = await each_fails(
                nodes, lambda node: loading(node, folder, small_model(), Layout(dp=2), model=models[node.rank])
            )
            assert_all_raise(errors, "another model", "model.hidden")

    run_virtual(main())


def test_where_there_is_no_checkpoint_it_says_what_there_is(tmp_path: Path) -> None:
    def refusals(folder: Path, **options: Any) -> list[BaseException]:
        return run_virtual(load_fails(folder, small_model(), Layout(dp=2), **options))

    assert_all_raise(refusals(tmp_path / "nowhere"), "there is no such folder")
    assert_all_raise(refusals(tmp_path), f"{tmp_path}: there is no complete checkpoint")
    assert latest(tmp_path) is None
    (tmp_path / "step_000000005.saving-0123456789abcdef").mkdir()
    (tmp_path / "step_000000004").mkdir()
    assert_all_raise(refusals(tmp_path), "saving step_000000004 was not finished", "saving step_000000005.saving-")
    assert_all_raise(refusals(tmp_path, step=4), "step_000000004: there is no complete checkpoint here")
    assert_all_raise(refusals(tmp_path, step=6), f"{tmp_path}: there is no checkpoint of step 6")
    (tmp_path / "file").write_text("hello")
    assert_all_raise(refusals(tmp_path / "file"), "there is no such folder")
    with pytest.raises(CheckpointError, match="No such file"):
        latest(tmp_path / "nowhere")


def test_a_step_that_is_not_that_of_the_folder_is_refused(folder: Path) -> None:
    errors = run_virtual(load_fails(folder / "step_000000001", small_model(), Layout(dp=2), step=2))
    assert_all_raise(errors, "expected the checkpoint of step 2, got that of 1")


def test_a_file_that_may_not_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, who may read everything."""

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    errors = run_virtual(load_fails(folder, small_model(), Layout()))
    assert_all_raise(errors, "cannot read", "rank_00000.safetensors: Permission denied")


def test_a_disk_that_cannot_read_is_an_error_on_all_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    errors = run_virtual(load_fails(folder, small_model(), Layout(dp=2)))
    assert_all_raise(errors, "cannot read", "Input/output error")


def test_a_rank_that_does_not_see_the_folder_is_named(folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            folders = [folder, folder, tmp_path]
            errors = await each_fails(
                nodes, lambda node: loading(node, folders[node.rank], small_model(), Layout(dp=3))
            )
            assert_all_raise(errors, "rank 2 does not see the folder", "all ranks must share one file system")

    run_virtual(main())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step": -1}, "step: expected an integer from 0 on or None, got -1"),
        ({"step": "1"}, "step: expected"),
        ({"folder": 3}, "folder: expected a path, got 3"),
        ({"model": [1]}, "model: expected a dict"),
        ({"wanted": ["w"]}, "wanted: expected Wanted, got str"),
    ],
)
def test_wrong_arguments_are_named_there_and_the_others_hear_of_it(
    folder: Path, options: dict[str, Any], text: str
) -> None:
    async def main() -> None:
        async with local_world(2) as nodes:

            def call(rank: int, **changed: Any) -> Any:
                arguments: dict[str, Any] = {"folder": folder, "wanted": [], "model": MODEL, **changed}
                return load_checkpoint(
                    arguments.pop("folder"), arguments.pop("wanted"), communicator=nodes[rank].world, **arguments
                )

            calls = [call(0), call(1, **options)]
            errors = await each_fails(nodes, lambda node: calls[node.rank])
            assert isinstance(errors[0], CheckpointError)
            assert isinstance(errors[1], UsageError)
            assert all(text in str(error) for error in errors), errors
            again = [call(0), call(1)]
            await asyncio.gather(*again)

    run_virtual(main())


def test_without_the_library_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)

    async def main() -> None:
        async with local_world(2) as nodes:
            for error in await each_fails(nodes, lambda node: loading(node, folder, small_model(), Layout(dp=2))):
                assert isinstance(error, UsageError)
                assert 'pip install "asyncpar[checkpoint]"' in str(error)

    run_virtual(main())


def test_a_rank_that_is_cancelled_before_it_begins_ends_the_load_everywhere(folder: Path) -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            calls = [asyncio.ensure_future(loading(node, folder, small_model(), Layout(dp=3))) for node in nodes]
            calls[1].cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(results[1], asyncio.CancelledError)
            assert isinstance(results[0], PeerCancelled)
            assert isinstance(results[2], PeerCancelled)
        await load_and_check(folder, small_model(), Layout(dp=3))

    run_virtual(main())


def test_wanting_the_same_twice_gives_two_arrays(folder: Path) -> None:
    async def main() -> None:
        async with local_world(1) as nodes:
            one = Layout().wanted(small_model(), 0)[0]
            loaded = await load_checkpoint(folder, [one, one], model=MODEL, communicator=nodes[0].world)
            loaded.arrays[0][...] = 0
            assert loaded.arrays[1].tobytes() == small_model()[0].whole.tobytes()

    run_virtual(main())


def test_what_is_wanted_must_make_sense() -> None:
    good = wanted("w", (2, 3))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"flat": (0, 7)}, "flat: expected a range within 0..6"),
        ({"flat": (3, 2)}, "flat"),
        ({"flat": [0, 6]}, "flat: expected a pair"),
        ({"dtype": object}, "dtype of tensor"),
        ({"dtype": ">f4"}, "dtype of tensor"),
        ({"dtype": "no such"}, "dtype of tensor"),
        ({"name": ""}, "name: expected a text"),
        ({"name": "\ud800"}, "name: expected a text"),
        ({"kind": "a/b"}, "kind: expected a word"),
        ({"slice": (2, 3)}, "slice: expected a TensorSlice"),
    ]
    for change, text in changes:
        with pytest.raises(UsageError, match=text):
            replace_wanted(good, **change)


def replace_wanted(good: Wanted, **change: Any) -> Wanted:
    names = ("name", "kind", "slice", "flat", "dtype")
    return Wanted(**{**{name: getattr(good, name) for name in names}, **change})
