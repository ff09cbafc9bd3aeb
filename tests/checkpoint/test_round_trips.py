"""A checkpoint of one layout is loaded by any other, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from asyncpar.checkpoint import latest
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.checkpoint.layouts import BFLOAT16, Layout, Tensor, random_bits, small_model
from tests.checkpoint.worlds import each, load_and_check, save, saving
from tests.soak import chosen

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=3),
    Layout(pp=2),
    Layout(dp=2),
    Layout(dp=3, zero=True),
    Layout(dp=2, tp=2, pp=2),
    Layout(dp=2, tp=2, zero=True),
]


@pytest.mark.parametrize("saved", LAYOUTS, ids=str)
def test_any_layout_loads_what_a_layout_has_saved(tmp_path: Path, saved: Layout) -> None:
    """Every third layout by default, others for others."""
    place = LAYOUTS.index(saved) % 3

    async def main() -> None:
        tensors = small_model()
        await save(tmp_path, tensors, saved)
        for loaded in chosen(LAYOUTS[place::3], soak=LAYOUTS):
            await load_and_check(tmp_path, tensors, loaded)

    run_virtual(main())


@st.composite
def tensors_of_any_shape(draw: st.DrawFn) -> list[Tensor]:
    tensors = []
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
        dtype = np.dtype(draw(st.sampled_from([np.float32, np.float64, BFLOAT16, np.int8])))
        view = draw(views(shape))
        dim = draw(st.none() | st.integers(0, len(view) - 1)) if view else None
        tensors.append(
            Tensor(name=f"tensor {index}", whole=random_bits(shape, dtype, seed=index), dim=dim, view=view or None)
        )
    return tensors


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Some dimension may be looked at as two."""
    at = draw(st.integers(0, len(shape)))
    for factor in (2, 3):
        if at < len(shape) and shape[at] % factor == 0:
            return (*shape[:at], factor, shape[at] // factor, *shape[at + 1 :])
    return shape


layouts = st.builds(
    Layout, dp=st.integers(1, 3), tp=st.integers(1, 3), pp=st.integers(1, 2), zero=st.booleans()
).filter(lambda layout: layout.size <= 8)


@settings(max_examples=chosen(10, soak=200), deadline=None)
@given(tensors=tensors_of_any_shape(), saved=layouts, loaded=layouts)
def test_any_tensors_cut_in_any_way_come_back(tensors: list[Tensor], saved: Layout, loaded: Layout) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            await save(Path(folder), tensors, saved)
            await load_and_check(Path(folder), tensors, loaded)

    run_virtual(main())


def test_pieces_that_overlap_are_put_together_too(tmp_path: Path) -> None:
    """Rank 0 has all of a tensor, rank 1 a range of it: that is saved twice, and read once."""
    tensors = [Tensor(name="w", whole=random_bits((5, 4), np.dtype(np.float32), 1), dim=1)]

    async def main() -> None:
        async with local_world(2) as nodes:
            both = [Layout().pieces(tensors, 0), Layout(tp=2).pieces(tensors, 1)]
            await each(nodes, lambda node: saving(node, tmp_path, tensors, Layout(), pieces=both[node.rank]))
        for layout in LAYOUTS:
            await load_and_check(tmp_path, tensors, layout)

    run_virtual(main())


def test_each_rank_reads_only_the_blocks_that_it_needs(tmp_path: Path) -> None:
    mebibyte = 1 << 20
    tensors = [Tensor(name="w", whole=random_bits((8 * mebibyte // 4,), np.dtype(np.float32), 1), dim=0)]

    async def main() -> None:
        await save(tmp_path, tensors, Layout(tp=2))
        quarters = await load_and_check(tmp_path, tensors, Layout(tp=4))
        assert [loaded.nbytes for loaded in quarters] == [2 * mebibyte] * 4
        thirds = await load_and_check(tmp_path, tensors, Layout(tp=3))
        assert [loaded.nbytes for loaded in thirds] == [3 * mebibyte, 4 * mebibyte, 3 * mebibyte]

    run_virtual(main())


def test_columns_of_many_blocks_come_back(tmp_path: Path) -> None:
    tensors = [
        Tensor(name="wide", whole=random_bits((1200, 600), np.dtype(np.float32), 1), dim=1),
        Tensor(name="narrow", whole=random_bits((200_000, 3), BFLOAT16, 2), dim=1),
    ]

    async def main() -> None:
        await save(tmp_path, tensors, Layout(tp=2))
        for layout in (Layout(), Layout(tp=3), Layout(dp=3, tp=2, zero=True)):
            await load_and_check(tmp_path, tensors, layout)

    run_virtual(main())


def test_a_range_is_read_in_one_go_from_where_it_lies_together(tmp_path: Path) -> None:
    """What ZeRO ranks have saved of columns comes together as rows."""
    tensors = [Tensor(name="w", whole=random_bits((30, 12), np.dtype(np.float64), 1), dim=1)]
    rows = [Tensor(name="w", whole=tensors[0].whole, dim=0)]

    async def main() -> None:
        await save(tmp_path, tensors, Layout(dp=3, tp=2, zero=True))
        await load_and_check(tmp_path, rows, Layout(dp=2, tp=4, zero=True))

    run_virtual(main())


def test_shards_are_safetensors_that_anybody_can_read(tmp_path: Path) -> None:
    tensors = small_model()

    async def main() -> None:
        saved = await save(tmp_path, tensors, Layout())
        content = load_file(saved[0].path / "rank_00000.safetensors")
        by_label = {key.partition("#")[0]: array for key, array in content.items()}
        assert len(by_label) == len(tensors)
        for tensor in tensors:
            array = by_label[f"{tensor.kind}/{tensor.name}"]
            part = Layout().part(tensor, 0)
            assert array.tobytes() == tensor.whole.tobytes()
            assert array.shape == part.local_shape

    run_virtual(main())


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    generator = np.random.default_rng(3).bit_generator.state
    extra: dict[str, Any] = {"rng": generator, "scale": 2.0**40, "third": 1 / 3, "text": "é\n", "list": [1, None, True]}

    async def main() -> None:
        layout = Layout(dp=2)
        await save(tmp_path, small_model(), layout, extra=extra)
        for loaded in await load_and_check(tmp_path, small_model(), layout):
            assert loaded.extra == extra
            assert loaded.extras == (extra, extra)
            assert loaded.step == 1

    run_virtual(main())


def test_each_rank_may_save_an_extra_of_its_own(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            await each(
                nodes,
                lambda node: saving(node, tmp_path, small_model(), Layout(dp=3), extra={"rank": node.rank}),
            )
        loaded = await load_and_check(tmp_path, small_model(), Layout())
        assert loaded[0].extra == {"rank": 0}
        assert loaded[0].extras == ({"rank": 0}, {"rank": 1}, {"rank": 2})

    run_virtual(main())


def test_the_last_complete_step_is_loaded_unless_another_is_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        for step in (5, 10, 7):
            await save(tmp_path, small_model(seed=step), Layout(tp=2), step=step)
        last = latest(tmp_path)
        assert last is not None
        assert (last.step, last.path) == (10, tmp_path / "step_000000010")
        await load_and_check(tmp_path, small_model(seed=10), Layout())
        await load_and_check(last.path, small_model(seed=10), Layout())
        await load_and_check(tmp_path, small_model(seed=7), Layout(dp=2), step=7)

    run_virtual(main())
