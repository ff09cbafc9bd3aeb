"""Elastic training of torch programs: the bits of an undisturbed run, whatever happens to ranks."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncpar.torch
from asyncpar.blocking.thread import background
from asyncpar.elasticity.donors import SnapshotShelf
from asyncpar.elasticity.worlds import LoneWorld, Membership
from asyncpar.errors import UsageError, WorldChanged
from asyncpar.hosts.lineage import MemberReport
from asyncpar.hosts.messages import WorldChange
from asyncpar.torch.elastic_job import ElasticTraining, TorchStep
from asyncpar.torch.elastic_state import Arithmetic
from tests.launch.agents.agent_groups import AgentGroup, eventually
from tests.torch.elastic_rank import ASKED, HELD, HURRY, make_model, train

UNTIL = 100

pytestmark = pytest.mark.usefixtures("one_thread")


class Ranks:
    """Ranks of ``tests.torch.elastic_rank`` on one host; their names are the numbers of their processes."""

    def __init__(self, group: AgentGroup, size: int) -> None:
        self._group = group
        program = ("-m", "tests.torch.elastic_rank", str(UNTIL), str(group.folder))
        options = ("--nproc-per-node", str(size), "--max-restarts", "2")
        self.launcher = group.launch_alone(*program, options=options)
        self.first = self.present(size)
        """Those of the first world."""

    def present(self, size: int, *, without: int | None = None) -> list[int]:
        """Wait for a world of ``size`` ranks, not including one; return them, by slot."""

        def found() -> list[int]:
            host = self._group.host("one")
            ranks = () if host is None else host.ranks
            return [rank.pid for rank in ranks if rank.rank is not None and rank.pid not in (None, without)]

        eventually(lambda: len(found()) == size, f"a world of {size}")
        return found()

    def hold(self, rank: int) -> int:
        """Keep a rank from ending its step; return the step's number."""
        path = self._path(rank, HELD)
        path.touch()
        eventually(lambda: path.read_text() != "", f"the hold of {rank}")
        return int(path.read_text())

    def release(self, rank: int) -> None:
        """Let a rank end the step in which it is held."""
        self._path(rank, HELD).unlink()

    def hurry(self) -> None:
        (self._group.folder / HURRY).touch()

    def reach(self, step: int, *ranks: int) -> None:
        for rank in ranks:
            eventually(lambda rank=rank: self.reached(rank) >= step, f"step {step}")  # type: ignore[misc]

    def reached(self, rank: int) -> int:
        """Return the step in which a rank is, or has been last; -1 before the first."""
        path = self._path(rank, ".progress")
        return int(path.read_text() or -1) if path.exists() else -1

    def ask_to_leave(self, rank: int) -> None:
        """Send a rank SIGTERM, and return when it has asked to leave."""
        os.kill(rank, signal.SIGTERM)
        eventually(self._path(rank, ASKED).exists, f"the departure of {rank}")

    def end(self) -> int:
        """Return the exit code of the job."""
        eventually(lambda: self.launcher.poll() is not None, "the end of the job")
        return self.launcher.wait()

    @property
    def output(self) -> str:
        """The output of ranks and of their agent."""
        return self._group.output("one")

    def has_result(self, rank: int) -> bool:
        return self._path(rank).exists()

    def result(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._path(rank).read_text())
        return found

    def begun(self, rank: int) -> list[int]:
        """Return the numbers of the steps that a rank has begun, replays excepted."""
        found: list[int] = json.loads(self._path(rank, ".begun").read_text())
        return found

    def _path(self, rank: int, suffix: str = "") -> Path:
        return self._group.folder / f"{rank}{suffix}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Ranks]]:
    """Start so many ranks, which end with the test."""
    group = AgentGroup(tmp_path)
    yield lambda size: Ranks(group, size)
    group.close()


@cache
def undisturbed() -> dict[str, Any]:
    """Return the result of a run of this process alone, as the file of a rank has it."""
    result: dict[str, Any] = json.loads(json.dumps(train(until=UNTIL)))
    return result


