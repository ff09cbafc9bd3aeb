"""Save checkpoint after checkpoint until a kill, at a random byte, ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from random import Random

from asyncpar.checkpoint import LocalFiles, NewFile, latest
from asyncpar.testing.world import local_world
from tests.checkpoint.layouts import Layout, small_model
from tests.checkpoint.worlds import each, saving

LAYOUT = Layout(dp=2, tp=2)


class DeadlyFiles(LocalFiles):
    """Real files; after so many bytes the process kills itself, in the middle of a write or before an operation."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def spend(self, amount: int) -> None:
        self._budget -= amount
        if self._budget <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def left(self) -> int:
        return self._budget

    def create(self, path: Path) -> NewFile:
        self.spend(20)
        return _Deadly(self, super().create(path))

    def sync_folder(self, path: Path) -> None:
        self.spend(20)
        super().sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self.spend(20)
        super().rename(old, new)
        self.spend(20)

    def remove_file(self, path: Path) -> None:
        self.spend(20)
        super().remove_file(path)
        self.spend(20)

    def remove_folder(self, path: Path) -> None:
        for child in path.iterdir():
            self.remove_file(child)
        super().remove_folder(path)


class _Deadly(NewFile):
    def __init__(self, files: DeadlyFiles, file: NewFile) -> None:
        self._files = files
        self._file = file

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content[: max(0, self._files.left())])
        self._files.spend(len(content))

    def sync(self) -> None:
        self._files.spend(20)
        self._file.sync()

    def close(self) -> None:
        self._file.close()


async def main(folder: Path, seed: int) -> None:
    last = latest(folder) if folder.exists() else None
    step = 0 if last is None else last.step + 1
    files = DeadlyFiles(Random(seed).randint(1, 20_000) + (10_000 if last is None else 0))
    async with local_world(LAYOUT.size) as nodes:
        while True:
            tensors = small_model(seed=100 * step)
            await each(nodes, lambda node: saving(node, folder, tensors, LAYOUT, step=step, keep=2, files=files))  # noqa: B023
            print(step, flush=True)
            step += 1


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
