"""Stacks name what tasks wait for, and chains follow calls of actors across ranks."""

from __future__ import annotations

import asyncio
import ctypes
import linecache
import threading

import msgspec
import pytest

import asyncpar as ap
from asyncpar.observe import stack_views
from asyncpar.observe.chains import chains_of, show_stacks
from asyncpar.observe.stack_views import CallView, FrameView, ProcessStacks, TaskView, crash_line, parse_dump
from asyncpar.observe.stacks import at_one_moment, capture_tasks, capture_threads
from asyncpar.testing import local_world


class Server(ap.Actor):
    """Waits for an event, or for another actor."""

    def __init__(self, wait: asyncio.Event | None = None) -> None:
        self._wait = wait

    @ap.endpoint
    async def serve(self) -> int:
        assert self._wait is not None
        await self._wait.wait()
        return 1


async def tasks_now() -> dict[str, TaskView]:
    for _ in range(50):
        await asyncio.sleep(0)
    tasks, more = await asyncio.to_thread(capture_tasks, asyncio.get_running_loop())
    assert more == 0
    return {task.name: task for task in tasks}


async def test_an_operation_is_named_with_the_ranks_it_needs_and_the_users_line() -> None:
    async with local_world(3) as nodes:
        tasks = [asyncio.create_task(nodes[rank].world.barrier(), name=f"rank {rank}") for rank in (0, 1)]
        seen = await tasks_now()
        assert seen["rank 0"].waits.startswith("barrier #")
        assert 2 in {rank for name in ("rank 0", "rank 1") for rank in seen[name].ranks}
        await asyncio.gather(*tasks, nodes[2].world.barrier())


async def test_tasks_that_wait_for_tasks_and_for_the_library() -> None:
    async def sleeper() -> None:
        await asyncio.sleep(60)

    async def outer() -> None:
        await asyncio.gather(asyncio.create_task(sleeper(), name="one"), asyncio.create_task(sleeper(), name="two"))

    task = asyncio.create_task(outer(), name="outer")
    seen = await tasks_now()
    assert set(seen["outer"].tasks) == {"one", "two"}
    assert seen["one"].waits == "sleep"
    frame = seen["one"].user_frame
    assert frame is not None
    assert frame.function.endswith("sleeper")
    assert frame.source == "await asyncio.sleep(60)"
    task.cancel()
    await asyncio.wait({task})


async def test_a_call_leads_to_the_task_that_serves_it() -> None:
    async with local_world(2) as nodes:
        wait = asyncio.Event()
        await nodes[1].spawn(Server, wait, name="server")
        asking = asyncio.create_task(nodes[0].ref("server", 1).serve(), name="asks")
        seen = await tasks_now()
        assert seen["asks"].ask is not None
        assert (seen["asks"].ask.rank, seen["asks"].ask.actor, seen["asks"].ask.endpoint) == (1, "server", "serve")
        serving = next(task for task in seen.values() if task.serves is not None)
        assert serving.serves is not None
        assert (serving.serves.rank, serving.serves.number) == (0, seen["asks"].ask.number)
        wait.set()
        assert await asking == 1


def test_threads_are_shown_with_the_main_thread_first() -> None:
    threads = capture_threads()
    assert all(not thread.is_main for thread in threads[1:])


def test_lines_of_a_stack_are_read_before_anything_that_lets_its_thread_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the sources are read, which the interpreter lock is released for."""
    at_first, go_on, is_behind, end = (threading.Event() for _ in range(4))

    def inner(begun: threading.Event, until: threading.Event) -> None:
        begun.set()
        until.wait(30.0)

    def work() -> None:
        inner(at_first, go_on)
        inner(is_behind, end)

    def read_slowly(*_: object) -> str:
        go_on.set()
        is_behind.wait(30.0)
        return ""

    worker = threading.Thread(target=work, name="worker")
    worker.start()
    at_first.wait(30.0)
    monkeypatch.setattr(linecache, "getline", read_slowly)
    (seen,) = (thread for thread in capture_threads() if thread.name == "worker")
    end.set()
    worker.join()
    lines = {frame.function.rpartition(".")[2]: frame.line for frame in seen.frames}
    first = work.__code__.co_firstlineno
    assert lines["work"] == first + 1
    assert lines["inner"] == inner.__code__.co_firstlineno + 2


def test_what_moved_while_it_was_looked_at_is_looked_at_again() -> None:
    seen = iter([["a:1", "b:9"], ["a:2", "b:9"], ["a:3", "b:10"], ["a:3", "b:10"], ["a:4", "b:10"]])
    assert at_one_moment(lambda: next(seen)) == ["a:3", "b:10"]


# -- chains, pure ------------------------------------------------------------------------------------------------------


def process(rank: int, *tasks: TaskView) -> ProcessStacks:
    return ProcessStacks(pid=100 + rank, rank=rank, time=0.0, tasks=tasks)


def task(name: str, line: int, **fields: object) -> TaskView:
    frame = FrameView(file="/home/u/train.py", line=line, function="main", is_user=True)
    return msgspec.structs.replace(TaskView(name=name, frames=(frame,)), **fields)


def call(rank: int, number: int) -> CallView:
    return CallView(rank=rank, number=number, actor="counter", endpoint="add")


def test_a_chain_goes_over_ranks_to_its_end() -> None:
    stacks = {
        0: process(0, task("main", 57, ask=call(1, 7), waits="add of 'counter'", ranks=(1,))),
        1: process(1, task("counter", 12, serves=call(0, 7), waits="all_reduce #4", ranks=(2,))),
    }
    assert chains_of(stacks) == [
        "rank 0 task 'main' waits for add of 'counter' on rank 1 at train.py:57 -> rank 1 task 'counter' waits for "
        "all_reduce #4, which needs rank 2 at train.py:12"
    ]


def test_a_cycle_is_called_one() -> None:
    stacks = {
        0: process(0, task("a", 1, ask=call(1, 7), serves=call(1, 9), waits="add of 'counter'")),
        1: process(1, task("b", 2, ask=call(0, 9), serves=call(0, 7), waits="add of 'counter'")),
    }
    (chain,) = chains_of(stacks)
    assert chain.endswith("which waits for task 'a' of rank 0 again: a cycle")


def test_a_crash_in_a_library_names_the_place_in_the_program_that_called_it() -> None:
    library = f"{ctypes.__file__}"
    dump = f"""Fatal Python error: Segmentation fault

