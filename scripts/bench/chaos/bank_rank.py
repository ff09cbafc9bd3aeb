"""One rank of the elastic job of ``bank.py``: trains a small vector, and moves money of elastic actors.

Money is moved within a bank only, so its total never changes.  A bank knows the names of the last ``RECENT`` transfers
that it has done; what ranks read of it, one after the other, is the history of all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import asyncpar as ap
from asyncpar.errors import AsyncparError, WorldChanged
from asyncpar.hosts.messages import WorldChange
from asyncpar.nn.optimizers import SGD, Optimizer
from asyncpar.nn.parameter import Parameter
from scripts.bench.chaos.elastic_rank import Log, begun, log_commit

BANKS = ("first", "second", "third")
ACCOUNTS = 8
TOTAL = 8000
RECENT = 256
PORTIONS = 16
TELLERS = 2
"""Tasks of each rank that move money beside the steps."""

AUDIT_SECONDS = 1.5
WAITS = (0.001, 0.02, 0.05, 0.05, 0.3)
"""Seconds for which money of a transfer is on its way."""

PATIENCE = (None, None, None, 0.1, 2.0)
"""Seconds after which a caller gives up."""

HURRY = "hurry"
"""When there is a file of this name beside the logs, no more money is moved, and steps take only the time they need."""


class Bank(ap.ElasticActor):
    """Accounts, between which money is on its way for a while."""

    def __init__(self, log: Log) -> None:
        self.accounts = [TOTAL // ACCOUNTS] * ACCOUNTS
        self.done = 0
        self.recent: list[str] = []
        self._log = log

    def state(self) -> object:
        return {"accounts": self.accounts, "done": self.done, "recent": self.recent}

    def restore(self, state: Any) -> None:
        self.accounts, self.done, self.recent = list(state["accounts"]), state["done"], list(state["recent"])

    async def on_world(self, change: WorldChange) -> None:  # noqa: ARG002
        self._check("on_world")
        self.accounts[0] -= 1
        await asyncio.sleep(0.002)
        self.accounts[1] += 1

    @ap.endpoint
    async def transfer(self, name: str, source: int, target: int, amount: int, seconds: float) -> str:
        """Wait in the middle."""
        self._check(name)
        self.accounts[source] -= amount
        await asyncio.sleep(seconds)
        self.accounts[target] += amount
        return self._note(name)

    @ap.endpoint
    async def saved(self, name: str, source: int, target: int, amount: int, seconds: float) -> str:
        """Save before the answer, which takes some more time."""
        self._check(name)
        self.accounts[source] -= amount
        await asyncio.sleep(seconds / 2)
        self.accounts[target] += amount
        self._note(name)
        await self.save()
        await asyncio.sleep(seconds / 2)
        return name

    @ap.endpoint
    async def by_another(self, name: str, source: int, target: int, amount: int, seconds: float) -> str:
        """Have another bank do a transfer in the middle of this one."""
        self._check(name)
        self.accounts[source] -= amount
        await self.named(BANKS[1]).transfer(f"{name}~", source, target, amount, seconds)
        self.accounts[target] += amount
        return self._note(name)

    @ap.endpoint
    async def read(self) -> tuple[int, int, list[str]]:
        """Return all money, how many transfers are done, and the names of the last of them."""
        return sum(self.accounts), self.done, self.recent

    def _note(self, name: str) -> str:
        self.done += 1
        self.recent = [*self.recent[-RECENT + 1 :], name]
        return name

    def _check(self, name: str) -> None:
        if sum(self.accounts) != TOTAL:
            self._log.write("half", name=name, total=sum(self.accounts))


class Customers:
    """Calls of one rank, each with a name of its own, and how they end."""

    def __init__(self, banks: list[Any], log: Log, hurry: Path) -> None:
        self.banks = banks
        self.hurry = hurry
        self._log = log
        self._name = secrets.token_hex(4)
        self._numbers = count()
        self._dice = random.Random(self._name)
        self._read = dict.fromkeys(BANKS, 0)

    async def move(self) -> None:
        """Move money, and log what came of it.  Raises what the call has raised, unless it is this caller's timeout."""
        dice, name = self._dice, f"{self._name}-{next(self._numbers)}"
        bank = dice.choice(self.banks)
        kind = dice.choice(["transfer", "saved", "by_another" if bank.name == BANKS[0] else "transfer"])
        source, target = dice.sample(range(ACCOUNTS), 2)
        self._log.write("asked", name=name, bank=bank.name, by=kind)
        try:
            async with asyncio.timeout(dice.choice(PATIENCE)):
                await getattr(bank, kind)(name, source, target, dice.randrange(1, 50), dice.choice(WAITS))
        except BaseException as error:
            self._log.write("refused", name=name, error=type(error).__name__, text=str(error)[:300])
            if not isinstance(error, TimeoutError):
                raise
        else:
            self._log.write("answered", name=name)

    async def audit(self) -> None:
        """Read all banks, and log what is new."""
        for bank in self.banks:
            total, done, recent = await bank.read()
            known = min(self._read[bank.name], done)
            fresh = recent[len(recent) - min(done - known, len(recent)) :]
            self._read[bank.name] = done
            self._log.write("read", bank=bank.name, total=total, done=done, names=fresh)

    async def serve(self) -> None:
        """Move money beside the steps."""
        while not self.hurry.exists():
            await asyncio.sleep(self._dice.uniform(0.1, 0.6))
            try:
                await self.move()
            except WorldChanged:
                continue

    async def inspect(self) -> None:
        """Audit from time to time."""
        while True:
            await asyncio.sleep(AUDIT_SECONDS)
            try:
                await self.audit()
            except WorldChanged:
                continue


