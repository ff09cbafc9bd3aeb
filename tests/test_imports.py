"""Costs and contents of ``import asyncpar``."""

from __future__ import annotations

import subprocess
import sys

import pytest

import asyncpar


def test_every_public_name_is_there() -> None:
    found = {name: getattr(asyncpar, name) for name in asyncpar.__all__}

    assert {"Actor", "Communicator", "Node", "UsageError", "blocking", "init", "run", "testing"} <= found.keys()
    assert set(asyncpar.__all__) <= set(dir(asyncpar))


_COMMANDS = {"click", "rich", "psutil"}
_TRAINING = {f"asyncpar.{name}" for name in ("codecs", "elasticity", "gradsync", "nn", "parallel", "pipeline", "train")}
_NEVER = {"cloudpickle", "cryptography", "importlib.metadata", "multiprocessing", "torch"}
NOT_LOADED = {
    "asyncpar": {"asyncio", "asyncpar.node", "dataclasses", "grpc", "msgspec", "numpy", *_COMMANDS, *_NEVER},
    "asyncpar.node": {"asyncpar.launch", "html", "numpy.ma", *_COMMANDS, *_NEVER, *_TRAINING},
    "asyncpar.launch.cli": {"asyncio", "grpc", "msgspec", "numpy", "psutil", "rich", *_NEVER},
    "asyncpar.launch.run": {"asyncpar.actors", "asyncpar.collectives", "numpy", "rich", *_NEVER, *_TRAINING},
    "asyncpar.launch.post_mortem": {"asyncpar.net", "asyncio", "grpc", "numpy", *_COMMANDS, *_NEVER, *_TRAINING},
    "asyncpar.launch.agents.commands": {"asyncpar.collectives", "numpy", "rich", *_NEVER, *_TRAINING},
    "asyncpar.launch.agents.agent_process": {"asyncpar.actors", "numpy", "rich", *_NEVER, *_TRAINING},
    "asyncpar.elasticity.job": {
        *(f"asyncpar.{name}" for name in ("backends", "gradsync", "launch", "pipeline", "tensors", "train", "zero")),
        *{"click", "html", "numpy.ma", "rich"},
        *_NEVER,
    },
    "asyncpar.engines.local": {"asyncpar.actors", "dask", "numpy", "ray", "rich", *_NEVER, *_TRAINING},
    "asyncpar.engines.rank_program": {"dask", "grpc", "ray", *_COMMANDS, *_NEVER, *_TRAINING},
    "asyncpar.testing.engine_programs": {"asyncpar.node", "grpc", "numpy", *_COMMANDS, *_NEVER, *_TRAINING},
}
"""What each entry must not load.  torch imports the package in every program where it is installed, also in those that
will fork; ranks start no sooner than the command line has been read; every process of a job pays for what is here."""


@pytest.mark.parametrize("module", NOT_LOADED)
def test_importing_loads_nothing_that_was_not_asked_for(module: str) -> None:
    program = f"import sys, {module}; print(*sorted(sys.modules))"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert sorted(NOT_LOADED[module] & set(done.stdout.split())) == []


def test_a_rank_that_reduces_and_sends_arrays_loads_no_masked_arrays() -> None:
    """They are a sixth of the time that numpy takes, at the first operation of every rank."""
    program = """
import sys
import numpy as np
import asyncpar as ap

async def main():
    async with ap.init() as node:
        ones = np.ones(8, np.float32)
        await node.world.all_reduce(ones)
        await node.world.all_gather(ones)
        await node.world.broadcast_object({"ones": ones})
        print("numpy.ma" in sys.modules)

ap.run(main)
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


def test_the_public_path_of_settings_that_moved_still_works() -> None:
    program = "from asyncpar.config.parallel import ThreeDParallelismConfig as old; from asyncpar import hybrid; "
    program += "assert old is hybrid.ThreeDParallelismConfig"

    done = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True, check=True)

    assert "DeprecationWarning: asyncpar.config.parallel has moved" in done.stderr
