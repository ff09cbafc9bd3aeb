"""Real processes train as one does: a pipeline of two, with ``--soak`` four and eight in other layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.zero import ZeROStage
from tests.hybrid import training_rank
from tests.hybrid.worlds import train_alone
from tests.soak import first

pytestmark = pytest.mark.process

PATIENCE = 55.0
STEPS = 3

LAYOUTS = [
    (1, 1, 2, ZeROStage.NONE, PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD),
    (2, 1, 2, ZeROStage.STAGE3, PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD),
    (2, 2, 2, ZeROStage.STAGE1, PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD),
    (4, 1, 2, ZeROStage.STAGE3, PipelineScheduleType.ZERO_BUBBLE),
    (1, 4, 2, ZeROStage.NONE, PipelineScheduleType.ZBV),
    (8, 1, 1, ZeROStage.STAGE2, PipelineScheduleType.GPIPE),
]


@pytest.mark.parametrize(("dp", "tp", "pp", "stage", "schedule"), first(1, LAYOUTS))
def test_processes_train_as_one_does(
    dp: int, tp: int, pp: int, stage: ZeROStage, schedule: PipelineScheduleType
) -> None:
    script = Path(training_rank.__file__)
    launch = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", str(dp * tp * pp), str(script)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCPAR_", "COV_"))}
    environment["PYTHONPATH"] = str(script.parents[2])
    done = subprocess.run(
        [*launch, *map(str, (dp, tp, pp)), stage, schedule, str(STEPS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)
    config = training_rank.make(dp, tp, pp, stage, schedule)
    alone = train_alone(training_rank.MODEL, config, rows=training_rank.ROWS, steps=STEPS)
    assert together["agree"]
    np.testing.assert_allclose(together["losses"], alone.losses, rtol=1e-12)
    np.testing.assert_allclose(together["norms"], alone.norms, rtol=1e-11)