@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_rank_that_leaves_and_one_that_is_killed_and_those_that_follow_them_change_no_bit(
    start: Callable[[int], Ranks],
) -> None:
    """The one that gets SIGTERM ends its step first."""
    ranks = start(3)
    ranks.reach(2, *ranks.first)
    first, left, last = ranks.first
    os.kill(left, signal.SIGTERM)
    eventually(lambda: ranks.has_result(left), "the end of the rank")
    [second] = set(ranks.present(3, without=left)) - {first, last}
    common = ranks.reached(first) + 1
    ranks.reach(common, first, second, last)
    os.kill(second, signal.SIGKILL)
    present = ranks.present(3, without=second)
    ranks.hurry()
    assert ranks.end() == 0, ranks.output
    wanted = undisturbed()
    assert [ranks.result(rank) == wanted for rank in present] == [True] * 3
    assert ranks.result(left)["is_drained"]
    assert "rank one/1 starts again: it was drained" in ranks.output
    assert "rank one/1 was killed by SIGKILL; it starts again" in ranks.output
    left_after = len(ranks.result(left)["losses"])
    assert left_after < common
    assert ranks.begun(left) == list(range(left_after)), "it has ended the step that it was in"
    for rank in (first, last):
        assert ranks.begun(rank)[:common] == list(range(common)), "no step was done again when the one left"
        assert sorted(set(ranks.begun(rank))) == list(range(UNTIL))


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(600)
def test_the_second_sigterm_ends_a_rank_where_it_is(start: Callable[[int], Ranks]) -> None:
    """In its own code, and the one that follows it in a call that waits for the other rank."""
    ranks = start(2)
    other, first = ranks.first
    ranks.reach(2, other, first)
    ranks.hold(first)
    ranks.ask_to_leave(first)
    end_of_rank(ranks, first)
    [_, second] = ranks.present(2, without=first)
    ranks.reach(ranks.reached(other) + 1, second)
    number = ranks.hold(other)
    ranks.hurry()
    ranks.reach(number, second)
    ranks.ask_to_leave(second)
    end_of_rank(ranks, second)
    ranks.release(other)
    assert ranks.end() == 0, ranks.output
    assert ranks.result(other) == undisturbed()


def end_of_rank(ranks: Ranks, ended: int) -> None:
    """Send a rank in slot 1 that has asked to leave another SIGTERM, and see that it has ended at once."""
    message = f"rank one/1 exited with code {128 + signal.SIGTERM}"
    before = ranks.output.count(message)
    os.kill(ended, signal.SIGTERM)
    eventually(lambda: ranks.output.count(message) > before, "the end of the rank")
    assert not ranks.has_result(ended)


@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_only_rank_ends_at_once_when_it_gets_sigterm(start: Callable[[int], Ranks]) -> None:
    ranks = start(1)
    [rank] = ranks.first
    ranks.reach(1, rank)
    ranks.hold(rank)
    os.kill(rank, signal.SIGTERM)
    eventually(lambda: f"rank one/0 exited with code {128 + signal.SIGTERM}" in ranks.output, "the end of the rank")
    assert not ranks.has_result(rank)


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(300)
def test_of_two_ranks_that_get_sigterm_one_leaves_and_the_other_ends(start: Callable[[int], Ranks]) -> None:
    ranks = start(2)
    ranks.reach(2, *ranks.first)
    for rank in ranks.first:
        os.kill(rank, signal.SIGTERM)
    eventually(lambda: any(ranks.has_result(rank) for rank in ranks.first), "the end of the one")
    eventually(lambda: f"exited with code {128 + signal.SIGTERM}" in ranks.output, "the end of the other")
    assert sorted(ranks.has_result(rank) for rank in ranks.first) == [False, True]
    eventually(lambda: "all members are lost" in ranks.output, "the loss of the state")


def test_gradients_may_be_encoded_but_not_running_statistics() -> None:
    assert train(until=5, codec="int8", normalizes=False) != train(until=5, normalizes=False)
    assert train(until=5, codec="int8", normalizes=False) == train(until=5, codec="int8", normalizes=False)
    with pytest.raises(UsageError, match=r"codec: the running statistics .*GroupNorm"):
        train(until=1, codec="int8")


def test_an_aborted_step_leaves_no_trace_in_the_process() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with asyncpar.torch.elastic(model, optimizer, portions=2, scheduler=scheduler, notes=[]) as job:
        steps = job.steps(until=2)
        one_step(next(steps), model, job, scheduler)
        before = everything(model, optimizer, scheduler, job)
        random = torch.get_rng_state()
        with pytest.raises(ZeroDivisionError):
            one_step(next(steps), model, job, scheduler, fails=True)
        assert everything(model, optimizer, scheduler, job) == before
        assert torch.equal(torch.get_rng_state(), random)
        one_step(next(steps), model, job, scheduler)
        assert everything(model, optimizer, scheduler, job) != before
        assert job.state["notes"] == [0, 1]


class AnotherWorld(LoneWorld):
    """A world of one rank, which has successors."""

    async def next_world(self, report: MemberReport) -> Membership:
        first = await self.join(report.lineage, SnapshotShelf(), is_healed=False)
        number = report.generation + 1
        return replace(first, generation=number, change=WorldChange(generation=number))


