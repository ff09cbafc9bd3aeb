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


@pytest.mark.parametrize("module", ["asyncpar", "asyncpar.launch.cli"])
def test_importing_loads_nothing_that_was_not_asked_for(module: str) -> None:
    """torch imports the package in every program where it is installed, also in those that will fork.

    And ranks start no sooner than the command line has been read.
    """
    program = f"import sys, {module}; print(sorted({{'grpc', 'numpy', 'torch'}} & sys.modules.keys()))"

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"


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
