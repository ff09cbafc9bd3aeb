"""scripts/examples/torch_ddp.py and torch_hook.py as their users run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program_host import ProgramHost

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
DDP, HOOK = EXAMPLES / "torch_ddp.py", EXAMPLES / "torch_hook.py"
PROGRAMS = {
    "int8": [str(DDP), "--steps", "3", "--codec", "int8"],
    "fsdp": [str(DDP), "--steps", "3", "--fsdp"],
    "hook": [str(HOOK)],
}
ALL_OF_THEM = """
import json, os, runpy, sys

for name, words in json.loads(sys.argv[1]).items():
    if os.environ["RANK"] == "0":
        print("program", name, flush=True)
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
"""
"""A program that is all programs one after another: starting torch takes long."""

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


def alone() -> dict[str, str]:
    """Return the environment of a program that no launcher has started."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each of ``PROGRAMS`` printed on two ranks."""
    program = tmp_path_factory.mktemp("examples") / "program.py"
    program.write_text(ALL_OF_THEM)
    launch = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", "2"]
    command = [*launch, str(program), json.dumps(PROGRAMS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=160, check=False, env=alone())
    assert done.returncode == 0, done.stdout + done.stderr
    parts = re.split(r"(?m)^.*program (\w+)$", done.stdout)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", ["int8", "fsdp"])
def test_it_trains(name: str, outputs: dict[str, str]) -> None:
    assert re.search(r"2 ranks, 3 steps in .* loss 0\.[0-9]+", outputs[name]), outputs


def test_the_model_learns_with_compressed_gradients(outputs: dict[str, str]) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", outputs["hook"])]
    assert len(losses) == 3
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--steps", "0"), "--steps: expected at least 1, got 0"),
        (("--fsdp", "--codec", "int8"), "--codec: expected DDP on asyncpar"),
        (("--codec", "zip"), "--codec: codec: expected one of none, "),
        (("--backend", "pigeon"), "--backend: expected one of "),
    ],
    ids=["steps", "fsdp and codec", "codec", "backend"],
)
def test_words_that_make_no_sense_are_one_line(
    words: tuple[str, ...], expected: str, host: ProgramHost, tmp_path: Path
) -> None:
    done = host.run(DDP, *words, home=tmp_path, environment=alone())
    assert done.returncode == 2
    errors = done.stderr
    assert f"torch_ddp.py: error: {expected}" in errors.strip().splitlines()[-1]
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (DDP, "torch_ddp: start it with: torchrun --nproc-per-node 2 torch_ddp.py, or asyncpar launch\n"),
        (HOOK, "torch_hook: start it with: asyncpar launch --nproc-per-node 2 torch_hook.py\n"),
    ],
    ids=["ddp", "hook"],
)
def test_without_a_launcher_it_says_how_to_start_it(
    program: Path, message: str, host: ProgramHost, tmp_path: Path
) -> None:
    done = host.run(program, home=tmp_path, environment=alone())
    assert done.returncode == 1
    assert done.stderr == message


def test_one_rank_is_too_few_for_the_hook(host: ProgramHost, tmp_path: Path) -> None:
    done = host.run(HOOK, home=tmp_path, environment=alone() | {"RANK": "0", "WORLD_SIZE": "1"})
    assert done.returncode == 1
    assert done.stderr == (
        "torch_hook: expected at least 2 ranks, which have gradients to exchange: --nproc-per-node 2\n"
    )
