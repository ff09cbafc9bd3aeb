"""``init_process_group("nccl")`` in a launched job: with the libraries on no rank, or on one of two."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.backends.extras import ROOT, outputs_of
from tests.soak import first

PROGRAM = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
import pytest
import asyncpar as ap
from asyncpar.parallel import init_process_group
from tests.device.nccl_stand_in import given

if os.environ["RANK"] in sys.argv[1:]:
    given(pytest.MonkeyPatch())
else:
    sys.modules["nccl.core"] = None

async def main():
    try:
        await init_process_group("nccl")
    except ap.UsageError as error:
        sys.stdout.write(f"refused {{type(error).__name__}} {{error}}\\n")  # at once: two ranks write

asyncio.run(main())
"""


@pytest.mark.parametrize(("have", "lacking"), first(1, [(["0"], 1), ([], 0)]))
def test_all_ranks_of_a_job_learn_which_rank_has_no_nccl(have: list[str], lacking: int, tmp_path: Path) -> None:
    program = tmp_path / "open.py"
    program.write_text(PROGRAM.format(root=str(ROOT)))
    command = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node=2", str(program), *have]
    [output] = outputs_of(command, home=tmp_path)
    refusal = f"refused BackendUnavailable backend: rank {lacking} has no NCCL: nccl: needs nccl4py"
    assert output.count(refusal) == 2, output
    assert output.count('pip install "asyncpar[nccl]"; without NCCL use native, mpi or gloo on all ranks') == 2, output
