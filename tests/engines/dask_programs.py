"""Programs for workers of Dask."""

from __future__ import annotations

import asyncpar as ap


class WorkerActor(ap.Actor):
    """Lives on the event loop of a worker."""

    @ap.endpoint
    async def place(self) -> list[str]:
        """Return the address of the worker, and the number of ranks that the group has counted."""
        from distributed import Worker

        total = await self.group("member").all_gather_object(1)
        (worker,) = Worker._instances  # noqa: SLF001  # as get_worker does, which is for tasks
        return [worker.address, str(sum(total))]