Current thread 0x00007f0000000000 (most recent call first):
  File "{library}", line 519 in string_at
  File "/home/u/train.py", line 9 in load
  File "/home/u/train.py", line 30 in main

Extension modules: numpy (total: 1)
"""
    assert crash_line(dump) == (
        f"Fatal Python error: Segmentation fault, in string_at at {library}:519, called in load at /home/u/train.py:9"
    )


def test_a_rank_that_cannot_report_is_named() -> None:
    stacks = {0: process(0, task("main", 57, ask=call(1, 7), waits="add of 'counter'"))}
    text = show_stacks(stacks, {1: "it is stopped (SIGSTOP, or a debugger)"})
    assert text.startswith("rank 1: it is stopped")
    assert "on rank 1, which has not sent its stacks" in text


def test_thousands_of_tasks_are_bounded() -> None:
    async def run() -> tuple[int, int]:
        tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(2000)]
        await asyncio.sleep(0)
        views, more = capture_tasks(asyncio.get_running_loop())
        for one in tasks:
            one.cancel()
        await asyncio.wait(tasks)
        return len(views), more

    shown, more = asyncio.run(run())
    assert shown <= 512
    assert shown + more >= 2000


DUMP = """Fatal Python error: Segmentation fault

Thread 0x00007f14477ff6c0 (most recent call first):
  File "{library}", line 331 in wait
  File "{package}", line 153 in _watch

Current thread 0x00007fc805835b80 (most recent call first):
  File "/home/me/train.py", line 12 in main
  File "{package}", line 101 in run
  File "/home/me/train.py", line 16 in <module>

Extension modules: numpy (total: 1)
"""


def test_what_faulthandler_writes_becomes_threads() -> None:
    fatal, (main, other) = parse_dump(DUMP.format(library=threading.__file__, package=stack_views.__file__))
    assert fatal == "Fatal Python error: Segmentation fault"
    assert (main.name, main.is_main, other.name) == ("MainThread", True, "Thread 0x00007f14477ff6c0")
    assert [(frame.site, frame.function, frame.is_user) for frame in main.frames] == [
        ("train.py:16", "<module>", True),
        ("stack_views.py:101", "run", False),
        ("train.py:12", "main", True),
    ]
    assert not any(frame.is_user for frame in other.frames)


@pytest.mark.parametrize("text", ["", "ready", "Thread 0x1 (most recent call first):\n  <cut>", DUMP[:150], "\x00\x01"])
def test_a_torn_dump_is_no_error(text: str) -> None:
    fatal, threads = parse_dump(text)
    assert (fatal != "") == text.startswith("Fatal")
    assert all(thread.frames == () or thread.frames for thread in threads)


@pytest.mark.parametrize(
    ("dump", "line"),
    [
        ("", ""),
        ('Current thread 0x1 (most recent call first):\n  File "/job.py", line 3 in add\n', ""),
        (
            "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  <no Python frame>\n",
            "Aborted",
        ),
        (
            "Fatal Python error: Segmentation fault\n\nThread 0x2 (most recent call first):\n"
            '  File "/other.py", line 1 in wait\n\nCurrent thread 0x1 (most recent call first):\n'
            '  Garbage-collecting\n  File "/job.py", line 3 in add\n  File "/job.py", line 9 in main\n',
            "Segmentation fault, while garbage is collected, in add at /job.py:3",
        ),
        (
            "Fatal Python error: Bus error\n\nCurrent thread 0x1 (most recent call first):\n"
            '  File "/job.py", line 3 in add\n',
            "Bus error, in add at /job.py:3",
        ),
    ],
)
def test_a_crash_is_one_line(dump: str, line: str) -> None:
    assert crash_line(dump) == (line and f"Fatal Python error: {line}")
