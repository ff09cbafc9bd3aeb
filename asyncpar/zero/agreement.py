"""Do all replicas hold the same model?"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from asyncpar.agreement.errors import Disagreement
from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync.agreement import digest_of, find_difference
from asyncpar.nn.half import stored_value
from asyncpar.nn.parameter import Parameter
from asyncpar.zero.partition import Spec

_WHO = "replicas"


async def agree(lines: Sequence[str], communicator: Communicator, *, key: str) -> None:
    """Raise ``Disagreement``, on every rank, unless all ranks pass the same ``lines``.

    Exchanges a hash, and the lines only where hashes differ.  The message names the first rank that differs from the
    first rank, and the line in which it does.
    """
    if communicator.size == 1:
        return
    digests = await communicator.all_gather(np.frombuffer(digest_of(lines), np.uint8), key=f"{key}/digest")
    if (digests == digests[0]).all():
        return
    everything = await communicator.all_gather_object(list(lines), key=f"{key}/lines", wanted=list[str])
    named = [{_WHO: rank_lines} for rank_lines in everything]
    difference = find_difference(named, {_WHO: [range(communicator.size)]}, communicator.ranks)
    assert difference is not None, "hashes differ, so lines do"
    raise Disagreement(str(difference))


def describe(specs: Iterable[Spec], parameters: Iterable[Parameter]) -> list[str]:
    """Return a line for each parameter, with a checksum of its values."""
    return [
        f"{spec} with values of checksum {zlib.crc32(_bytes_of(parameter)):08x}"
        for spec, parameter in zip(specs, parameters, strict=True)
    ]


def _bytes_of(parameter: Parameter) -> memoryview:
    return stored_value(parameter).reshape(-1).view(np.uint8).data