@pytest.mark.parametrize("is_nested", [False, True])
def test_the_end_of_a_world_in_a_group_of_errors_ends_the_step_and_nothing_else(*, is_nested: bool) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    changed = WorldChanged("the world is over", generation=0)
    group = ExceptionGroup("of threads", [changed, ExceptionGroup("inner", [changed])] if is_nested else [changed])
    with asyncpar.torch.elastic(model, optimizer, portions=1, notes=[], source=AnotherWorld()) as job:
        numbers: list[int] = []
        for step in job.steps(until=3):
            with step:
                numbers.append(step.number)
                for portion in step.portions:
                    model(torch.ones(4, 6)).square().mean().backward()
                    step.add(portion, 0.0)
                step.update()
                job.state["notes"].append(step.number)
                if numbers == [0, 1]:
                    raise group
        assert numbers == [0, 1, 1, 2]
        assert job.state["notes"] == [0, 1, 2]
        with pytest.raises(ExceptionGroup) as raised:  # noqa: PT012
            for step in job.steps(until=4):
                with step:
                    raise ExceptionGroup("of threads", [changed, ZeroDivisionError("mine")])
        assert [repr(error) for error in raised.value.exceptions] == ["ZeroDivisionError('mine')"]


def one_step(
    step: TorchStep, model: torch.nn.Module, job: ElasticTraining, scheduler: Any, *, fails: bool = False
) -> None:
    with step:
        for portion in step.portions:
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            step.add(portion, loss)
        step.update()
        scheduler.step()
        job.state["notes"].append(step.number)
        if fails:
            raise ZeroDivisionError


def everything(model: torch.nn.Module, optimizer: Any, scheduler: Any, job: ElasticTraining) -> str:
    parts = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), list(job.state["notes"])]
    return repr([torch.set_printoptions(precision=17), parts])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, weight_decay=0.3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.25),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_one_portion_it_is_the_plain_program_with_every_optimizer_of_torch(name: str) -> None:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    plain, elastic = (torch.nn.Linear(6, 3) for _ in range(2))
    elastic.load_state_dict(plain.state_dict())
    plain_optimizer, elastic_optimizer = (OPTIMIZERS[name](one.parameters()) for one in (plain, elastic))
    for _ in range(5):
        plain_optimizer.zero_grad()
        plain(inputs).square().mean().backward()
        plain_optimizer.step()
    with asyncpar.torch.elastic(elastic, elastic_optimizer, portions=1) as job:
        for step in job.steps(until=5):
            with step:
                for portion in step.portions:
                    loss = elastic(inputs).square().mean()
                    loss.backward()
                    step.add(portion, loss)
                step.update()
    for one, other in zip(plain.parameters(), elastic.parameters(), strict=True):
        assert torch.equal(one, other)
    assert repr(plain_optimizer.state_dict()["state"]) == repr(elastic_optimizer.state_dict()["state"])


def test_interrupting_the_program_ends_the_job_and_leaves_a_usable_process() -> None:
    def interrupt(_: ElasticTraining, __: TorchStep) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(until=3, on_step=interrupt)
    assert train(until=2)["losses"]
    assert threading.active_count() < 20


# -- bad input ---------------------------------------------------------------------------------------------------------


class Counting(torch.nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.inner(x)
        return found


def wrapped() -> torch.nn.Module:
    ddp: torch.nn.Module = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(ddp)
    return ddp


class Unknown(torch.optim.SGD):
    """An optimizer that torch does not have."""


@pytest.mark.parametrize(
    ("model", "optimizer", "said"),
    [
        (lambda: 3, lambda m: None, r"model: expected a torch.nn.Module, got int"),
        (wrapped, lambda m: None, r"DistributedDataParallel reduces gradients itself; pass the module in it"),
        (
            lambda: torch.nn.Linear(2, 2).requires_grad_(False),
            lambda m: None,
            r"parameters with requires_grad, got none",
        ),
        (lambda: torch.nn.Linear(2, 2, device="meta"), lambda m: [], r"weight: expected a tensor in the CPU's memory"),
        (lambda: torch.nn.Linear(2, 2), lambda m: [], r"optimizer: expected at least one, got none"),
        (lambda: torch.nn.Linear(2, 2), lambda m: 7, r"torch_optimizer: expected a torch.optim.Optimizer, got int"),
        (
            lambda: torch.nn.Linear(2, 2),
            lambda m: torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, 5))]),
            r"it moves a tensor of shape \[3, 5\] that the model lacks",
        ),
        (
            lambda: torch.nn.Linear(2, 2),
            lambda m: Unknown(m.parameters()),
            r"expected one of torch.optim .*got Unknown",
        ),
        (
            lambda: torch.nn.Linear(2, 2),
            lambda m: torch.optim.SGD(m.parameters(), momentum=0.9, dampening=0.1),
            r"with dampening",
        ),
    ],
)
def test_what_cannot_be_the_state_of_a_job_is_named(model: Any, optimizer: Any, said: str) -> None:
    made = model()
    with pytest.raises(UsageError, match=said):
        asyncpar.torch.elastic(made, optimizer(made), portions=2)


