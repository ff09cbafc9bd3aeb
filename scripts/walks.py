"""Count the files that one operation enters, its functions, and its changes from file to file.

    python scripts/walks.py            # all walks; that of torch where torch is installed
    python scripts/walks.py ask tcp    # some
    python scripts/walks.py shm --files    # with the names of the files

Two ranks in processes of their own run an operation until it is in its steady state.  Then every call of a Python
function of the package is counted, in all threads, while one operation runs.  Of several operations the one with the
median number of functions is shown, as rank 0 saw it; an ask is counted on both ranks together.

A launch is counted once, in the process of the command: from the command line to the exit code, without imports.

Only the operation is counted.  Barriers stand between operations, so counting begins when the last one is over and ends
before the next one can begin on any rank.  Ranks run no loop watch, whose thread looks every 50 ms whether the loop is
blocked, whatever the loop does.  Operations run in a task beside the main one, which enters ``runner``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from asyncpar import Node

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WALKS: Final = {
    "shm": "all_reduce, 4 MB, shared memory",
    "tcp": "all_reduce, 4 MB, TCP",
    "ask": "ask, 1 KB, TCP, both ends",
    "int8": "gradient step, int8, one 256 KiB bucket, TCP",
    "pipeline": "training step, pipeline of 2 ranks, TCP",
    "torch": "torch all_reduce, 1 MB, shared memory",
    "launch": "asyncpar launch of 4 ranks, the command itself",
}
_TRANSPORT: Final = {"shm": "shm", "torch": "shm"}
_PACKAGE: Final = f"{ROOT}{os.sep}asyncpar{os.sep}"
_MARK: Final = "COURSE "
_WARM: Final = 20
_COUNTED: Final = 9
_LAUNCHED: Final = 4


class Course(NamedTuple):
    """The functions that an operation entered, as ``file:line``, and the number of changes of file."""

    functions: frozenset[str]
    changes: int

    def __add__(self, other: Course) -> Course:  # type: ignore[override]
        return Course(self.functions | other.functions, self.changes + other.changes)

    @property
    def files(self) -> list[str]:
        """The files entered, below ``asyncpar/``."""
        return sorted({function.partition(":")[0] for function in self.functions})


class Walk:
    """Counts calls of the package's functions between ``begin`` and ``end``.

    ``counted`` operations of ``name`` are counted, after ``warm`` that are not.
    """

    def __init__(self, counted: int, warm: int = 0) -> None:
        self.name = ""
        self.counted = counted
        self.warm = warm
        self._codes: set[CodeType] = set()
        self._last: str | None = None
        self._changes = 0
        self._is_on = False

    def install(self) -> None:
        """Watch this thread, and all that are started from now on."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def begin(self) -> None:
        self._codes, self._last, self._changes = set(), None, 0
        self._is_on = True

    def end(self) -> Course:
        self._is_on = False
        functions = {f"{code.co_filename.removeprefix(_PACKAGE)}:{code.co_firstlineno}" for code in self._codes}
        return Course(frozenset(functions), self._changes)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self._is_on:
            return
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:  # not of a function
            return
        self._codes.add(code)
        if code.co_filename != self._last:
            self._changes += self._last is not None
            self._last = code.co_filename


async def count(walk: Walk, operation: Callable[[], Awaitable[object]], barrier: Callable[[], Awaitable[None]]) -> None:
    """Run ``operation`` on both ranks, and print its course."""
    for _ in range(walk.warm):
        await barrier()
        await operation()
    courses = []
    for _ in range(walk.counted):
        await barrier()
        await asyncio.sleep(0.05)  # whatever the barrier left to do is done
        walk.begin()
        await operation()
        courses.append(walk.end())
        await asyncio.sleep(0.05)  # the other rank has stopped counting, before this one sends for the next barrier
    show(walk.name, courses)


