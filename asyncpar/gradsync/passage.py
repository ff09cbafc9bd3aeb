"""All that runs in one step: agreements, the flows of all buckets, and what ranks tell each other at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import PeerCancelled
from asyncpar.gradsync.agreement import Agreement
from asyncpar.gradsync.flow import BucketFlow
from asyncpar.gradsync.groups import SyncGroups
from asyncpar.gradsync.keys import REPLICAS, Keys
from asyncpar.gradsync.obligation import Obligation
from asyncpar.gradsync.outcome import Findings, StepOutcome, collect
from asyncpar.gradsync.step import SyncStep


class Passage:
    """One step on this rank.

    With ``observes`` the ranks take over the order in which gradients became final on the first replica.
    """

    def __init__(
        self,
        agreements: Sequence[Agreement],
        flows: Sequence[BucketFlow],
        groups: SyncGroups,
        *,
        keys: Keys,
        observes: bool,
    ) -> None:
        self.flows = flows
        self.order: list[str] | None = None
        self._agreements = agreements
        self._groups = groups
        self._observed: list[str] = []
        self._findings = Findings({}, [])
        everyone, replicas = groups.everyone, groups.replicas
        self._flag = np.zeros(1, np.uint8)
        self._ending = make_ending(groups, keys, self._flag)
        self._all_findings = Obligation(
            lambda: everyone.all_gather_object(self._findings, key=f"{keys.rare}/findings", wanted=Findings)
        )
        self._order = Obligation(
            lambda: replicas.broadcast_object(self._observed, key=f"{keys.of(REPLICAS)}/order", wanted=list[str])
        )
        self._observes = observes and replicas.size > 1

    def begin(self, step: SyncStep, tasks: asyncio.TaskGroup) -> None:
        """Start everything that need not wait for the end of the step's block."""
        for agreement in self._agreements:
            tasks.create_task(agreement.run(), name="gradients/agreement")
        for flow in self.flows:
            tasks.create_task(step.carry(flow), name=flow.name)

    async def end(self, step: SyncStep) -> StepOutcome:
        """Return what became of the step, on all ranks of all groups, after all flows have run."""
        self._findings = collect(flow.outcome for flow in self.flows)
        findings = [self._findings]
        if self._ending is not None:
            self._flag[0] = bool(self._findings.lost)
            await self._ending.run()
            if self._flag[0]:
                findings = await self._all_findings.run()
        outcome = step.outcome
        outcome.add(findings)
        if self._observes:
            self._observed = step.observed
            self.order = await self._order.run()
        return outcome

    async def give_up(self) -> None:
        """Tell all ranks that wait, or will wait, for this one.  Waits for nobody."""
        for obligation in list(self._obligations()):
            await obligation.give_up()
        for flow in self.flows:
            await flow.give_up()

    def _obligations(self) -> Iterator[Obligation[Any]]:
        yield from (agreement.exchange for agreement in self._agreements)
        if self._ending is not None:
            yield self._ending
            yield self._all_findings
        if self._observes:
            yield self._order


def make_ending(groups: SyncGroups, keys: Keys, flag: NDArray[np.uint8]) -> Obligation[Any] | None:
    """Return the exchange by which all ranks learn whether some mean cannot be had, from ``flag``.

    None where all ranks are replicas, which know it already.
    """
    everyone = groups.everyone
    if everyone.size == groups.replicas.size:
        return None
    return Obligation(lambda: everyone.all_reduce(flag, op="max", key=f"{keys.everyone}/ending"))


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the cause out of a task group's exceptions: that of this rank rather than a peer's cancelling."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = sorted(group.exceptions, key=lambda error: isinstance(error, PeerCancelled))
        raise errors[0] from errors[0].__cause__
