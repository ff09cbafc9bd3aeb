"""The language model on engines: the losses of ``asyncpar launch``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.program_host import ProgramHost
from tests.soak import first, is_soak

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
TINY = ("--steps", "3", "--batch", "8", "--seq", "16", "--dim", "32", "--layers", "1", "--heads", "2")

pytestmark = [pytest.mark.process, pytest.mark.timeout(240), pytest.mark.usefixtures("no_pictures")]


def last_line(*command: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=230, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples with two ranks in the place of four: each takes a second to start."""
    scripts = tmp_path_factory.mktemp("scripts")
    examples = scripts / "examples"
    shutil.copytree(EXAMPLES, examples)
    (scripts / "bench").symlink_to(EXAMPLES.parent / "bench")
    for name, four, two in (
        ("language_model", "RANKS = 4", "RANKS = 2"),
        ("kubernetes_pods", '"--tasks-per-node", "2"', '"--tasks-per-node", "1"'),
    ):
        program = examples / "engines" / f"{name}.py"
        text = program.read_text()
        assert text.count(four) == 1
        program.write_text(text.replace(four, two))
    return examples


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, no_pictures: None) -> dict[str, Any]:
    script, out = str(EXAMPLES / "train_lm.py"), str(tmp_path_factory.mktemp("out"))
    return last_line("-m", "asyncpar", "launch", "--nproc-per-node", "2", script, *TINY, "--out", out)


@pytest.mark.parametrize("engine", first(1, ["local", "dask_cluster", "ray_cluster"]))
def test_an_engine_has_the_losses_of_the_launcher(
    engine: str, examples: Path, launched: dict[str, Any], host: ProgramHost, tmp_path: Path
) -> None:
    if engine == "dask_cluster":
        pytest.importorskip("distributed", reason="distributed (extra dask) is not installed")
    if engine == "ray_cluster":
        pytest.importorskip("ray", reason="ray (extra ray) is not installed; scripts/test-ray has it")
    program = examples / "engines" / f"{engine}.py"
    if engine == "local" and not is_soak():
        done = host.run(program, *TINY, home=tmp_path, environment=os.environ)
        assert done.returncode == 0, done.stderr
        placed = json.loads(done.stdout.splitlines()[-1])
    else:
        placed = last_line(str(program), *TINY)
    assert [placed[name] for name in ("ranks", "first_loss", "last_loss")] == [
        launched[name] for name in ("ranks", "first_loss", "last_loss")
    ]


@pytest.mark.soak
def test_simulated_pods_have_the_losses_of_the_launcher(examples: Path, launched: dict[str, Any]) -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command (iproute2)")
    placed = last_line(str(examples / "engines" / "kubernetes_pods.py"), *TINY)
    assert (placed["engine"], placed["ranks"]) == ("kubernetes", 2)
    # two hosts add up losses and gradients in another order than one
    assert placed["first_loss"] == pytest.approx(launched["first_loss"], rel=1e-12)
    assert placed["last_loss"] == pytest.approx(launched["last_loss"], rel=1e-6)
