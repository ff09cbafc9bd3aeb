"""A process commits while an answer of its agent counts, and asks before it commits after a pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from asyncpar.elasticity.commit_lease import CommitLease
from asyncpar.errors import StaleGeneration
from asyncpar.testing import run_virtual


class Agent:
    """Counts questions, and answers on demand."""

    def __init__(self) -> None:
        self.lease = CommitLease(self._asked)
        self.questions = 0

    def _asked(self) -> None:
        self.questions += 1

    async def allows(self) -> bool:
        """Return whether a commit is allowed without waiting for the agent."""
        holding = asyncio.ensure_future(self.lease.hold())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        is_held = holding.done()
        holding.cancel()
        await asyncio.wait({holding})
        return is_held


def conversation(monkeypatch: pytest.MonkeyPatch, talk: Callable[[Agent], Awaitable[None]]) -> None:
    async def run() -> None:
        monkeypatch.setattr(time, "monotonic", asyncio.get_running_loop().time)
        await talk(Agent())

    run_virtual(run())


def test_a_grant_counts_from_the_question_and_is_renewed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(agent: Agent) -> None:
        assert not await agent.allows()
        await asyncio.sleep(0.5)
        agent.lease.grant(2.0)
        await asyncio.sleep(0.4)
        assert await agent.allows()
        assert agent.questions == 1
        await asyncio.sleep(0.2)
        assert await agent.allows()
        assert agent.questions == 2
        await asyncio.sleep(0.95)
        assert not await agent.allows(), "2 s after the first question"
        agent.lease.grant(2.0)
        assert await agent.allows()
        assert agent.questions == 2

    conversation(monkeypatch, talk)


def test_an_answer_that_allows_nothing_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(agent: Agent) -> None:
        holding = asyncio.ensure_future(agent.lease.hold())
        for _ in range(3):
            await asyncio.sleep(1.0)
            agent.lease.grant(0.0)
        await asyncio.sleep(1.0)
        assert agent.questions == 4
        assert not holding.done()
        agent.lease.grant(2.0)
        await holding

    conversation(monkeypatch, talk)


def test_an_answer_that_was_read_too_late_allows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(agent: Agent) -> None:
        assert not await agent.allows()
        await asyncio.sleep(3.0)
        agent.lease.grant(2.0)
        assert not await agent.allows()
        assert agent.questions == 2

    conversation(monkeypatch, talk)


def test_who_waits_hears_that_nothing_may_be_committed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(agent: Agent) -> None:
        holding = asyncio.ensure_future(agent.lease.hold())
        await asyncio.sleep(0)
        agent.lease.end(StaleGeneration("the others went on"))
        with pytest.raises(StaleGeneration, match="the others went on"):
            await holding

    conversation(monkeypatch, talk)
