"""Each piece is saved by one rank, and bad values are refused before anything is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.checkpoint import Piece, latest
from asyncpar.checkpoint.writer import identity_of
from asyncpar.core.config.slicing import TensorSlice
from asyncpar.errors import CheckpointError, UsageError
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.checkpoint.layouts import Layout, Tensor, random_bits, small_model
from tests.checkpoint.worlds import assert_all_raise, each, each_fails, load_and_check, save, saving

F32 = np.dtype(np.float32)


def labels_in(path: Path, rank: int) -> list[str]:
    manifest = json.loads((path / f"rank_{rank:05d}.json").read_bytes())
    return [f"{piece['kind']}/{piece['name']}" for piece in manifest["pieces"]]


# -- replicas ------------------------------------------------------------------------------------------------------


def test_what_several_ranks_hold_is_saved_once_and_by_each_of_them_in_turn(tmp_path: Path) -> None:
    saved = run_virtual(save(tmp_path, small_model(), Layout(dp=2, tp=2)))
    labels = [labels_in(saved[0].path, rank) for rank in range(4)]
    whole = [f"{each.kind}/{each.name}" for each in small_model() if each.dim is None or not each.whole.size]
    cut = [f"{each.kind}/{each.name}" for each in small_model() if each.dim is not None and each.whole.size]
    assert sorted(label for of_rank in labels for label in of_rank) == sorted(whole + 2 * cut)
    assert all(of_rank for of_rank in labels)
    assert sum(one.nbytes for one in saved) < 1.5 * sum(each.whole.nbytes for each in small_model()) + 20_000


def test_a_whole_tensor_is_the_same_however_it_was_cut() -> None:
    """Replicas are found by the values they hold: a cut of one part is the whole."""
    array = np.zeros((2, 3), F32)
    parts = [TensorSlice.whole((2, 3)), TensorSlice.along((2, 3), 1, 0, 3), TensorSlice.along((2, 3), 0, 0, 2)]
    same = {identity_of(Piece(name="w", kind="value", slice=part, flat=(0, 6), array=array)) for part in parts}
    assert len(same) == 1
    other = Piece(name="w", kind="first", slice=parts[0], flat=(0, 6), array=array)
    assert identity_of(other) not in same


def test_replicas_that_have_drifted_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        tensors = small_model()
        drifted = small_model()
        changed = drifted[3].whole.copy()
        changed.view(np.uint16)[2] ^= 1
        drifted[3] = Tensor(name="bias", whole=changed)
        async with local_world(4) as nodes:
            errors = await each_fails(
                nodes,
                lambda node: saving(node, tmp_path, drifted if node.rank == 2 else tensors, Layout(dp=4)),
            )
            assert_all_raise(
                errors,
                'tensor "bias" (value): replicas have drifted: ranks 0, 1, 3 and rank 2 hold different values',
            )
            assert latest(tmp_path) is None
            await each(nodes, lambda node: saving(node, tmp_path, tensors, Layout(dp=4)))
        await load_and_check(tmp_path, tensors, Layout())

    run_virtual(main())


# -- what does not make a checkpoint -------------------------------------------------------------------------------


def test_a_tensor_of_which_a_part_is_missing_is_not_saved(tmp_path: Path) -> None:
    async def main() -> None:
        tensors = [Tensor(name="w", whole=random_bits((6, 4), F32, 1), dim=0)]
        async with local_world(2) as nodes:
            errors = await each_fails(
                nodes,
                lambda node: saving(
                    node, tmp_path, tensors, Layout(), pieces=Layout(tp=3).pieces(tensors, 2 * node.rank)
                ),
            )
            assert_all_raise(errors, 'tensor "w" (value) of shape (6, 4): no rank has its values 8..16')
        assert latest(tmp_path) is None

    run_virtual(main())


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [((4, 7), "float32", "shape: expected one on all ranks"), ((4, 6), "int32", "dtype: expected one on all ranks")],
)
def test_ranks_that_have_different_tensors_by_one_name_are_named(
    tmp_path: Path, shape: tuple[int, int], dtype: str, text: str
) -> None:
    async def main() -> None:
        models = [
            [Tensor(name="w", whole=random_bits((4, 6), F32, 1), dim=0)],
            [Tensor(name="w", whole=random_bits(shape, np.dtype(dtype), 1), dim=0)],
        ]
        async with local_world(2) as nodes:
            errors = await each_fails(nodes, lambda node: saving(node, tmp_path, models[node.rank], Layout(tp=2)))
            assert_all_raise(errors, text, "rank 0", "rank 1")

    run_virtual(main())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step": 2}, "arguments.step is 1 for rank 0, and 2 for rank 1"),
        ({"keep": 2}, "arguments.keep is None for rank 0, and 2 for rank 1"),
        ({"model": {"hidden": 7, "layers": 2}}, "arguments.model.hidden is 6 for rank 0, and 7 for rank 1"),
    ],
)
def test_ranks_that_save_different_things_all_raise(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    async def main() -> None:
        async with local_world(2) as nodes:
            errors = await each_fails(
                nodes,
                lambda node: saving(node, tmp_path, small_model(), Layout(dp=2), **(options if node.rank else {})),
            )
            assert all(isinstance(error, UsageError) and text in str(error) for error in errors), errors
            assert latest(tmp_path) is None
            await each(nodes, lambda node: saving(node, tmp_path, small_model(), Layout(dp=2)))

    run_virtual(main())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step": -1}, "step: expected an integer from 0"),
        ({"step": True}, "step: expected an integer from 0"),
        ({"step": 10**15}, "step: expected an integer from 0"),
        ({"keep": 0}, "keep: expected at least 1 or None, got 0"),
        ({"model": None}, "model: expected a dict"),
        ({"extra": [1]}, "extra: expected a dict"),
        ({"extra": {"loss": float("nan")}}, "extra.loss: expected what JSON keeps exactly"),
        ({"extra": {"rng": {"state": np.zeros(2)}}}, "extra.rng.state: expected"),
        ({"extra": {1: 2}}, "extra: expected texts as keys, got 1"),
        ({"model": {"layers": (1, {2})}}, "model.layers[1]: expected"),
        ({"pieces": ["w"]}, "pieces: expected Piece, got str"),
        (
            {"pieces": Layout().pieces(small_model(), 0)[:1] * 2},
            'got tensor "embedding" (value) with the same range twice',
        ),
    ],
)
def test_wrong_arguments_are_named_there_and_the_others_hear_of_it(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    async def main() -> None:
        async with local_world(2) as nodes:
            errors = await each_fails(
                nodes,
                lambda node: saving(node, tmp_path, small_model(), Layout(dp=2), **(options if node.rank else {})),
            )
            assert isinstance(errors[0], CheckpointError)
            assert isinstance(errors[1], UsageError)
            assert all(text in str(error) for error in errors), errors
            await each(nodes, lambda node: saving(node, tmp_path, small_model(), Layout(dp=2)))

    run_virtual(main())


def test_pieces_must_make_sense() -> None:
    whole = TensorSlice.whole((2, 3))
    good: dict[str, Any] = {"name": "w", "kind": "value", "slice": whole, "flat": (0, 6), "array": np.zeros(6)}
    Piece(**good)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"array": np.zeros(5)}, "array: expected the 6 values 0..6 of tensor"),
        ({"array": [0.0] * 6}, "array: expected a numpy array"),
        ({"array": np.zeros(6, complex)}, "array of tensor"),
        ({"array": np.zeros(6, object)}, "array of tensor"),
        ({"array": np.zeros(6, ">f8")}, "array of tensor"),
        ({"flat": (0, 7), "array": np.zeros(7)}, "flat: expected a range within 0..6"),
        ({"kind": ""}, "kind: expected a word"),
        ({"name": "x" * 513}, "name: expected a text of 1 to 512"),
    ]
    for change, text in changes:
        with pytest.raises(UsageError, match=text):
            Piece(**{**good, **change})


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)

    async def main() -> None:
        async with local_world(2) as nodes:
            for error in await each_fails(nodes, lambda node: saving(node, tmp_path, small_model(), Layout(dp=2))):
                assert isinstance(error, UsageError)
                assert 'pip install "asyncpar[checkpoint]"' in str(error)

    run_virtual(main())
