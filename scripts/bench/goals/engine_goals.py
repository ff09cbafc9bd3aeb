"""Goals of engines, B1 to B6.  All of them take half an hour; they need root, and Slurm and Ray of the tests.

The places of all engines are processes of one host with two cores.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from scripts.bench.goals.goal import Goal, Read, last_object, lines


def object_with(key: str, value: str, show: Callable[[dict[str, Any]], str]) -> Read:
    """Return what shows the JSON object, of those that are lines of the output, in which ``key`` is ``value``."""

    def read(output: str) -> str:
        found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        wanted = [one for one in found if one.get(key) == value]
        if not wanted:
            raise SystemExit(f"expected a JSON object with {key} {value}, got {output[-400:]!r}")
        return show(wanted[-1])

    return read


def _kills(found: dict[str, Any]) -> str:
    return f"median {found['median']:.2f} s, slowest {found['most']:.2f} s of {found.get('kills', found.get('rounds'))}"


def _start(found: dict[str, Any]) -> str:
    return f"median {found['median']:.2f} s, slowest {found['most']:.2f} s; the first {found['first']:.2f} s"


def _pods(found: dict[str, Any]) -> str:
    return (
        f"{found['well']} of {found['starts']}, at most {found['most_seconds_after_names']:.1f} s after names resolved "
        f"(after {found['names_after']:.0f} s)"
    )


def _pairs(found: dict[str, Any]) -> str:
    return f"{found['jobs']} jobs in {found['seconds']:.0f} s"


def _collective(found: dict[str, Any]) -> str:
    return f"{found['times_faster']:.2f} times ({found['asyncpar_ms']:.2f} ms, GLOO {found['gloo_ms']:.2f} ms)"


PASSED = lines(r"(\d+) passed", "{} tests passed")
STARTS = "scripts/bench/run engines --rounds 5"
FAULTS = "scripts/bench/run engine_faults --pairs 100 --kills 10 --cells 20"
SLURM = "scripts/bench/run slurm_faults --kills 10"
PYTHON_STARTS = "Python starts in each rank and imports numpy, on two cores"

GOALS = (
    Goal(
        "B1",
        "a task of srun killed on three nodes: who it was within 2 s",
        SLURM,
        object_with("what", "ranks", _kills),
        "the others see the connection end; srun prints what they say",
    ),
    Goal(
        "B1, ap.slurm",
        "a node's agent killed: the exception within 2 s",
        SLURM,
        object_with("what", "nodes", _kills),
        "srun sees its task end, then the other ranks have a second",
    ),
    Goal("B2", "4 ranks on Dask: 3 s", STARTS, object_with("engine", "dask", _start), PYTHON_STARTS),
    Goal("B2, local", "4 ranks on this machine: 2 s", STARTS, object_with("engine", "local", _start), PYTHON_STARTS),
    Goal(
        "B2, deaths",
        "a worker's SIGKILL at the caller: 2 s",
        FAULTS,
        object_with("what", "kills", _kills),
        "a question for events ends with the connection; the other ranks have a second",
    ),
    Goal(
        "B2, pairs",
        "100 jobs at once that share workers: no deadlock",
        FAULTS,
        object_with("what", "pairs", _pairs),
        "they take turns: five workers, two for each job",
    ),
    Goal(
        "B3",
        "ray.util.collective, all-reduce of 1 MB: twice its GLOO",
        "scripts/bench/run ray_collective --rounds 200",
        last_object(_collective),
        "both share the cores with Ray",
    ),
    Goal(
        "B4",
        "pods whose names resolve after 30 s: 20 of 20 start",
        "scripts/bench/run pod_starts --starts 20",
        last_object(_pods),
        "how often a launcher looks a name up",
    ),
    Goal(
        "B4, manifests",
        "valid for JobSet and Kubernetes 1.25 to 1.37",
        ".venv-backends/bin/python -m pytest -q tests/launchers/test_manifest_schemas.py",
        PASSED,
        "-",
    ),
    Goal(
        "B5",
        "mpiexec of MPICH, Open MPI, Intel MPI without mpi4py",
        ".venv-backends/bin/python -m pytest -q tests/launchers/test_mpiexec.py",
        PASSED,
        "-",
    ),
    Goal(
        "B5, cells",
        "a notebook's cell interrupted and launched again: 20 of 20",
        FAULTS,
        object_with("what", "cells", lambda found: f"{found['launched_again']} of {found['rounds']}"),
        "-",
    ),
    *(
        Goal(f"B6, {engine}", "the suite of twelve behaviours", command, PASSED, "-")
        for engine, command in (
            ("local", "python -m pytest -q tests/engines/test_local.py -k TestLocal"),
            ("Dask", "python -m pytest -q --soak tests/engines/test_dask.py -k TestDask"),
            ("Ray", "scripts/test-ray -q -k TestRay"),
            ("Slurm", "scripts/test-slurm -q -k TestSlurm"),
            ("MPI", "scripts/test-backends -q -k TestMpi"),
        )
    ),
)
