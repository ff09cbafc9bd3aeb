"""A dashboard over a synthetic job, and Debian's browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from asyncpar.dashboard.picture import Painter
from asyncpar.dashboard.server import DashboardServer
from asyncpar.observe.pipeline_runs import draw_run
from asyncpar.testing.jobs import SyntheticJob, Trouble, record_pipeline


async def show(serving: DashboardServer, size: int, *, seconds: int = 42, trouble: Trouble = Trouble.LATE) -> None:
    """Show the first ``seconds`` of a job, whose first ranks (16 at most) are a pipeline."""
    stages = min(size, 16)
    schedule = draw_run(record_pipeline(stages, micro_batches=2 * stages))
    painter = Painter()
    for job in SyntheticJob(size, trouble=trouble).summaries(seconds):
        await serving.show(painter.paint(job, schedule=schedule))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Chromium; ``.ci/run`` installs it, and says that tests without it fail."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        reason = "needs chromium (apt-get install chromium)"
        if os.environ.get("ASYNCPAR_TEST_BROWSER") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        await started.close()
