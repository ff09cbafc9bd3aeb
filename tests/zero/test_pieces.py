"""Contents of checkpoints, and going on from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from asyncpar.core.config.slicing import TensorSlice
from asyncpar.errors import PeerError, UsageError
from asyncpar.nn import Array
from asyncpar.nn.optimizers import SGD, AdamW
from asyncpar.zero import ZeroEngine, ZeROStage
from tests.zero.replicas import SHAPES, engines, on_all, outcomes, take_steps, whole_values

Arrays = dict[tuple[str, str], Array]


def assembled(made: Sequence[ZeroEngine]) -> Arrays:
    """Return whole flat tensors from the pieces of all ranks."""
    whole: Arrays = {}
    for engine in made:
        for piece in engine.state_pieces():
            count = int(np.prod(SHAPES[piece.parameter], dtype=np.int64))
            tensor = whole.setdefault((piece.parameter, piece.kind), np.full(count, np.nan, piece.array.dtype))
            tensor[slice(*piece.flat)] = piece.array
    assert not any(np.isnan(tensor).any() for tensor in whole.values()), "everything is in some piece"
    return whole


def cut_for(engine: ZeroEngine, whole: Arrays) -> Arrays:
    """Return the pieces that ``engine`` asks for."""
    return {
        (piece.parameter, piece.kind): whole[piece.parameter, piece.kind][slice(*piece.flat)].copy()
        for piece in engine.state_pieces()
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, ZeROStage.NONE), (3, ZeROStage.STAGE3)),
        ((3, ZeROStage.STAGE3), (2, ZeROStage.STAGE1)),
        ((2, ZeROStage.STAGE1), (4, ZeROStage.STAGE2)),
        ((4, ZeROStage.STAGE2), (1, ZeROStage.NONE)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_training_goes_on_at_any_other_layout(
    before: tuple[int, ZeROStage], after: tuple[int, ZeROStage], dtype: str
) -> None:
    rule = AdamW(weight_decay=0.1)
    async with engines(*before, rule=rule, dtype=dtype) as made:
        await take_steps(made, *range(2))
        whole = assembled(made)
        values = await whole_values_of(made)
    async with engines(*after, rule=rule, dtype=dtype) as made:
        await on_all(made, lambda engine: engine.restore(cut_for(engine, whole), step_count=2))
        again = await on_all(made, whole_values)
        assert all(array.tobytes() == values[name].tobytes() for each in again for name, array in each.items())
        found = assembled(made)
        assert all(found[key].tobytes() == whole[key].tobytes() for key in whole)
        assert {engine.step_count for engine in made} == {2}
        await take_steps(made, 2)


async def whole_values_of(made: Sequence[ZeroEngine]) -> dict[str, Array]:
    return (await on_all(made, whole_values))[0]


async def test_a_run_that_was_interrupted_comes_to_the_same_bits() -> None:
    async with engines(3, ZeROStage.STAGE3) as made:
        await take_steps(made, *range(2))
        kept = [{(p.parameter, p.kind): p.array.copy() for p in engine.state_pieces()} for engine in made]
        await take_steps(made, *range(2, 4))
        expected = await whole_values_of(made)
    async with engines(3, ZeROStage.STAGE3) as made:
        await on_all(made, lambda engine: engine.restore(kept[engine.communicator.rank], step_count=2))
        await take_steps(made, *range(2, 4))
        got = await whole_values_of(made)
    assert {name: array.tobytes() for name, array in got.items()} == {n: a.tobytes() for n, a in expected.items()}


async def test_pieces_say_what_they_are_part_of() -> None:
    async with engines(2, ZeROStage.STAGE2, rule=SGD(momentum=0.5)) as made:
        pieces = {(piece.parameter, piece.kind): piece for piece in made[1].state_pieces()}
        piece = pieces["embedding", "momentum"]
        assert {kind for _, kind in pieces} == {"value", "momentum"}
        assert piece.slice == TensorSlice.whole((7, 5))
        assert piece.flat == (18, 35)
        assert piece.array.shape == (17,)
        assert str(piece) == "momentum of embedding, values 18 to 35 of [7, 5]"


async def test_master_values_are_the_values_of_half_precision() -> None:
    async with engines(2, ZeROStage.STAGE3, dtype="float16") as made:
        assert {piece.kind for piece in made[0].state_pieces()} == {"value", "first", "second"}
        assert all(piece.array.dtype == np.float32 for piece in made[0].state_pieces())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "arrays: expected value of head, which is missing"),
        ("unknown", "arrays: expected pieces of this engine, got value of other"),
        ("length", "arrays: expected 22 values of float32 as value of head, got 3 of float32"),
        ("dtype", "arrays: expected 22 values of float32 as value of head, got 22 of float64"),
    ],
)
async def test_pieces_that_do_not_fit_are_refused_and_the_others_hear_of_it(change: str, message: str) -> None:
    async with engines(2, ZeROStage.STAGE1) as made:
        await take_steps(made, 0)
        before = await whole_values_of(made)
        given = [{(p.parameter, p.kind): p.array.copy() for p in engine.state_pieces()} for engine in made]
        match change:
            case "missing":
                del given[1]["head", "value"]
            case "unknown":
                given[1]["other", "value"] = np.zeros(3)
            case "length":
                given[1]["head", "value"] = np.zeros(3, np.float32)
            case "dtype":
                given[1]["head", "value"] = given[1]["head", "value"].astype(np.float64)
        results = await outcomes(made, lambda engine: engine.restore(given[engine.communicator.rank], step_count=1))
        assert isinstance(results[1], UsageError)
        assert str(results[1]) == message
        assert isinstance(results[0], PeerError)
        await on_all(made, ZeroEngine.resume)
        after = await whole_values_of(made)
        assert all(before[name].tobytes() == after[name].tobytes() for name in SHAPES)


async def test_replicas_restored_to_different_steps_are_refused_on_all() -> None:
    async with engines(2, ZeROStage.STAGE2) as made:
        kept = [{(p.parameter, p.kind): p.array.copy() for p in engine.state_pieces()} for engine in made]
        results = await outcomes(
            made, lambda engine: engine.restore(kept[engine.communicator.rank], step_count=engine.communicator.rank)
        )
        assert all("some replicas have taken step 1 and others, rank 0 for one, have not" in str(r) for r in results)
        await on_all(made, lambda engine: engine.restore(kept[engine.communicator.rank], step_count=5))
        assert {engine.step_count for engine in made} == {5}


async def test_a_negative_number_of_steps_is_refused() -> None:
    async with engines(1) as (engine,):
        with pytest.raises(UsageError, match="step_count: expected 0 or more, got -1"):
            await engine.restore({}, step_count=-1)


@pytest.mark.parametrize("stage", ZeROStage)
async def test_an_engine_goes_on_with_how_long_parameters_were_frozen(stage: ZeROStage) -> None:
    async def train(made: Sequence[ZeroEngine], *steps: int, frozen: bool) -> None:
        for engine in made:
            engine.parameters[1].requires_grad = not frozen
        await take_steps(made, *steps)

    async with engines(2, stage) as made:
        await train(made, 0, 1, frozen=True)
        assert {tuple(engine.skipped.items()) for engine in made} == {(("layer/weight", 2),)}
        skipped = made[0].skipped
        kept = [{(p.parameter, p.kind): p.array.copy() for p in engine.state_pieces()} for engine in made]
        await train(made, 2, 3, frozen=False)
        expected = await whole_values_of(made)
    async with engines(2, stage) as made:
        await on_all(made, lambda engine: engine.restore(kept[engine.communicator.rank], step_count=2, skipped=skipped))
        await train(made, 2, 3, frozen=False)
        got = await whole_values_of(made)
    assert {name: array.tobytes() for name, array in got.items()} == {n: a.tobytes() for n, a in expected.items()}
