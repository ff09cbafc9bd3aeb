"""The pytest plugin, as suites of users meet it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.soak import first

pytest_plugins = ["pytester"]

PASSING = """
import asyncio

import numpy as np
import pytest

import asyncpar as ap


@pytest.mark.ranks(4)
@pytest.mark.parametrize("value", [1.0, 2.0])
async def test_on_every_rank(node, value, tmp_path):
    x = np.full(3, value)
    await node.world.all_reduce(x)
    assert x.tolist() == [4 * value] * 3 and tmp_path.is_dir()


@pytest.mark.ranks(2, transport="tcp", timeout=20)
async def test_over_sockets(node):
    assert node.links.lane_kind(1 - node.rank) == "tcp" or await node.world.barrier() is None


@pytest.mark.ranks(3, virtual=True)
async def test_an_hour_passes_at_once(node):
    await asyncio.sleep(3600)
    await node.world.barrier()


class TestClass:
    @pytest.mark.ranks(2)
    async def test_method(self, node):
        assert node.size == 2


async def total(node):
    x = np.full(1, node.rank)
    await node.world.all_reduce(x)
    return int(x[0])


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp", "grpc"])
def test_a_plain_test(world, transport):
    assert world(3, transport=transport).run(total) == [3, 3, 3]


def test_a_plain_test_on_virtual_time(virtual_world):
    async def late(node):
        waiting = node.world.all_reduce(np.ones(1))
        if node.rank == 1:
            await asyncio.sleep(1000)
        with pytest.raises(ap.PeerError, match="rank 1|given up"):
            await waiting

    virtual_world(2).run(late)
"""

COROUTINE = """
import asyncio, numpy as np

async def test_in_a_coroutine(world):
    async with world(2, transport="shm") as nodes:
        arrays = [np.full(2, node.rank) for node in nodes]
        await asyncio.gather(*(node.world.all_reduce(x) for node, x in zip(nodes, arrays)))
    assert arrays[0].tolist() == [1, 1]
"""

DEADLOCK = """
import numpy as np
import pytest


@pytest.mark.ranks(2, transport="tcp", timeout=2)
async def test_crossed(node):
    x, other = np.ones(4), 1 - node.rank
    if node.rank == 0:
        await node.world.recv(other, out=x)
        await node.world.barrier()
    else:
        await node.world.barrier()
        await node.world.send(x, other)
"""


def run(pytester: pytest.Pytester, program: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(program)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n" * ("no:asyncio" not in options))
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)


@pytest.mark.process
@pytest.mark.parametrize(
    "options",
    first(1, [("-p", "no:asyncio", "-p", "no:anyio"), ("-o", "asyncio_mode=auto"), ("-o", "asyncio_mode=strict")]),
)
def test_a_suite_passes_with_and_without_plugins_for_coroutines(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    run(pytester, PASSING, "-W", "error", *options).assert_outcomes(passed=10)


@pytest.mark.process
@pytest.mark.soak
def test_a_suite_passes_on_several_workers(pytester: pytest.Pytester) -> None:
    run(pytester, PASSING, "-n", "2", "-o", "asyncio_mode=auto").assert_outcomes(passed=10)


@pytest.mark.process
@pytest.mark.soak
def test_coroutines_of_anyio_open_worlds(pytester: pytest.Pytester) -> None:
    program = f"import pytest\npytestmark = pytest.mark.anyio\n{COROUTINE}"
    pytester.makeconftest("import pytest\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n")
    run(pytester, program, "-o", "asyncio_mode=strict").assert_outcomes(passed=1)


WRONG = """
import pytest

@pytest.mark.ranks()
async def test_no_size(node): pass

@pytest.mark.ranks(0)
async def test_size(node): pass

@pytest.mark.ranks(2, transport="pigeon")
async def test_transport(node): pass

@pytest.mark.ranks(2, timeout=-1)
async def test_timeout(node): pass

@pytest.mark.ranks(2, speed=3)
async def test_option(node): pass

@pytest.mark.ranks(2)
def test_plain(node): pass

@pytest.mark.ranks(2)
async def test_without_node(): pass

def test_unmarked(node): pass

