"""NaN and infinity spread over slices, stages and replicas; errors name the rank, and the place, where they began.

By default every layout meets a stage of ZeRO; ``--soak`` tries all of them with all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue
from asyncpar.hybrid import TransformerModel
from asyncpar.hybrid.watch import FiniteReport, FiniteWatch, Sighting, find_origins
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.faults import Fault, FaultyModel, Moment
from tests.hybrid.ranks import Outcomes, Ranks, assert_has_taken, outcomes_of, running
from tests.hybrid.worlds import TINY, Array, make_config
from tests.products import in_turn
from tests.soak import chosen

MODEL = replace(TINY, layers=2, heads=2, tied_embeddings=True)
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
PRODUCT = chosen(in_turn(LAYOUTS, ZeROStage), soak=list(product([*LAYOUTS, (2, 2, 2)], ZeROStage)))
PLACES = {
    Moment.FORWARD: r"the forward pass of stage \d|what it gave to its tensor-parallel ranks",
    Moment.BACKWARD: r"the backward pass of stage \d|what it gave to its tensor-parallel ranks|[\w.,/ ]+",
    Moment.LOSS: "the gradient of the loss",
    Moment.WEIGHT: r"[\w.,/ ]+",
}


def spoil(x: Array) -> None:
    x.reshape(-1)[0] = np.nan


def named_in(outcomes: Outcomes) -> dict[int, str]:
    """Return which ranks all errors name, with the places."""
    texts = {str(outcome) for outcome in outcomes}
    assert [type(outcome) for outcome in outcomes] == [NonFiniteValue] * len(outcomes), outcomes
    assert len(texts) == 1, texts
    found = re.findall(r"rank (\d+) has NaN or infinity in ([^;]+)", texts.pop())
    return {int(rank): place for rank, place in found}


async def strike(ranks: Ranks, faults: Sequence[Fault], culprits: Sequence[int], moment: Moment) -> dict[int, str]:
    """Take a step in which ``culprits`` spoil what they compute; return who is named."""
    for culprit in culprits:
        faults[culprit].at = moment
    named = named_in(await outcomes_of(ranks.start()))
    for culprit in culprits:
        faults[culprit].at = None
    return named


@pytest.mark.parametrize(("layout", "stage"), PRODUCT)
async def test_the_rank_is_named_where_it_began(layout: tuple[int, int, int], stage: ZeROStage) -> None:
    size = prod(layout)
    faults = [Fault(what=spoil) for _ in range(size)]
    config = make_config(*layout, layers=2, micro_batches=2, zero=ZeROConfig(stage=stage))
    model = TransformerModel(config=MODEL)
    async with running(MODEL, config, lambda rank: FaultyModel(model=model, fault=faults[rank])) as ranks:
        for culprit in chosen((0, 1) if size == 2 else (size - 1,), soak=range(size)):
            one = ranks.all[culprit]
            for moment in moments_of(culprit):
                if moment is Moment.LOSS and not one.takes_targets:
                    continue
                named = await strike(ranks, faults, [culprit], moment)
                assert list(named) == [culprit], f"{moment} on rank {culprit}: {named}"
                assert re.fullmatch(PLACES[moment], named[culprit]), f"{moment}: {named}"
        if layout[0] == 2:  # two replicas fail at once
            named = await strike(ranks, faults, [0, size - 1], Moment.WEIGHT)
            assert list(named) == [0, size - 1]
        await ranks.take_step()
        assert_has_taken(ranks, 1)


def moments_of(culprit: int) -> list[Moment]:
    """Return when a rank spoils what it computes: rank 0 at two moments, the last one at all; with ``--soak`` each."""
    return list(Moment) if culprit else chosen([Moment.FORWARD, Moment.WEIGHT], soak=list(Moment))


def report(
    rank: int, sighting: Sighting | None = None, *, slices: Sequence[int] = (), **names: list[str]
) -> FiniteReport:
    return FiniteReport(rank, tuple(slices) or (rank,), sighting, names.get("spoiled", []), names.get("overflowed", []))


def own(calls: int = 0) -> Sighting:
    return Sighting(is_own=True, place="the forward pass of stage 0", calls=calls)


def taken(calls: int = 0) -> Sighting:
    return Sighting(is_own=False, place="the input of the forward pass of stage 1", calls=calls)


@pytest.mark.parametrize(
    ("reports", "text"),
    [
        ([report(0, own()), report(1, taken())], "rank 0 has NaN or infinity in the forward pass of stage 0"),
        (
            [report(0, own(3), slices=(0, 1)), report(1, own(2), slices=(0, 1))],
            "rank 1 has NaN or infinity in the forward pass of stage 0",
        ),
        ([report(0), report(1, spoiled=["a", "b"])], "rank 1 has NaN or infinity in a, b"),
        ([report(0, taken()), report(1, taken())], "NaN or infinity was first seen on ranks 0, 1"),
        ([report(0, overflowed=["a"]), report(1, overflowed=["b", "a"])], "the sum over ranks overflowed in a, b"),
        ([report(0), report(1)], "the sum of squares overflowed"),
    ],
)
def test_what_ranks_report_says_where_it_began(reports: list[FiniteReport], text: str) -> None:
    assert find_origins(reports) == text


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_sight_is_kept_and_large_numbers_are_none(dtype: str, bad: float) -> None:
    watch = FiniteWatch()
    values = np.full((3, 4), np.finfo(dtype).max, dtype)
    watch.take(values, "large")
    watch.make(np.arange(3), "integers")
    watch.make(1.5, "a number")
    watch.share(values)
    before = watch.sighting
    values[1, 2] = bad
    watch.make(values, "here")
    watch.take(values, "there")
    seen = watch.sighting
    watch.begin()
    assert (before, seen, watch.sighting) == (None, Sighting(is_own=True, place="here", calls=1), None)
