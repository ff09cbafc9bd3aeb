"""The conformance suite of engines: twelve behaviours that all of them have.

Subclass ``EngineConformance`` in a test module, say how to launch, and pytest runs the suite against it::

    class TestMyEngine(EngineConformance):
        async def launch(self, function, *arguments, ranks, output=None, **options):
            return await my_engine.launch(function, *arguments, ranks=ranks, **options)

``ElasticConformance`` and ``GrowingConformance`` are for engines that run elastic jobs.

The suite needs pytest for nothing but collecting it.  Its functions are those of ``asyncpar.testing.engine_programs``,
which ranks import by name.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from asyncpar.errors import PeerLost, RemoteError, UsageError
from asyncpar.testing import engine_programs as programs

__all__ = ["ElasticConformance", "EngineConformance", "EngineOutput", "GrowingConformance"]

PATIENCE: Final = 60.0


@dataclass
class EngineOutput:
    """The output that the caller has received from its ranks while they ran."""

    text: str = ""
    errors: str = ""
    progress: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Described:
    """The reports of three ranks, and what was left of them and of their files when the launch returned."""

    ranks: list[dict[str, Any]]
    left: list[object]


class EngineConformance(ABC):
    """The suite.  Each test is one behaviour of a ``PlacementEngine``, as seen by its callers.

    Tests that only inspect reports or output of ranks share a launch.
    """

    _described: ClassVar[_Described | None] = None
    _spoken: ClassVar[EngineOutput | None] = None

    @abstractmethod
    async def launch(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int,
        output: EngineOutput | None = None,
        **options: Any,
    ) -> list[Any]:
        """Run ``function`` on ``ranks`` ranks, at most 3, and fill ``output``; ``options`` are those of all engines."""

    # -- 1 to 3: the places of ranks, and what they know of them -------------------------------------------------------

    async def test_values_come_in_the_order_of_ranks_each_from_a_process_of_its_own(self) -> None:
        seen = (await self._describe()).ranks
        assert [one["rank"] for one in seen] == [0, 1, 2]
        assert [one["sum"] for one in seen] == [3, 3, 3]
        assert len({one["pid"] for one in seen}) == 3
        assert os.getpid() not in {one["pid"] for one in seen}

    async def test_places_that_are_not_full_number_their_ranks_without_gaps(self) -> None:
        seen = (await self._describe()).ranks
        by_place: dict[int, list[dict[str, Any]]] = {}
        for one in seen:
            by_place.setdefault(one["GROUP_RANK"], []).append(one)
        assert sorted(by_place) == list(range(seen[0]["GROUP_WORLD_SIZE"]))
        for ranks in by_place.values():
            assert [one["LOCAL_RANK"] for one in ranks] == list(range(len(ranks)))
            assert {one["LOCAL_WORLD_SIZE"] for one in ranks} == {len(ranks)}

    async def test_ranks_have_the_environment_of_their_place_and_of_the_caller(self) -> None:
        seen = (await self._describe()).ranks
        assert [one["RANK"] for one in seen] == [0, 1, 2]
        assert {(one["WORLD_SIZE"], one["size"], one["given"]) for one in seen} == {(3, 3, "given")}

    async def test_arguments_that_have_no_value_yet_are_awaited(self) -> None:
        async def two() -> int:
            return 2

        assert await self.launch(programs.add, asyncio.ensure_future(two()), 1, ranks=2) == [3, 1003]

    # -- 4 and 5: unsuccessful ends ------------------------------------------------------------------------------------

    async def test_the_first_failure_comes_first_with_its_cause(self) -> None:
        failed = await self._failure(programs.fail, 1, ranks=2)
        first = failed.exceptions[0]
        assert isinstance(first, RemoteError), first
        assert (first.rank, first.type_name) == (1, "ZeroDivisionError")
        assert "divides by zero" in first.message
        assert "engine_programs" in first.remote_traceback

        failed = await self._failure(programs.die, 0, ranks=2)
        first = failed.exceptions[0]
        assert isinstance(first, PeerLost), first
        assert first.rank == 0
        assert "SIGKILL" in str(first)

    async def test_cancelling_ends_all_ranks_before_it_returns(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            launching = asyncio.ensure_future(self.launch(programs.linger, folder, ranks=2))
            pids = await self._pids(folder, launching)
            launching.cancel()
            with suppress(asyncio.CancelledError):
                async with asyncio.timeout(PATIENCE):
                    await launching
            assert launching.cancelled()
            assert not [pid for pid in pids if _is_running(pid)]

    # -- 6 to 8: output while ranks run, and its limits ----------------------------------------------------------------

    async def test_what_ranks_print_comes_to_the_caller(self) -> None:
        output = await self._speak()
        assert "rank 0 says hello\n" in output.text
        for line in ("0] rank 0 complains\n", "1] rank 1 says hello\n", "1] rank 1 complains\n"):
            assert line in output.errors

    async def test_progress_comes_to_the_caller(self) -> None:
        output = await self._speak()
        assert any("speaking 1/7" in line for line in output.progress), output.progress

    async def test_the_secret_is_in_a_private_file_and_nowhere_else(self) -> None:
        for seen in (await self._describe()).ranks:
            secret = seen["secret"]
            assert (secret["file_mode"], secret["directory_mode"]) == (0o600, 0o700)
            assert secret["length"] >= 32
            assert not secret["is_shown"]

    # -- 9 to 11: several jobs, one job repeatedly, and no remains -----------------------------------------------------

    async def test_two_jobs_at_once_do_not_meet(self) -> None:
        one, other = await asyncio.gather(
            self.launch(programs.describe, ranks=2), self.launch(programs.describe, ranks=1)
        )
        assert [seen["sum"] for seen in one] == [1, 1]
        assert [seen["size"] for seen in other] == [1]
        assert {seen["job"] for seen in one}.isdisjoint({seen["job"] for seen in other})

    async def test_a_job_that_may_starts_again(self) -> None:
        assert await self.launch(programs.fail_once, ranks=2, max_restarts=1) == [1, 1]

    async def test_nothing_is_left_of_a_job(self) -> None:
        assert (await self._describe()).left == []

    # -- 12

    async def test_bad_input_is_told_before_anything_starts(self) -> None:
        for ranks in (0, -1, True, 1.5):
            await self._refused("ranks", programs.add, 1, 2, ranks=ranks)
        await self._refused("fn", "no function", ranks=1)
        await self._refused("max_restarts", programs.add, 1, 2, ranks=1, max_restarts=-1)
        await self._refused("transport", programs.add, 1, 2, ranks=1, transport="pigeon")
        assert await self.launch(programs.add, 1, 2, ranks=1) == [3]

    # -- inside

    async def _describe(self) -> _Described:
        """Launch three ranks that describe themselves, once for all tests of a suite."""
        suite = type(self)
        if suite._described is None:
            ranks = await self.launch(programs.describe, ranks=3, environment={"ENGINE_TEST": "given"})
            processes = [one["pid"] for one in ranks if _is_running(one["pid"])]
            folders = {Path(one["secret"]["path"]).parent for one in ranks}
            suite._described = _Described(ranks, [*processes, *(folder for folder in folders if folder.exists())])
        return suite._described

    async def _speak(self) -> EngineOutput:
        """Launch two ranks that print and report progress, once for all tests of a suite."""
        suite = type(self)
        if suite._spoken is None:
            output = EngineOutput()
            await self.launch(programs.speak, ranks=2, output=output)
            suite._spoken = output
        return suite._spoken

    async def _failure(self, function: Callable[..., Any], *arguments: Any, ranks: int) -> ExceptionGroup[Exception]:
        try:
            async with asyncio.timeout(PATIENCE):
                values = await self.launch(function, *arguments, ranks=ranks)
        except ExceptionGroup as failed:
            return failed
        raise AssertionError(f"expected an ExceptionGroup, got {values}")

    async def _refused(self, name: str, function: Any, *arguments: Any, **options: Any) -> None:
        try:
            values = await self.launch(function, *arguments, **options)
        except UsageError as error:
            text = str(error)
        else:
            raise AssertionError(f"expected a UsageError that names {name}, got {values}")
        assert name in text, text

    async def _pids(self, folder: str, launching: asyncio.Future[Any]) -> list[int]:
        """Return the processes of both ranks, once they run."""
        async with asyncio.timeout(PATIENCE):
            while len(found := os.listdir(folder)) < 2:
                assert not launching.done(), launching
                await asyncio.sleep(0.05)
        return [int(name) for name in found]


class ElasticConformance(ABC):
    """The suite for engines that run elastic jobs: ``ranks=(least, most)``, with a rank in each place."""

    @abstractmethod
    async def launch(
        self, function: Callable[..., Any], *arguments: Any, ranks: tuple[int, int], **options: Any
    ) -> list[Any]:
        """Run ``function`` on ``ranks`` ranks, at most 3; ``options`` are those of all engines."""

    async def test_an_elastic_job_goes_on_when_a_rank_is_killed(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            launching = asyncio.ensure_future(self.launch(programs.count_elastically, folder, ranks=(1, 2)))
            pids = await ranks_of_world(folder, 2, launching)
            os.kill(pids[-1], signal.SIGKILL)
            await ranks_of_world(folder, 1, launching)
            await finish_counting(folder, launching, results=1)

    async def test_a_rank_that_may_starts_again_and_joins_the_others(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            launching = asyncio.ensure_future(
                self.launch(programs.count_elastically, folder, ranks=(1, 2), max_restarts=1)
            )
            pids = await ranks_of_world(folder, 2, launching)
            os.kill(pids[0], signal.SIGKILL)
            await ranks_of_world(folder, 1, launching)
            await ranks_of_world(folder, 2, launching)
            await finish_counting(folder, launching, results=2)

    async def test_an_elastic_job_that_fails_everywhere_says_why(self) -> None:
        try:
            async with asyncio.timeout(2 * PATIENCE):
                values = await self.launch(programs.raise_elastically, ranks=(1, 2))
        except ExceptionGroup as failed:
            text = str(failed.exceptions[0])
        else:
            raise AssertionError(f"expected an ExceptionGroup, got {values}")
        assert "divides by zero" in text, text

    async def test_cancelling_an_elastic_job_ends_all_ranks(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            launching = asyncio.ensure_future(self.launch(programs.count_elastically, folder, ranks=(1, 2), grace=2.0))
            pids = await ranks_of_world(folder, 2, launching)
            launching.cancel()
            with suppress(asyncio.CancelledError):
                async with asyncio.timeout(PATIENCE):
                    await launching
            assert launching.cancelled()
            assert not [pid for pid in pids if _is_running(pid)]

    async def test_bounds_that_make_no_sense_are_refused(self) -> None:
        for ranks in ((0, 2), (3, 2), (2, 3, 4)):
            try:
                values = await self.launch(programs.count_elastically, "", ranks=ranks)  # type: ignore[arg-type]
            except UsageError as error:
                text = str(error)
            else:
                raise AssertionError(f"expected a UsageError, got {values}")
            assert "ranks" in text, text


class GrowingConformance(ABC):
    """The suite for engines whose places come and go while a job runs.  Before each test there are two places."""

    @abstractmethod
    async def launch(
        self, function: Callable[..., Any], *arguments: Any, ranks: tuple[int, int], **options: Any
    ) -> list[Any]:
        """Run ``function`` on ``ranks`` ranks, one in each place."""

    @abstractmethod
    async def add_place(self) -> None:
        """Add one more place to the engine."""

    @abstractmethod
    async def lose_place(self, pid: int) -> None:
        """Kill the place of the rank whose process is ``pid``; the engine replaces it by another one."""

    async def test_an_elastic_job_gets_a_rank_on_a_place_that_comes(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            launching = asyncio.ensure_future(self.launch(programs.count_elastically, folder, ranks=(1, 3)))
            await ranks_of_world(folder, 2, launching)
            await self.add_place()
            await ranks_of_world(folder, 3, launching)
            await finish_counting(folder, launching, results=3)

    async def test_an_elastic_job_outlives_the_loss_of_a_place_and_gets_another(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            launching = asyncio.ensure_future(self.launch(programs.count_elastically, folder, ranks=(1, 2)))
            pids = await ranks_of_world(folder, 2, launching)
            await self.lose_place(pids[0])
            await ranks_of_world(folder, 1, launching)
            await ranks_of_world(folder, 2, launching)
            await finish_counting(folder, launching, results=2)


async def finish_counting(folder: str, launching: asyncio.Future[list[Any]], *, results: int) -> None:
    """End ``count_elastically``, and check that no step was lost, and none was counted twice."""
    Path(folder, "end").touch()
    async with asyncio.timeout(PATIENCE):
        values = await launching
    assert len(values) == results, values
    for steps, counted in values:
        assert counted == 8 * steps


async def ranks_of_world(folder: str, size: int, launching: asyncio.Future[Any]) -> list[int]:
    """Wait until ``size`` ranks have recently been in a world of that size, and return their processes."""
    now = time.time()
    async with asyncio.timeout(2 * PATIENCE):
        while True:
            assert not launching.done(), launching
            found = [path for path in Path(folder).iterdir() if path.name.isdecimal() and path.stat().st_mtime > now]
            ranks = [int(path.name) for path in found if path.read_text().split()[1:] == [str(size)]]
            if len(ranks) == size and all(map(_is_running, ranks)):
                return sorted(ranks)
            await asyncio.sleep(0.05)


def _is_running(pid: int) -> bool:
    """Return whether process ``pid`` of this host runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False
