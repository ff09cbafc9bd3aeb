"""The zoo of models (``scripts/torch_conformance/zoo.py``): what trains under torch's class trains under asyncpar's."""

from __future__ import annotations

import pytest

from scripts.torch_conformance.zoo import train
from scripts.torch_conformance.zoo_torch import CASES
from tests.torch.worlds import on_ranks

NOWHERE = {"SyncBatchNorm", "unused", "all frozen"}
"""Models that torch's class refuses on CPUs, too; other tests have what asyncpar's says of them."""

COMPILED = {"compiled", "scripted"}
"""Models that a compiler makes quicker while they run, with other roundings; other tests have these, too."""


@on_ranks(2)
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOWHERE | COMPILED])
def test_a_model_trains_as_under_torch_to_the_same_bits(name: str) -> None:
    theirs, ours = (train(CASES[name], way) for way in ("asyncpar", "own"))
    assert not ours.error
    assert ours.numbers == theirs.numbers
    assert ours.digest == theirs.digest