async def train(options: argparse.Namespace, log: Log) -> None:
    """Train with banks beside, and read what they have at the end."""
    weight = Parameter("weight", np.random.default_rng(1).standard_normal(1024, dtype=np.float32))
    optimizer = Optimizer([weight], SGD(momentum=0.9))
    async with ap.elastic(portions=PORTIONS, seed=3) as job:
        banks = [job.actors.declare(name, Bank, log, save_every=1, mirrors=2) for name in BANKS]
        customers = Customers(banks, log, options.log.parent / HURRY)
        state = job.state([weight], optimizer)
        log.write("ready")
        async with asyncio.TaskGroup() as group:
            work = [customers.serve() for _ in range(TELLERS)] + [customers.inspect()]
            tasks = [group.create_task(one) for one in work]
            async for step in job.steps(state, until=options.steps):
                async with step, begun(step.number, step.began_in, step.is_replay, log):
                    await one_step(step, weight, optimizer, customers, log, options.pace)
                if step.is_committed:
                    log_commit(log, step, {"lineage": (await state.lineage()).digest.hex()})
            for task in tasks:
                task.cancel()
        if not job.is_drained:
            await conclude(customers, log)


async def one_step(
    step: Any, weight: Parameter, optimizer: Optimizer, customers: Customers, log: Log, pace: float
) -> None:
    """Do one step, and move money in it."""
    for portion in step.portions:
        scale = np.float32(step.rng(portion).standard_normal() + np.tanh(weight.value.sum(dtype=np.float64)))
        step.add(portion, [np.tanh(weight.value) * scale], loss=float(scale))  # bounded, whatever the weights are
    if not step.is_replay:
        portions = [step.portions.start, step.portions.stop]
        log.write("summed", step=step.number, generation=step.began_in, portions=portions)
        if not customers.hurry.exists():
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(pace))
                group.create_task(customers.move())
    await step.update(optimizer, await step.reduce("mean"), learning_rate=1e-3)


async def conclude(customers: Customers, log: Log) -> None:
    """Read the banks once more, if the others are still there."""
    try:
        async with asyncio.timeout(30.0):
            await customers.audit()
    except AsyncparError as error:
        log.write("alone", error=type(error).__name__)
    log.write("concluded")


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, default=0.25, help="seconds that a step takes at least")
    parser.add_argument("--log", type=Path, required=True, help="{pid} in it names the process")
    options = parser.parse_args()
    process = f"{os.getpid()}-{secrets.token_hex(3)}"  # numbers come again within an hour
    ap.run(train(options, Log(Path(str(options.log).replace("{pid}", process)))))


if __name__ == "__main__":
    main()
