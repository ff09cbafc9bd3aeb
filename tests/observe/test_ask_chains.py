"""Calls of actors that wait for each other, as the summaries of all ranks tell."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import asyncpar as ap
from asyncpar.node import Node
from asyncpar.observe.ask_chains import AskChain, find_ask_chains
from asyncpar.observe.summary import MOST_SERVED, AskSummary, RankReport, RankSummary
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world


def ask(rank: int, actor: str, **fields: Any) -> AskSummary:
    return AskSummary(rank=rank, actor=actor, endpoint="do", **fields)


def report(rank: int, *asks: AskSummary, condition: str = "well", **fields: Any) -> RankReport:
    made = RankSummary(rank=rank, pid=1, time=0.0, asks=asks, **fields)
    return RankReport(rank=rank, host="h", pid=1, condition=condition, seconds=3.0, summary=made)


def only(*reports: RankReport) -> AskChain:
    (chain,) = find_ask_chains(reports)
    return chain


def way(chain: AskChain) -> list[tuple[int, str]]:
    return [(step.rank, step.actor) for step in chain.steps]


def test_a_call_waits_for_the_call_that_its_endpoint_makes() -> None:
    chain = only(
        report(0, ask(1, "sampler", call=7, seconds=4.0, site="train.py:5")),
        report(1, ask(2, "store", call=3, caller="sampler", serves=(0, 7))),
        report(2, serving=((1, 3),)),
    )
    assert way(chain) == [(1, "sampler"), (2, "store")]
    assert (chain.ranks, chain.caller, chain.is_cycle, chain.end) == ((0,), "", False, "runs do()")
    assert (chain.steps[0].seconds, chain.steps[0].site) == (4.0, "train.py:5")


def test_a_call_in_a_mailbox_waits_for_what_the_actor_does_instead() -> None:
    holding = ask(2, "store", call=3, caller="sampler", serves=(5, 1), is_holding=True)
    chain = only(report(0, ask(1, "sampler", call=7)), report(1, holding), report(2))
    assert way(chain) == [(1, "sampler"), (2, "store")]


def test_a_call_whose_endpoint_runs_does_not_wait_for_others_of_its_actor() -> None:
    holding = ask(2, "store", call=3, caller="sampler", serves=(5, 1), is_holding=True)
    caller = report(0, ask(1, "sampler", call=7))
    assert find_ask_chains([caller, report(1, holding, serving=((0, 7),)), report(2)]) == []
    many = tuple((9, number) for number in range(MOST_SERVED))
    assert find_ask_chains([caller, report(1, holding, serving=many), report(2)]) == [], "it may be one of those"


def test_calls_beside_which_the_actor_takes_others_hold_up_nobody_else() -> None:
    beside = ask(2, "store", call=3, caller="sampler", serves=(5, 1))
    assert find_ask_chains([report(0, ask(1, "sampler", call=7)), report(1, beside), report(2)]) == []


def test_callers_that_wait_for_one_actor_are_one_chain() -> None:
    holding = ask(2, "store", call=3, caller="sampler", serves=(5, 7), is_holding=True)
    callers = [report(rank, ask(1, "sampler", call=7, seconds=float(rank))) for rank in range(5, 40)]
    chain = only(*callers, report(1, holding), report(2))
    assert chain.ranks == tuple(range(5, 40))
    assert chain.steps[0].seconds == 39.0


def test_a_cycle_is_one_chain_and_comes_first() -> None:
    first = report(0, ask(1, "b", call=1, caller="a", serves=(9, 9), is_holding=True))
    second = report(1, ask(0, "a", call=2, caller="b", serves=(0, 1), is_holding=True))
    chain = only(first, second)
    assert chain.is_cycle
    assert sorted(way(chain)) == [(0, "a"), (1, "b")]
    into = report(9, ask(0, "a", call=9, seconds=60.0))
    other = [report(3, ask(4, "x", call=0, seconds=90.0)), report(4, ask(5, "y", call=0, caller="x", serves=(3, 0)))]
    chains = find_ask_chains([*other, first, second, into])
    assert [(one.is_cycle, one.ranks) for one in chains] == [(True, (9,)), (False, (3,))]


def test_the_end_says_what_holds_it_up() -> None:
    chain = [report(0, ask(1, "b", call=1)), report(1, ask(2, "c", call=1, caller="b", serves=(0, 1)))]
    assert only(*chain, report(2, condition="stopped")).end == "is stopped (SIGSTOP, or a debugger), for 3.0 s"
    assert only(*chain).end == "is not known here"
    assert only(*chain, report(2)).end == ""


class Link(ap.Actor):
    """Asks the next one of a chain, which ends at a rank that sleeps."""

    def __init__(self, node: Node, names: Mapping[str, int]) -> None:
        self._node, self._names = node, names

    @ap.endpoint
    async def call(self, names: list[str]) -> int:
        if not names:
            await asyncio.sleep(60.0)
            return 0
        answer: int = await self._node.ref(names[0], self._names[names[0]]).call(names[1:])
        return answer


def reports_of(nodes: list[Node]) -> list[RankReport]:
    return [RankReport(rank=node.rank, host="h", pid=1, summary=node.observe.status()) for node in nodes]


def test_a_running_world_reports_its_chains_and_its_deadlocks() -> None:
    homes = {"a": 0, "b": 1, "c": 2}

    async def main() -> tuple[list[AskChain], list[AskChain]]:
        async with local_world(3) as nodes:
            for name, rank in homes.items():
                await nodes[rank].spawn(Link, nodes[rank], homes, name=name)
            calls = [asyncio.create_task(nodes[0].ref("b", 1).call(["c"]))]
            await asyncio.sleep(1.0)
            calls.append(asyncio.create_task(nodes[2].ref("b", 1).call([])))  # waits in the mailbox
            await asyncio.sleep(1.0)
            chained = find_ask_chains(reports_of(list(nodes)))
            calls[0].cancel()
            calls[1].cancel()
            await asyncio.sleep(1.0)
            around = asyncio.create_task(nodes[0].ref("a", 0).call(["b", "c", "a"]))
            await asyncio.sleep(1.0)
            cycle = find_ask_chains(reports_of(list(nodes)))
            around.cancel()
            await asyncio.gather(*calls, around, return_exceptions=True)
            return chained, cycle

    chained, (cycle,) = run_virtual(main())
    assert {(one.ranks, tuple(step.actor for step in one.steps)) for one in chained} == {((0, 2), ("b", "c"))}
    assert cycle.is_cycle
    assert [step.actor for step in cycle.steps] == ["a", "b", "c", "a"]
    assert cycle.steps[0].site.startswith("test_ask_chains.py:")


def test_dead_letters_are_in_the_summary_the_last_first() -> None:
    async def main() -> RankSummary:
        async with local_world(2) as nodes:
            ref = nodes[0].ref("nobody", 1)
            for _ in range(9):
                await ref.call.tell([])
            await asyncio.sleep(1.0)
            return nodes[1].observe.status()

    seen = run_virtual(main())
    assert (seen.dead_letters, len(seen.letters)) == (9, 4)
    assert (seen.letters[0].sender, seen.letters[0].rank, seen.letters[0].actor) == (0, 1, "nobody")
    assert seen.letters[0].reason == "there is no actor 'nobody' on rank 1"