def show(name: str, courses: list[Course]) -> None:
    """Print the course with the median number of functions."""
    course = sorted(courses, key=lambda course: len(course.functions))[len(courses) // 2]
    print(_MARK + json.dumps([name, int(os.environ["RANK"]), sorted(course.functions), course.changes]), flush=True)


async def walk_collective(walk: Walk, node: Node) -> None:
    import numpy as np

    x = np.zeros(1 << 20, np.float32)
    await count(walk, lambda: node.world.all_reduce(x), node.world.barrier)


async def walk_ask(walk: Walk, node: Node) -> None:
    import asyncpar as ap

    asked = asyncio.Event()

    class Echo(ap.Actor):
        @ap.endpoint
        async def say(self, words: bytes) -> bytes:
            asked.set()
            return words

    await node.spawn(Echo, name="echo")
    await node.world.barrier()
    echo = node.ref("echo", rank=1, actor_class=Echo)

    async def operation() -> None:
        if node.rank == 0:
            await asyncio.sleep(0.05)  # the other rank counts by now
            await echo.say(bytes(1024))
        else:
            await asked.wait()
            asked.clear()
            await asyncio.sleep(0.01)  # the answer leaves

    await count(walk, operation, node.world.barrier)
    await node.world.barrier()


async def walk_gradients(walk: Walk, node: Node) -> None:
    import numpy as np

    from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer

    class Gradient:
        name = "weight"
        grad = np.ones(1 << 16, np.float32)

    synchronizer = GradientSynchronizer.data_parallel(
        node.world,
        bucketing=GradientBucketingConfig(bucket_size_mb=1.0),
        compression=GradientCompressionConfig(codec="int8"),
    )

    async def operation() -> None:
        async with synchronizer.step([Gradient()]):
            pass

    await count(walk, operation, node.world.barrier)


async def walk_pipeline(walk: Walk, node: Node) -> None:
    import numpy as np

    from asyncpar.hybrid import HybridConfig, ThreeDParallelismConfig, ThreeDParallelismCoordinator, TransformerModel
    from asyncpar.nn import TransformerConfig

    config = HybridConfig(parallelism=ThreeDParallelismConfig(pp_size=2, num_layers=2), micro_batches=2)
    model = TransformerModel(config=TransformerConfig(vocabulary=16, length=8, features=8, layers=2))
    tokens = [np.random.default_rng(number).integers(0, 16, (2, 9)) for number in range(2)]
    inputs, targets = [rows[:, :-1] for rows in tokens], [rows[:, 1:] for rows in tokens]
    async with await ThreeDParallelismCoordinator.create(config, model, node.world) as coordinator:
        await count(walk, lambda: coordinator.train_step(inputs, targets, learning_rate=1e-3), node.world.barrier)


def walk_torch(walk: Walk) -> None:
    import time

    import torch
    import torch.distributed as dist

    dist.init_process_group("asyncpar")
    x, courses = torch.zeros(1 << 18), []
    for _ in range(walk.warm):
        dist.barrier()
        dist.all_reduce(x)
    for _ in range(walk.counted):
        dist.barrier()
        time.sleep(0.05)
        walk.begin()
        dist.all_reduce(x)
        courses.append(walk.end())
    show(walk.name, courses)
    dist.destroy_process_group()


def walk_launch(ranks: int) -> None:
    """Run the command ``asyncpar launch`` in this process, and print its course."""
    from asyncpar.launch.cli import main as command

    walk = Walk(1)
    walk.install()
    walk.begin()
    status: Any = None
    try:
        command(["launch", "--nproc-per-node", str(ranks), __file__, "--node"], prog_name="asyncpar")
    except SystemExit as ended:
        status = ended.code
    course = walk.end()
    print(_MARK + json.dumps(["launch", 0, sorted(course.functions), course.changes]), flush=True)
    sys.exit(status)


def be_node() -> None:
    """Be a rank of a launch that is counted: meet the others, and leave."""
    import asyncpar as ap

    async def main() -> None:
        node = await ap.Node.start()
        try:
            await node.world.barrier()
        finally:
            await node.stop()

    ap.run(main)


def be_rank(names: list[str], counted: int, warm: int) -> None:
    """Run the walks on this rank, one after another."""
    walk = Walk(counted, warm)
    if names == ["torch"]:
        walk.name = "torch"
        walk.install()
        walk_torch(walk)
        return
    import asyncpar as ap

    bodies = {
        "pipeline": walk_pipeline,
        "shm": walk_collective,
        "tcp": walk_collective,
        "ask": walk_ask,
        "int8": walk_gradients,
    }

    async def main() -> None:
        node = await ap.Node.start(blocked_after=0)
        try:
            for walk.name in names:
                await asyncio.create_task(bodies[walk.name](walk, node))  # each step of this task enters the runner
        finally:
            await node.stop()

    walk.install()  # after the imports of the package, which would take longer
    ap.run(main)


def measure(*names: str, counted: int = _COUNTED, warm: int = _WARM, launched: int = _LAUNCHED) -> dict[str, Course]:
    """Launch two ranks for walks of one transport, or those that are ``launched`` for that of a launch."""
    if "launch" in names:
        command = [sys.executable, __file__, "--command", str(launched)]
        return {"launch": _courses(command, expected=1)["launch", 0]}
    (transport,) = {_TRANSPORT.get(name, "tcp") for name in names}
    command = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", "2", "--transport", transport]
    command += [__file__, "--counted", str(counted), "--warm", str(warm), "--rank", *names]
    found = _courses(command, expected=2 * len(names))
    return {name: found[name, 0] + found[name, 1] if name == "ask" else found[name, 0] for name in names}


def _courses(command: list[str], *, expected: int) -> dict[tuple[str, int], Course]:
    """Run ``command``, and return the courses that it prints, by walk and rank."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]  # the launcher shows other ranks than 0 on stderr
    shown = [json.loads(line.partition(_MARK)[2]) for line in lines if _MARK in line]
    found = {(name, rank): Course(frozenset(functions), changes) for name, rank, functions, changes in shown}
    if done.returncode or len(found) != expected:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the files and functions that an operation goes through.")
    parser.add_argument("walks", nargs="*", metavar="walk", help=f"of {', '.join(WALKS)}; default all")
    parser.add_argument("--files", action="store_true", help="name the files that each walk enters")
    parser.add_argument("--rank", nargs="+", choices=sorted(WALKS), help=argparse.SUPPRESS)
    parser.add_argument("--command", type=int, metavar="RANKS", help=argparse.SUPPRESS)
    parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--counted", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = sorted(set(options.walks) - set(WALKS))
    if unknown:
        parser.error(f"expected walks of {', '.join(WALKS)}, got {', '.join(unknown)}")
    if options.command is not None:
        walk_launch(options.command)
    if options.node:
        be_node()
        return
    if options.rank is not None:
        be_rank(options.rank, options.counted, options.warm)
        return
    print(f"{'walk':46} {'files':>6} {'functions':>10} {'changes of file':>16}")
    for name in options.walks or WALKS:
        if name == "torch" and importlib.util.find_spec("torch") is None:
            print(f"{WALKS[name]:46} not counted: torch is not installed here")
            continue
        course = measure(name)[name]
        print(f"{WALKS[name]:46} {len(course.files):6} {len(course.functions):10} {course.changes:16}", flush=True)
        if options.files:
            print("\n".join(f"    {name}" for name in course.files), flush=True)


if __name__ == "__main__":
    main()
