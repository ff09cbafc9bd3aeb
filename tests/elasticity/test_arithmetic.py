"""Ranks that compute otherwise than the others are named, in one warning on each host with the remedy."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncpar.elasticity import job_worlds
from asyncpar.elasticity.arithmetic import (
    ArithmeticComparison,
    ArithmeticDifference,
    describe_arithmetic,
    find_differences,
)
from asyncpar.elasticity.step import ElasticStep
from asyncpar.testing import run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds
from asyncpar.testing.world import local_world
from tests.elasticity.training import Result, train
from tests.launch.agents.agent_groups import TRAINING, AgentGroup, eventually

UNLIKE = "do not compute alike"
ALIKE = {"processor": "A", "numpy": "2.4", "BLAS kernel": "SkylakeX", "BLAS threads": "2"}

HAS_OPENBLAS = "openblas" in np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {}).get("name", "")
with_kernels = pytest.mark.skipif(
    not HAS_OPENBLAS or platform.machine() != "x86_64" or sys.platform != "linux",
    reason="kernels by name are those of OpenBLAS on x86-64",
)


def test_ranks_that_have_the_same_do_not_differ() -> None:
    assert find_differences([ALIKE] * 3) == []


def test_what_most_ranks_have_is_usual_and_of_equally_many_that_of_the_lowest_rank() -> None:
    other = {**ALIKE, "BLAS threads": "8"}
    assert find_differences([other, ALIKE, ALIKE]) == [
        ArithmeticDifference(name="BLAS threads", value="8", usual="2", ranks=(0,))
    ]
    assert find_differences([other, ALIKE]) == [
        ArithmeticDifference(name="BLAS threads", value="2", usual="8", ranks=(1,))
    ]


def test_what_is_not_known_of_a_rank_is_a_difference() -> None:
    (found,) = find_differences([ALIKE, {name: value for name, value in ALIKE.items() if name != "BLAS kernel"}])
    assert (found.name, found.value, found.ranks) == ("BLAS kernel", "unknown", (1,))


@pytest.mark.parametrize(
    ("name", "value", "usual", "text"),
    [
        (
            "BLAS kernel",
            "Haswell",
            "SkylakeX",
            "ranks 1, 2 on b, c have BLAS kernel Haswell, not SkylakeX (set OPENBLAS_CORETYPE on all hosts to one that "
            "all have)",
        ),
        (
            "BLAS threads",
            "8",
            "2",
            "ranks 1, 2 on b, c have BLAS threads 8, not 2 (set OPENBLAS_NUM_THREADS=2, or MKL_NUM_THREADS, on all "
            "hosts)",
        ),
        (
            "instructions of numpy",
            "AVX2 AVX512F",
            "AVX2 FMA3",
            "ranks 1, 2 on b, c have instructions of numpy with AVX512F, without FMA3 (set "
            'NPY_DISABLE_CPU_FEATURES="AVX512F FMA3" on the hosts that have them)',
        ),
        (
            "processor",
            "EPYC {7B12}",
            "Xeon",
            "ranks 1, 2 on b, c have processor EPYC {7B12}, not Xeon (use hosts of one kind where bits matter)",
        ),
        ("numpy", "2.3", "2.4", "ranks 1, 2 on b, c have numpy 2.3, not 2.4 (install the same on all hosts)"),
    ],
)
def test_a_difference_says_who_differs_in_what_and_what_to_set(name: str, value: str, usual: str, text: str) -> None:
    found = ArithmeticDifference(name=name, value=value, usual=usual, ranks=(1, 2))
    assert found.describe(["a", "b", "c"]) == text


def test_one_rank_is_spoken_of_as_one() -> None:
    found = ArithmeticDifference(name="numpy", value="2.3", usual="2.4", ranks=(1,))
    assert found.describe(["a", "b"]).startswith("rank 1 on b has numpy 2.3")


def test_a_processor_without_further_instructions_is_compared_by_those_of_the_others() -> None:
    name, more = "instructions of numpy", "X86_V3 X86_V4"
    found = ArithmeticDifference(name=name, value="baseline", usual=more, ranks=(1,)).describe(["a", "b"])
    assert f'{name} without {more} (set NPY_DISABLE_CPU_FEATURES="{more}" on the hosts that have them)' in found
    found = ArithmeticDifference(name=name, value=more, usual="baseline", ranks=(1,)).describe(["a", "b"])
    assert f'{name} with {more} (set NPY_DISABLE_CPU_FEATURES="{more}" on the hosts that have them)' in found


def test_what_a_rank_does_not_know_is_no_value_to_set() -> None:
    for name in (*ALIKE, "instructions of numpy"):
        [found] = find_differences([{name: "X86_V3"}, {name: "X86_V3"}, {}])
        assert found.describe(["a", "b", "c"]).endswith("unknown, not X86_V3 (install the same on all hosts)")


async def test_ranks_warn_once_of_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    other = {**ALIKE, "BLAS threads": "8"}
    comparisons = [ArithmeticComparison() for _ in range(3)]

    async def compare(*described: dict[str, str]) -> list[str]:
        caplog.clear()
        async with local_world(len(described), hosts=["a", "a", "b"][: len(described)]) as nodes:
            places = zip(comparisons, nodes, described, strict=False)
            await asyncio.gather(*(comparison.compare(node, mine) for comparison, node, mine in places))
            hosts = sum(node.world.local_rank == 0 for node in nodes)
        assert len(caplog.messages) in (0, hosts)
        return sorted(set(caplog.messages))

    with caplog.at_level(logging.WARNING, "asyncpar.elasticity.arithmetic"):
        assert await compare(ALIKE, ALIKE, ALIKE) == []
        (text,) = await compare(ALIKE, ALIKE, other)
        assert UNLIKE in text
        assert "has BLAS threads 8, not 2" in text
        assert await compare(ALIKE, ALIKE, other) == []
        (text,) = await compare(ALIKE, {**ALIKE, "processor": "B"}, other)
        assert "has processor B, not A" in text
        assert "has BLAS threads 8, not 2" in text
        assert await compare(ALIKE) == []


def described_with(**environment: str) -> dict[str, str]:
    """Return the description of a process with these variables."""
    code = "import json, asyncpar.elasticity.arithmetic as a; print(json.dumps(a.describe_arithmetic()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.process
def test_a_process_knows_its_processor_and_its_libraries() -> None:
    found = describe_arithmetic()
    assert found["processor"]
    assert found["numpy"] == np.__version__
    assert found["BLAS"]


@with_kernels
@pytest.mark.process
def test_the_variables_that_a_warning_names_make_processes_alike() -> None:
    wanted = {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    found = described_with(**wanted)
    assert (found["BLAS threads"], found["BLAS kernel"]) == ("1", "Nehalem")
    names = describe_arithmetic()["instructions of numpy"].split()
    if names == ["baseline"]:  # no variable takes anything away from this processor
        return
    for kept in range(len(names)):
        without = described_with(NPY_DISABLE_CPU_FEATURES=" ".join(names[kept:]))
        assert without["instructions of numpy"].split() == (names[:kept] or ["baseline"])


@pytest.fixture
def group(tmp_path: Path) -> Iterator[AgentGroup]:
    made = AgentGroup(tmp_path)
    yield made
    made.close()


def test_a_rank_that_joins_a_job_and_computes_otherwise_is_let_in_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    described = iter([ALIKE, ALIKE, {**ALIKE, "BLAS kernel": "Haswell"}])
    monkeypatch.setattr(job_worlds, "describe_arithmetic", lambda: next(described))

    async def main() -> list[Result]:
        async with ElasticWorlds(2) as worlds:

            def join(where: str, step: ElasticStep) -> None:
                if (where, step.number) == ("computed", 3) and "m2" not in worlds.tasks:
                    assert caplog.messages == [], "those of the first world compute alike"
                    worlds.start("m2", lambda source: train(source, "m2"))

            first = worlds.start("m0", lambda source: train(source, "m0", on_step=join))
            results = await asyncio.gather(first, worlds.start("m1", lambda source: train(source, "m1")))
            return [*results, await worlds.tasks["m2"]]

    with caplog.at_level(logging.WARNING, "asyncpar.elasticity.arithmetic"):
        one, other, joined = run_virtual(main())
    assert one.digest == other.digest == joined.digest
    (text,) = caplog.messages
    assert UNLIKE in text
    assert "rank 2 on host has BLAS kernel Haswell, not SkylakeX (set OPENBLAS_CORETYPE on all hosts" in text


@with_kernels
@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(180)
def test_a_joiner_with_another_kernel_is_let_in_and_named_on_all_hosts(group: AgentGroup) -> None:
    for name, kernel in (("one", "Prescott"), ("two", "Prescott")):
        group.start(name, environment={"OPENBLAS_CORETYPE": kernel})
        eventually(lambda name=name: group.host(name) is not None, name)  # type: ignore[misc]
    launcher = group.launch(TRAINING, "400", options=("--nnodes", "2:3", "--elastic", "ranks", "--last-call", "0"))
    eventually(lambda: group.trains(2), "training on two hosts")
    group.start("three", environment={"OPENBLAS_CORETYPE": "Nehalem"})
    eventually(lambda: group.trains(3), "training on three hosts")
    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=60) == 0, group.output("launch")
    warnings = {name: [line for line in group.output(name).splitlines() if UNLIKE in line] for name in group.agents}
    assert [len(lines) for lines in warnings.values()] == [1, 1, 1], "one on each host"
    assert len({line.partition(UNLIKE)[2] for lines in warnings.values() for line in lines}) == 1
    expected = r"on three has BLAS kernel Nehalem, not \w+ \(set OPENBLAS_CORETYPE on all hosts"
    assert re.search(expected, warnings["one"][0])
