"""Decisions about who holds which workers."""

from __future__ import annotations

import random

from asyncpar.engines.gangs import TICKET_SECONDS, GangLedger

WORKERS = ["a", "b", "c"]


def test_a_gang_gets_all_its_workers_or_none() -> None:
    ledger = GangLedger()
    assert ledger.ask("one", "me", WORKERS, 2, owners=["me"], now=0.0) == ("a", "b")
    assert ledger.ask("two", "me", WORKERS, 2, owners=["me"], now=0.0) == ()
    ledger.release("one")
    assert ledger.ask("two", "me", WORKERS, 2, owners=["me"], now=1.0) == ("a", "b")


def test_who_asked_first_is_served_first_also_if_a_later_one_would_fit() -> None:
    ledger = GangLedger()
    ledger.ask("one", "me", WORKERS, 2, owners=["me"], now=0.0)
    assert ledger.ask("large", "me", WORKERS, 3, owners=["me"], now=0.0) == ()
    assert ledger.ask("small", "me", WORKERS, 1, owners=["me"], now=0.0) == ()
    ledger.release("one")
    assert ledger.ask("small", "me", WORKERS, 1, owners=["me"], now=1.0) == ()
    assert ledger.ask("large", "me", WORKERS, 3, owners=["me"], now=1.0) == ("a", "b", "c")


def test_a_gang_whose_owner_is_gone_gives_back_what_it_held() -> None:
    ledger = GangLedger()
    ledger.ask("one", "dead", WORKERS, 3, owners=["dead", "me"], now=0.0)
    assert ledger.ask("two", "me", WORKERS, 1, owners=["me"], now=0.0) == ("a",)


def test_a_gang_that_waits_and_does_not_ask_again_loses_its_turn() -> None:
    ledger = GangLedger()
    ledger.ask("one", "me", WORKERS, 2, owners=["me"], now=0.0)
    ledger.ask("two", "me", WORKERS, 3, owners=["me"], now=0.0)
    assert ledger.ask("three", "me", WORKERS, 1, owners=["me"], now=1.0) == ()
    assert ledger.ask("three", "me", WORKERS, 1, owners=["me"], now=1.0 + TICKET_SECONDS) == ("c",)


def test_a_hundred_pairs_all_run_in_any_order_of_asking() -> None:
    draw = random.Random(19)
    workers = [f"w{i}" for i in range(5)]
    ledger, waiting, running = GangLedger(), {f"job-{i}" for i in range(100)}, list[str]()
    wanted = {job: draw.sample(workers, 2) for job in waiting}
    for step in range(10_000):
        if not waiting and not running:
            return
        if waiting:
            job = draw.choice(sorted(waiting))
            if ledger.ask(job, "me", wanted[job], 2, owners=["me"], now=float(step) / 1000):
                waiting.discard(job)
                running.append(job)
        if running and draw.random() < 0.3:
            ledger.release(running.pop(draw.randrange(len(running))))
    raise AssertionError(f"{len(waiting)} jobs still wait")


def test_a_gang_that_runs_gets_more_workers_but_none_that_others_hold_or_wait_for() -> None:
    ledger = GangLedger()
    ledger.ask("one", "me", ["a"], 1, owners=["me"], now=0.0)
    ledger.ask("two", "me", ["b"], 1, owners=["me"], now=0.0)
    ledger.ask("three", "me", ["b", "c"], 2, owners=["me"], now=0.0)  # waits
    assert ledger.extend("one", ["b", "c", "d", "e"], 1, owners=["me"], now=1.0) == ("d",)
    assert list(ledger.gangs["one"].workers) == ["a", "d"]
    assert ledger.extend("three", ["e"], 1, owners=["me"], now=1.0) == ()
    assert ledger.extend("unknown", ["e"], 1, owners=["me"], now=1.0) == ()


def test_a_worker_that_a_gang_has_lost_is_given_again_and_can_be_given_back() -> None:
    ledger = GangLedger()
    ledger.ask("one", "me", ["a", "b"], 2, owners=["me"], now=0.0)
    assert ledger.extend("one", ["b", "c"], 2, owners=["me"], now=1.0) == ("b", "c")
    assert list(ledger.gangs["one"].workers) == ["a", "b", "c"]
    ledger.give_back("one", "c")
    assert list(ledger.gangs["one"].workers) == ["a", "b"]
    ledger.give_back("gone", "c")