@pytest.mark.asyncio
async def test_run_in_a_coroutine(world): world(2).run(lambda node: None)

@pytest.mark.asyncio
async def test_virtual_in_a_coroutine(virtual_world):
    async with virtual_world(2): pass
"""

FAILING = {
    "coroutine": f"import pytest\npytestmark = pytest.mark.asyncio\n{COROUTINE}",
    "wrong": WRONG,
    "deadlock": DEADLOCK,
    "virtual_deadlock": DEADLOCK.replace('transport="tcp", timeout=2', "virtual=True").replace("crossed", "virtual"),
    "lost": """
import asyncio, numpy as np, pytest

async def child():
    await asyncio.Event().wait()

@pytest.mark.ranks(3, timeout=2)
async def test_lost(node):
    if node.rank == 2:
        await asyncio.create_task(child(), name="the child")
    await node.world.barrier()

@pytest.mark.ranks(3, virtual=True)
async def test_lost_on_virtual_time(node):
    if node.rank == 2:
        await asyncio.create_task(child(), name="the child")
""",
    "blocked": """
import time, pytest

@pytest.mark.ranks(2, timeout=1)
async def test_blocks(node):
    if node.rank == 1:
        time.sleep(1000)
    await node.world.barrier()

def test_the_next_one_passes(world):
    async def hello(node):
        await node.world.barrier()
        return node.rank
    assert world(2).run(hello) == [0, 1]
""",
    "hangs": """
import pytest

@pytest.mark.asyncio
async def test_hangs(world):
    async with world(2, transport="tcp", timeout=1) as nodes:
        await nodes[0].world.barrier()
""",
    "one_rank": """
import pytest

@pytest.mark.ranks(3)
async def test_fails(node):
    value = 7 if node.rank == 1 else 6
    assert value == 6
    await node.world.barrier()

@pytest.mark.ranks(2)
async def test_skips(node):
    pytest.skip("not here")
