"""Every example with one thing wrong (no launcher, a missing extra, a word that makes no sense) says it in one line.

Those of ``test_small_programs`` and of torch have theirs beside them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.examples.test_small_programs import EXAMPLES, LAUNCH, run, run_without
from tests.program_host import ProgramHost

pytestmark = pytest.mark.process

HARMLESS = {"actors", "blocking", "first_steps", "mesh_training", "own_model", "three_dimensions"}
"""They take no words and need no extra, and any number of ranks runs them."""
ELSEWHERE = {
    "elastic_lm",
    "jax_data_parallel",
    "ring_suite",
    "stream_service",
    "torch_hook",
    "train_lm",
    "train_resume",
    "two_hosts",
}
"""Their own tests have what may be wrong."""

EXTRAS = [
    ("engines/dask_cluster", "distributed", "dask"),
    ("engines/ray_cluster", "ray", "ray"),
    ("serve_weights", "uvicorn", "serve"),
]
WORDS = [
    ("backends", ["--backend", "pigeon"], "backends: backend: expected one of ", 1),
    ("data_parallel", ["--staleness", "-1"], "--staleness: expected 0 or more steps, got -1", 2),
    ("elastic_actors", ["many"], "elastic_actors: expected a number of steps, got 'many'", 1),
    ("engines/local", ["--steps", "many"], "train_lm: argument --steps: invalid int value: 'many'", 2),
    ("engines/ranks", ["--codec", "zip"], "train_lm: codec: expected one of ", 2),
    ("engines/slurm_job", ["--seq", "0"], "train_lm: ", 2),
]


def last_line(errors: str) -> str:
    assert "Traceback" not in errors, errors
    return errors.strip().splitlines()[-1]


def test_no_example_is_forgotten() -> None:
    tested = {Path(name).name for name in [case[0] for case in EXTRAS] + [case[0] for case in WORDS]}
    folders = (EXAMPLES, EXAMPLES / "engines")
    found = {path.stem for folder in folders for path in folder.glob("*.py")}
    assert found - HARMLESS - ELSEWHERE - tested == {"kubernetes_pods", "language_model", "torch_ddp", "word_count"}


@pytest.mark.parametrize(("name", "module", "extra"), EXTRAS)
def test_a_missing_extra_is_named(name: str, module: str, extra: str, tmp_path: Path) -> None:
    line = run_without(module, tmp_path, EXAMPLES / f"{name}.py")
    assert line == f'{Path(name).name}: there is no {module}: pip install "asyncpar[{extra}]"'


@pytest.mark.parametrize(("name", "module"), [("torch_ddp", "torch"), ("jax_data_parallel", "jax")])
def test_torch_and_jax_are_named_where_they_are_missing(name: str, module: str, tmp_path: Path) -> None:
    line = run_without(module, tmp_path, EXAMPLES / f"{name}.py")
    assert line == f'{name}: asyncpar.{module} needs {module}: pip install "asyncpar[{module}]"'


def test_a_library_of_a_backend_is_named_where_it_is_missing(tmp_path: Path) -> None:
    line = run_without("mpi4py", tmp_path, EXAMPLES / "backends.py", "--backend", "mpi")
    assert line.startswith("backends: backend: mpi needs mpi4py")
    assert line.endswith('pip install "asyncpar[mpi]"')


@pytest.mark.parametrize(("name", "words", "expected", "status"), WORDS)
def test_words_that_make_no_sense_are_one_line(
    name: str, words: list[str], expected: str, status: int, host: ProgramHost
) -> None:
    _, errors = run(EXAMPLES / f"{name}.py", *words, status=status, host=host)
    assert expected in last_line(errors)


def test_a_job_without_a_cluster_says_what_is_missing(tmp_path: Path, host: ProgramHost) -> None:
    _, errors = run(EXAMPLES / "engines" / "slurm_job.py", status=1, host=host, PATH=str(tmp_path))
    assert last_line(errors).startswith("slurm_job: sbatch: it is not in PATH")


def test_pods_without_the_command_ip_say_what_to_install(tmp_path: Path, host: ProgramHost) -> None:
    _, errors = run(EXAMPLES / "engines" / "kubernetes_pods.py", status=1, host=host, PATH=str(tmp_path))
    assert errors == "kubernetes_pods: network namespaces need root and the command ip (apt-get install iproute2)\n"


def test_pods_with_a_wrong_option_say_so_before_there_are_any(host: ProgramHost) -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command (iproute2)")
    _, errors = run(EXAMPLES / "engines" / "kubernetes_pods.py", "--steps", "many", status=2, host=host)
    assert errors == "train_lm: argument --steps: invalid int value: 'many'\n"


@pytest.mark.soak  # each has a test of its own, with two ranks or three
@pytest.mark.parametrize("name", sorted(HARMLESS - {"actors", "first_steps", "mesh_training"}))
def test_three_ranks_run_what_takes_any_number(name: str) -> None:
    run(*LAUNCH, 3, EXAMPLES / f"{name}.py")
