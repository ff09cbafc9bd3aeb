"""Type checkers know the names that arguments take: their lists are those of the registries, on the whole face."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.codecs.registry import CODECS, parse_codec
from asyncpar.collectives.algorithms.catalog import ALGORITHMS, ARENA, check_algorithm, is_of_devices, known_algorithms
from asyncpar.collectives.arrays import possible_operations
from asyncpar.collectives.plan import split_segment
from asyncpar.core.config import names
from asyncpar.core.config.names import Name
from asyncpar.gradsync import GradientCompressionConfig
from asyncpar.net.transport.lane_kinds import LANES
from asyncpar.testing import local_world

DOCS = Path(__file__).parent.parent / "docs"

ALGORITHMS_OF = {
    "all_gather": names.AllGatherAlgorithm,
    "all_reduce": names.AllReduceAlgorithm,
    "all_to_all": names.AllToAllAlgorithm,
    "barrier": names.BarrierAlgorithm,
    "broadcast": names.BroadcastAlgorithm,
    "gather": names.RootedAlgorithm,
    "reduce": names.ReduceAlgorithm,
    "reduce_scatter": names.ReduceScatterAlgorithm,
    "scatter": names.RootedAlgorithm,
}
ARGUMENTS = {"algorithm", "codec", "op", "residual_codec", "transport"}
"""Arguments that take a name from a list."""

REPORTED = {
    "CollectiveResult.codec",
    "Event.algorithm",
    "FigureSummary.algorithm",
    "Summary.codec",
    "JobSpec.transport",
    "PlaceOrder.transport",
}
"""Fields of what asyncpar makes, and programs read."""

OF_TESTS = {"blocking_world.transport", "local_world.transport", "expect.codec"}
"""Arguments that tests make up, worlds in memory among them."""


def listed(alias: Any) -> set[str]:
    """Return the names that type checkers know as ``alias``."""
    assert Name in get_args(alias), "the end is open"
    return {name for one in get_args(alias) for name in get_args(one)}


def test_the_operations_and_lanes_of_type_checkers_are_those_that_there_are() -> None:
    assert listed(names.ReduceOp) == {*possible_operations(np.dtype("i4")), *possible_operations(np.dtype("f4"))}
    assert listed(names.LaneName) == set(LANES.names)


@pytest.mark.parametrize("operation", sorted(ALGORITHMS_OF))
def test_the_algorithms_of_type_checkers_are_those_that_there_are(operation: str) -> None:
    plain = {name for name in listed(ALGORITHMS_OF[operation]) if "/" not in name}
    of_devices = {name for name in ("nccl", "staged", "hierarchical") if is_of_devices(operation, name)}
    if operation == "barrier":  # it has no array
        of_devices = set()
    assert plain == {*known_algorithms(operation), ARENA, *of_devices}
    for name in listed(ALGORITHMS_OF[operation]) - plain:
        algorithm, segment = split_segment(name)
        assert segment
        check_algorithm(operation, algorithm)
    assert listed(names.AnyAlgorithm) >= listed(ALGORITHMS_OF[operation])


def test_every_operation_has_its_list() -> None:
    assert ALGORITHMS_OF.keys() == ALGORITHMS.keys()


def test_the_codecs_of_type_checkers_are_those_that_there_are() -> None:
    named = listed(names.CodecName)
    assert {name for name in named if ":" not in name} == {kind.name for kind in CODECS if not kind.arguments}
    for name in sorted(named):
        assert parse_codec(name).name == name
    assert {re.split("[:+]", name)[0] for name in named} == {kind.name for kind in CODECS}
    assert listed(names.CodecChoice) == {*named, "auto"}


async def test_what_is_in_no_list_runs_as_a_plain_text_and_as_a_name() -> None:
    async with local_world(2) as nodes:
        spelled: Any = "ring/128k"
        for given in (spelled, Name(spelled)):
            calls = [node.world.all_reduce(np.ones(3), algorithm=given) for node in nodes]
            assert [list(result) for result in await asyncio.gather(*calls)] == [[2.0] * 3] * 2
    chosen: Any = "topk:0.02+int4"
    assert GradientCompressionConfig(codec=chosen) == GradientCompressionConfig(codec=ap.Name(chosen))


def _arguments() -> Iterator[tuple[str, str]]:
    """Yield where each public function and class takes a name, and how that is annotated."""
    sys.path.insert(0, str(DOCS))
    try:
        public_names = importlib.import_module("public_names")
    finally:
        sys.path.remove(str(DOCS))
    for package in [package for packages in public_names.PACKAGES.values() for package in packages]:
        if package == "asyncpar.torch" and find_spec("torch") is None:
            continue
        module = importlib.import_module(package)
        for name in public_names.public_names(package):
            value = getattr(module, name)
            methods = inspect.getmembers_static(value) if inspect.isclass(value) else []
            for place, function in [(name, value), *((f"{name}.{of}", made) for of, made in methods if of[0] != "_")]:
                function = getattr(function, "__func__", function)
                if not callable(function):
                    continue
                try:
                    parameters = inspect.signature(function).parameters
                except (TypeError, ValueError):  # constants, and classes of C
                    continue
                for argument in ARGUMENTS & parameters.keys():
                    yield f"{place}.{argument}", inspect.formatannotation(parameters[argument].annotation)


def test_no_argument_of_the_face_that_takes_a_name_is_any_text() -> None:
    found = dict(_arguments())
    assert len(found) > 30
    plain = {place for place, annotation in found.items() if re.search(r"\bstr\b", annotation)}
    assert plain == REPORTED | OF_TESTS
