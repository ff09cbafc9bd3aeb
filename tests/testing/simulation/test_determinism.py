"""Equal seeds give equal runs: in one process, in others, whatever the order of hashes there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncpar.testing.simulation import explore, simulate
from asyncpar.testing.simulation.patches import BOUND_CLOCKS
from tests.soak import chosen
from tests.testing.simulation.programs import bits, check_bits, everything, sums

ROOT = Path(__file__).resolve().parents[3]
ELASTIC = ("kill", "crash", "restart", "pause", "isolate", "reset", "half_open", "slow", "clock")
IMPORTS_OF_TIME = re.compile(r"\bfrom\s+time\b")
"""What a module has that imports a clock by its name; few have, and to parse all takes seconds."""
PRINT_HASHES = """
import sys
from asyncpar.testing.simulation import simulate
from tests.testing.simulation.programs import bits, everything, sums
seeds = int(sys.argv[1])
for program, seed in ((everything, 1), (sums, 3), (everything, 2), (sums, 4), (sums, 5))[: seeds + 1]:
    print(simulate(program, size=3, seed=seed, faults=3, shrinks=False).trace_hash)
for seed in range(1, seeds + 1):
    print(simulate(bits, size=3, seed=seed, elastic=True, faults=2, shrinks=False).trace_hash)
print(simulate(everything, size=3, seed=6).results)
"""


def test_runs_of_a_seed_have_one_hash() -> None:
    hashes = {simulate(everything, size=3, seed=7).trace_hash for _ in range(chosen(5, soak=100))}
    assert len(hashes) == 1


def test_seeds_run_twice_with_faults_have_equal_hashes() -> None:
    seeds = range(chosen(4, soak=100))
    one, other = (explore(sums, size=4, seeds=seeds, faults=3) for _ in range(2))
    assert [run.trace_hash for run in one] == [run.trace_hash for run in other]
    assert len({run.trace_hash for run in one}) == len(seeds)


def test_elastic_jobs_run_twice_with_faults_have_equal_hashes() -> None:
    seeds = range(chosen(2, soak=100))
    one, other = (
        explore(bits, size=3, seeds=seeds, elastic=True, faults=3, kinds=ELASTIC, check=check_bits) for _ in range(2)
    )
    assert [run.trace_hash for run in one] == [run.trace_hash for run in other]
    assert len({run.trace_hash for run in one}) == len(seeds)


@pytest.mark.process
def test_processes_with_other_orders_of_hashes_have_equal_runs() -> None:
    seeds = chosen(1, soak=4)
    printed = {
        subprocess.run(
            [sys.executable, "-c", PRINT_HASHES, str(seeds)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in chosen(("0", "12345"), soak=("0", "1", "2", "12345"))
    }
    assert len(printed) == 1
    assert printed.pop().count("\n") == 2 * seeds + 2


def test_every_clock_that_a_module_imports_by_its_name_is_known() -> None:
    found = set()
    for path in (ROOT / "asyncpar").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if IMPORTS_OF_TIME.search(text) else ():
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found |= {(module, name.asname or name.name) for name in node.names}
    assert found == set(BOUND_CLOCKS)
