"""``asyncpar.jax`` in compiled functions of two processes: results, gradients, errors; and its example."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.extras import need
from tests.docs.programs import Shown, pieces_that_need, run_piece

ROOT = Path(__file__).parents[2]
LENGTH = 5
LAUNCH = (sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", "2")

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    need("jax", 'pip install "asyncpar[jax]"')
    program = Path(__file__).with_name("jax_program.py")
    done = subprocess.run([*LAUNCH, str(program)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1].removeprefix("[vm:0] "))
    return found


def inputs(rank: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.arange(1.0, LENGTH + 1) * (rank + 1)


SUM = inputs(0) + inputs(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_results_and_gradients_are_those_of_the_formulas(results: list[dict[str, Any]], rank: int) -> None:
    """A loss is the sum of squares of a result ``y``, so that each rank's gradient of its result is ``2 y``."""
    found = results[rank]
    square = np.arange(1.0, 7.0).reshape(2, 3)
    exchanged = np.array([square[rank], 2 * square[rank]])
    for name, result, gradient in (
        ("all_reduce sum", SUM, 2 * 2 * SUM),
        ("all_reduce mean", SUM / 2, SUM),
        ("all_gather", [inputs(0), inputs(1)], 2 * 2 * inputs(rank)),
        ("reduce_scatter sum", SUM[:3] if rank == 0 else SUM[3:], 2 * SUM),
        ("reduce_scatter mean", (SUM[:3] if rank == 0 else SUM[3:]) / 2, SUM / 2),
        ("broadcast", inputs(1), 2 * 2 * inputs(1) if rank == 1 else 0 * SUM),
        ("all_to_all", exchanged, 2 * square * (rank + 1)),
    ):
        assert len(found[name]) == 2
        np.testing.assert_allclose(found[name][0], result, err_msg=name)
        np.testing.assert_allclose(found[name][1], gradient, err_msg=name)


@pytest.mark.parametrize("rank", [0, 1])
def test_trees_loops_and_large_arrays(results: list[dict[str, Any]], rank: int) -> None:
    found = results[rank]
    assert found["all_reduce bfloat16"] == SUM.tolist()
    assert found["tree"] == {"a": SUM.tolist(), "b": [1.0, [1.0, 3.0, 5.0]]}
    assert found["gradient of a tree"] == {"a": (4 * SUM).tolist(), "b": [2.0, 0.0]}
    assert found["empty tree"]
    assert found["scan"] == [(SUM / 2).tolist(), [inputs(rank).sum(), SUM.sum() / 2, SUM.sum() / 2]]
    assert found["order"] == [(2 * inputs(1)).tolist(), SUM.tolist()]
    assert found["not compiled"] == found["afterwards"] == SUM.tolist()
    assert found["large"] == 6_000_000.0
    assert found["beside"] == [2.0 + 400_000.0] * 20


@pytest.mark.parametrize("rank", [0, 1])
def test_errors_say_what_is_wrong(results: list[dict[str, Any]], rank: int) -> None:
    found = results[rank]
    assert found["max has no gradient"] == "op: gradients flow through sum and mean, got 'max'"
    assert found["another communicator"].startswith("comm: expected a communicator of asyncpar.blocking, got ")
    assert found["another rule"].startswith("op: expected one of sum, mean, ")
    assert found["another shape"].startswith("x: expected shape (2, ...), one entry per rank, got (5,)")
    assert found["another root"] == "root: expected a rank 0..1 of the group, got 2"
    traced = "x: expected a numpy array, got a value that JAX traces; inside compiled functions use asyncpar.jax"
    assert found["traced"].endswith(traced)
    assert "vmap" in found["vmap"]
    assert "OperationMismatch: rank 0 calls all_reduce_many(float32[3], sum) where rank 1 calls" in found["refused"]


@pytest.mark.parametrize("shown", pieces_that_need("jax"), ids=str)
def test_a_piece_of_a_program_in_the_documentation_runs(shown: Shown, tmp_path: Path) -> None:
    need("jax", 'pip install "asyncpar[jax]"')
    run_piece(shown, tmp_path)


@pytest.mark.parametrize("launch", [(sys.executable,), LAUNCH])
def test_the_example_trains_as_one_process_does(launch: tuple[str, ...]) -> None:
    need("jax", 'pip install "asyncpar[jax]"')
    script = ROOT / "scripts" / "examples" / "jax_data_parallel.py"
    done = subprocess.run([*launch, str(script)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].removeprefix("[vm:0] ").split()
    assert words[:3] == [str(1 if len(launch) == 1 else 2), "rank(s),", "loss"]
    assert float(words[5].rstrip(",")) < float(words[3])
    assert float(words[6]) < 1e-5