""",
}
"""Files of a suite most of which fails: one session runs them all."""


@dataclass(frozen=True)
class FailedSuite:
    """What came of ``FAILING``: the report of each test that failed, and how each test ended."""

    reports: dict[str, str]
    ends: dict[str, str]

    def assert_reports(self, test: str, lines: list[str]) -> None:
        assert self.ends[test] == "failed"
        pytest.LineMatcher(self.reports[test].splitlines()).fnmatch_lines(lines)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> FailedSuite:
    folder = tmp_path_factory.mktemp("failing")
    for name, program in FAILING.items():
        (folder / f"test_{name}.py").write_text(program.lstrip())
    (folder / "pytest.ini").write_text(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\nasyncio_mode = strict\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=long", "--strict-markers"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    found = re.split(
        r"^_{3,} (?:ERROR at setup of )?(test_\w+) _{3,}$",
        done.stdout.partition("short test summary")[0],
        flags=re.MULTILINE,
    )
    ends = re.findall(r"^(PASSED|FAILED|ERROR) \S+::(test_\w+)", done.stdout, re.MULTILINE)
    skipped = re.findall(r"^SKIPPED \[1\].*: (.*)$", done.stdout, re.MULTILINE)
    assert skipped == ["not here"]
    return FailedSuite(
        reports=dict(zip(found[1::2], found[2::2], strict=True)), ends={test: end.lower() for end, test in ends}
    )


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_deadlock_is_named_with_its_cycle_and_the_tasks_of_every_rank(failed: FailedSuite) -> None:
    failed.assert_reports(
        "test_crossed",
        [
            "*the world of 2 ranks did not end within 2 s*",
            "*deadlock: rank 0 waits for rank 1 in recv* at *.py:9, rank 1 waits for rank 0 in barrier* at *.py:12",
            "*rank 0",
            "*task rank 0: waits for recv*",
            "*await node.world.recv(other, out=x)*",
            "*rank 1",
            "*task rank 1: waits for barrier*",
        ],
    )


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_deadlock_on_virtual_time_is_named_as_well(failed: FailedSuite) -> None:
    failed.assert_reports(
        "test_virtual", ["*deadlock: rank 0 waits for rank 1 in recv*rank 1 waits for rank 0 in barrier*"]
    )


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_wait_for_nothing_is_shown_where_it_is(failed: FailedSuite) -> None:
    where = ["*rank 2", "*task rank 2: waits for task the child", "*task the child: waits for*"]
    failed.assert_reports("test_lost", ["*ranks 0, 1 wait for rank 2, which waits for*; barrier*", *where])
    failed.assert_reports("test_lost_on_virtual_time", where)


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_blocked_event_loop_fails_within_the_limit(failed: FailedSuite) -> None:
    assert failed.ends["test_the_next_one_passes"] == "passed"
    failed.assert_reports(
        "test_blocks",
        [
            "*rank 0 waits for rank 1, which runs at *.py:6; barrier*",
            "rank 1",
            "  task rank 1: runs",
            "*time.sleep(1000)*",
        ],
    )


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_hang_in_a_coroutine_of_the_user_fails_within_the_limit(failed: FailedSuite) -> None:
    failed.assert_reports(
        "test_hangs", ["*rank 0 waits for rank 1, which has ended its part, or never began it; barrier*"]
    )


@pytest.mark.process
@pytest.mark.timeout(120)
def test_the_failure_of_one_rank_is_that_of_the_test_and_named(failed: FailedSuite) -> None:
    failed.assert_reports(
        "test_fails",
        ["*assert 7 == 6*", "*on rank 1 of 3", "*rank 0: PeerLost: *rank 1*", "*rank 2: PeerLost: *rank 1*"],
    )


@pytest.mark.process
@pytest.mark.timeout(120)
def test_coroutines_of_another_plugin_open_worlds(failed: FailedSuite) -> None:
    assert failed.ends["test_in_a_coroutine"] == "passed"


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("test", "end", "line"),
    [
        ("test_no_size", "failed", "ranks: ranks(size) missing 1 required positional argument: 'size'"),
        ("test_size", "failed", "ranks: size: expected at least 1 rank, got 0"),
        ("test_transport", "failed", "ranks: transport: expected one of inproc, shm, tcp, grpc, got 'pigeon'*"),
        ("test_timeout", "failed", "ranks: timeout: expected seconds above 0, got -1"),
        ("test_option", "failed", "ranks: options: got an unexpected keyword argument 'speed'"),
        ("test_plain", "failed", "ranks: expected `async def test_plain(node)`"),
        ("test_without_node", "failed", "ranks: expected `async def test_without_node(node)`"),
        (
            "test_unmarked",
            "error",
            "node: it is for tests that run on every rank; mark the test @pytest.mark.ranks(4)",
        ),
        (
            "test_run_in_a_coroutine",
            "failed",
            "*run: expected no running event loop; in a coroutine use `async with` the world",
        ),
        (
            "test_virtual_in_a_coroutine",
            "failed",
            "*virtual: expected `run` from a plain test: the event loop of this one keeps real time",
        ),
    ],
)
def test_wrong_arguments_say_in_one_line_what_to_do(failed: FailedSuite, test: str, end: str, line: str) -> None:
    assert failed.ends[test] == end
    pytest.LineMatcher(failed.reports[test].splitlines()).fnmatch_lines([line])


@pytest.mark.process
def test_a_wrong_limit_of_time_ends_the_session(pytester: pytest.Pytester) -> None:
    program = "async def main(node): pass\ndef test_of_a_world(world): world(1).run(main)\n"
    result = run(pytester, program, "-o", "asyncpar_timeout=soon")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*asyncpar_timeout*soon*"])


@pytest.mark.process
def test_pytest_starts_without_the_heavy_parts_and_does_not_rewrite_the_package(pytester: pytest.Pytester) -> None:
    program = """
import sys

def test_nothing_was_imported():
    assert "asyncpar.pytest_plugin" in sys.modules
    assert not {"numpy", "grpc", "asyncpar.node", "asyncpar.testing", "uvloop"} & sys.modules.keys()

def test_the_loader_is_that_of_python():
    import asyncpar.errors

    assert type(asyncpar.errors.__spec__.loader).__name__ == "SourceFileLoader"
"""
    run(pytester, program).assert_outcomes(passed=2)