@pytest.mark.parametrize("name", ["zero", "arithmetic", "torch_optimizer", "weight"])
def test_names_that_the_state_has_are_refused(name: str) -> None:
    model = torch.nn.Linear(2, 2)
    values: dict[str, Any] = {name: 1}
    with pytest.raises(UsageError, match=f"{name}.*name already"):
        asyncpar.torch.elastic(model, torch.optim.SGD(model.parameters()), portions=2, **values)


def replaced(model: Any) -> None:
    model.weight = torch.nn.Parameter(torch.zeros(2, 2))


def repointed(model: Any) -> None:
    model.weight.data = torch.zeros(2, 2)


def added(model: Any) -> None:
    model.more = torch.nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(("change", "name"), [(replaced, "weight"), (repointed, "weight"), (added, "more")])
def test_a_model_that_is_changed_under_way_is_named(change: Callable[[Any], None], name: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=f"model: {name} is not the tensor"):
        first_portion(model, torch.ones(1, 2), change)


def test_a_buffer_that_counts_what_a_rank_has_seen_is_named() -> None:
    with pytest.raises(UsageError, match="changed the buffer calls"):
        first_portion(Counting(), torch.ones(1, 2))


def test_sparse_gradients_are_named() -> None:
    with pytest.raises(UsageError, match="gradient of weight: expected a dense tensor"):
        first_portion(torch.nn.Embedding(4, 2, sparse=True), torch.tensor([1]))


def first_portion(model: torch.nn.Module, x: torch.Tensor, change: Callable[[Any], None] | None = None) -> None:
    """Add the first portion of a job, after ``change`` of the model."""
    with asyncpar.torch.elastic(model, torch.optim.SGD(model.parameters()), portions=1) as job:
        step = next(job.steps(until=2))
        with step:
            for portion in step.portions:
                loss = model(x).sum()
                loss.backward()
                if change is not None:
                    change(model)
                step.add(portion, loss)


def test_a_step_is_used_in_its_block() -> None:
    model = torch.nn.Linear(2, 2)
    with asyncpar.torch.elastic(model, torch.optim.SGD(model.parameters()), portions=1) as job:
        step = next(job.steps(until=2))
        with pytest.raises(UsageError, match="use it as `with step:`"):
            step.update()


@pytest.mark.timeout(60)
def test_a_call_after_the_block_of_its_step_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with asyncpar.torch.elastic(model, optimizer, portions=1) as job:
        (step,) = used(job, model)
        with pytest.raises(UsageError, match=r"step 0: .*within `with step:`"):
            step.update()
        with pytest.raises(UsageError, match=r"step 0: .*within `with step:`"):
            step.add(0, 0.0)


def test_steps_that_the_loop_collects_are_closed_without_waiting() -> None:
    model = make_model()
    with asyncpar.torch.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), portions=1) as job:
        kept = [job.steps(until=2)]
        assert next(kept[0]).number == 0
        background().do(kept.clear)
        used(job, model)
        assert job.state.step == 1


def test_steps_that_outlive_their_thread_are_collected_without_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    model = make_model()
    with asyncpar.torch.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), portions=1) as job:
        kept = [job.steps(until=2)]
        assert next(kept[0]).number == 0
    background().close()
    kept.clear()
    gc.collect()
    assert complaints == []


def used(job: ElasticTraining, model: torch.nn.Module) -> list[TorchStep]:
    steps = []
    for step in job.steps(until=1):
        with step:
            for portion in step.portions:
                model(torch.randn(4, 6)).square().mean().backward()
                step.add(portion, 0.0)
            step.update()
        steps.append(step)
    return steps


@pytest.fixture
def four_threads() -> Iterator[None]:
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("four_threads")
def test_other_numbers_of_threads_are_refused() -> None:
    others = {**Arithmetic().state_dict(), "threads": 1}
    with pytest.raises(UsageError, match=r"4 threads here, .* 1 threads on the ranks that train.*set_num_threads"):
        Arithmetic().load_state_dict(others)
