"""Jobs with a fixed number of hosts: how they fail, start again and end, by the machines of their hosts."""

from __future__ import annotations

import pytest

from asyncpar.core.observe.rank_reports import Phase
from asyncpar.launch.agents.host_protocol import AnnounceExit, NotifyRanks, PrintLine, ShowWorld, StateChanged
from asyncpar.launch.vitals import Condition, RankState
from tests.launch.agents.test_restarted_hosts import Cluster

AHEAD = {"a": 0.0, "b": 86_400.0, "c": -3_600.0}
"""By host: by how many seconds its clock is ahead."""


def pair(*, restarts: int = 0, ahead: dict[str, float] | None = None) -> Cluster:
    """Return hosts ``a`` (ranks 0 and 1) and ``b`` (2 and 3), which run."""
    cluster = Cluster(2, 2, restarts=restarts, is_fixed=True, ahead=ahead)
    cluster.arrive("a", "b")
    cluster.wait(0.2)
    assert cluster.running() == {"a": [0, 1], "b": [2, 3]}
    return cluster


def end_of(cluster: Cluster) -> tuple[int, str]:
    """Return the exit code and the message that all hosts have."""
    [end] = {end for end in cluster.ends() if end is not None}
    assert None not in cluster.ends()
    return end.exit_code, end.message


def test_the_end_of_the_job_names_what_has_failed_on_all_hosts() -> None:
    cluster = pair()
    cluster.end(1, 5)
    lines = [host.lines for host in cluster.hosts.values()]
    assert lines == [["rank 1 on a exited with code 5; stopping all ranks"]] * 2
    cluster.end(2, 1, blames=1)
    cluster.wait(1.0)
    code, message = end_of(cluster)
    assert code == 5
    assert message.startswith("rank 1 failed first: exited with code 5\n  on a (")
    assert "then rank 2 on b" in message


def test_a_rank_that_blames_another_is_given_a_second_for_the_culprit_to_show() -> None:
    cluster = pair()
    cluster.end(0, 1, blames=3)
    cluster.wait(0.9)
    assert cluster.running() == {"a": [1], "b": [2, 3]}
    cluster.end(3, 5)
    cluster.wait(1.0)
    code, message = end_of(cluster)
    assert code == 5
    assert message.startswith("rank 3 failed first")
    assert "then rank 0" in message


def test_if_nobody_else_fails_within_a_second_the_blaming_rank_counts() -> None:
    cluster = pair()
    cluster.end(0, 1, blames=3)
    cluster.wait(1.2)
    assert cluster.running() == {"a": [1], "b": [2, 3]}
    cluster.wait(1.0)
    assert end_of(cluster)[1].startswith("rank 0 failed first: PeerLost: oh")


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_leaves_with_code_0_is_the_first_failure_whenever_its_end_is_seen(is_late: bool) -> None:
    cluster = pair()
    for rank in (0, 2, 1) if is_late else (1, 0, 2):
        cluster.end(rank, int(rank != 1), blames=None if rank == 1 else 1)
    cluster.wait(3.0)
    code, message = end_of(cluster)
    assert code == 1
    assert message.startswith("rank 1 failed first: exited with code 0 while other ranks still needed it\n  on a (")
    first, *others = cluster.hosts["a"].machine.failures
    assert (first.rank, [end.rank for end in others]) == (1, [0, 2])


@pytest.mark.parametrize("was_member", [True, False])
def test_a_rank_that_has_left_the_world_and_still_runs_is_the_first_failure_if_it_was_ever_there(
    was_member: bool,
) -> None:
    cluster = pair()
    for phase in (Phase.FORMING, *([Phase.MEMBER] if was_member else []), Phase.LEFT):
        state = RankState(generation=0, rank=1, phase=phase, condition=Condition.WELL)
        cluster.feed("b", StateChanged(1, state))
    cluster.end(0, 1, blames=3)
    cluster.wait(3.0)
    first = "rank 3 failed first: left the world while other ranks still needed it"
    assert end_of(cluster)[1].startswith(first if was_member else "rank 0 failed first: PeerLost")


def test_a_rank_that_is_done_early_explains_nothing_that_names_another() -> None:
    cluster = pair()
    cluster.end(1, 0)
    cluster.wait(4.0)
    cluster.end(0, 3)
    cluster.end(2, 1, blames=0)
    cluster.end(3, 0)
    cluster.wait(1.0)
    assert end_of(cluster)[0] == 3
    assert [end.rank for end in cluster.hosts["a"].machine.failures] == [0, 2]


def test_a_failure_before_the_stop_counts_though_its_process_ends_later() -> None:
    cluster = pair()
    cluster.wait(2.0)
    for host in cluster.hosts.values():
        host.is_deaf = True
    cluster.end(1, 4)
    cluster.wait(0.5)
    cluster.end(2, 1, ago=0.7, raised="ValueError")
    cluster.end(3, 1, ago=0.1, raised="KeyError")
    cluster.end(0, 0)
    cluster.wait(1.0)
    message = end_of(cluster)[1]
    assert message.startswith("rank 2 failed first: ValueError: oh")
    assert "then rank 1" in message
    assert "then rank 3" in message  # its failure came after the order to stop: a consequence


@pytest.mark.parametrize("culprit", range(3))
def test_the_first_failure_counts_whatever_the_clocks_of_hosts_are(culprit: int) -> None:
    cluster = Cluster(3, 3, is_fixed=True, ahead=AHEAD, slots=dict.fromkeys(AHEAD, 1))
    cluster.arrive(*AHEAD)
    cluster.wait(0.2)
    for rank in sorted(range(3), key=lambda rank: rank == culprit):  # the first one is heard of last
        cluster.end(rank, 1 + rank, ago=0.1 if rank == culprit else 0.0)
    cluster.wait(1.0)
    assert end_of(cluster)[0] == 1 + culprit


def test_ranks_start_again_on_all_hosts_while_restarts_are_left() -> None:
    cluster = pair(restarts=1)
    cluster.end(2, 3)
    cluster.wait(1.0)
    assert cluster.running() == {"a": [0, 1], "b": [2, 3]}
    assert cluster.restarts() == {1}
    for host in cluster.hosts.values():
        stopping, why, again = host.lines
        assert stopping == "rank 2 on b exited with code 3; stopping all ranks"
        assert why.startswith("rank 2 failed first: exited with code 3")
        assert again == "starting all ranks again (restart 1)"
        shown = [one for one in host.others if isinstance(one, ShowWorld)]
        assert shown == [ShowWorld(0, 4, 0, ""), ShowWorld(1, 4, 1, "rank 2 on b exited with code 3")]
    cluster.end(0, 6)
    cluster.wait(1.0)
    assert end_of(cluster)[0] == 6


def test_a_host_that_is_lost_fails_with_all_of_its_ranks_and_cannot_be_replaced() -> None:
    cluster = pair(restarts=3)
    cluster.lose_fixed("b")
    host = cluster.hosts["a"]
    told = [one.loss for one in host.others if isinstance(one, NotifyRanks)]
    assert [(loss.rank, loss.how) for loss in told] == [(2, "was lost with the agent on b (gone)"), (3, told[1].how)]
    assert [one.rank for one in host.others if isinstance(one, AnnounceExit)] == [2, 3]
    assert host.lines == ["rank 2 on b was lost with the agent on b (gone); stopping all ranks"]
    cluster.end(0, 1, blames=2)
    cluster.wait(1.0)
    code, message = end_of(cluster)
    assert code == 1
    assert message.startswith("rank 2 failed first: was lost with the agent on b (gone)\n  on b (local rank 0)\n")
    assert "then rank 0" in message
    assert "then rank 3 on b: the same" in message


def test_a_host_that_is_lost_after_its_ranks_are_done_does_not_matter_to_those_that_go_on() -> None:
    cluster = pair()
    for rank in (2, 3):
        cluster.end(rank, 0)
    cluster.lose_fixed("b")
    cluster.wait(1.0)
    assert cluster.running() == {"a": [0, 1]}


def test_a_host_that_is_lost_while_ranks_are_to_start_again_ends_the_job_with_what_had_failed() -> None:
    cluster = pair(restarts=3)
    cluster.hosts["b"].is_deaf = True
    cluster.end(0, 3)
    cluster.wait(1.0)
    assert cluster.running() == {"a": [], "b": [2, 3]}
    cluster.lose_fixed("b")
    assert end_of(cluster) == (3, cluster.hosts["a"].end.message)  # type: ignore[union-attr]
    assert end_of(cluster)[1].startswith("rank 0 failed first: exited with code 3")


def test_a_host_whose_loss_is_known_only_after_others_have_lost_its_ranks_explains_that() -> None:
    cluster = pair(restarts=3)
    del cluster.hosts["b"]
    for rank in (0, 1):
        cluster.end(rank, 1, blames=2)
    cluster.wait(3.0)
    assert cluster.ends() == [None]
    cluster.hosts["b"] = cluster.hosts["a"]
    cluster.lose_fixed("b")
    code, message = end_of(cluster)
    assert code == 1
    assert message.startswith("rank 2 failed first: was lost with the agent on b (gone)")
    assert "then ranks 0, 1 on a: PeerLost: oh" in message


def test_a_host_that_does_not_end_its_ranks_is_not_waited_for_for_ever() -> None:
    cluster = pair(restarts=3)
    cluster.end(0, 3)
    del cluster.hosts["b"]  # it is silent
    cluster.wait(5.0 + 15.0 - 1.0)
    assert cluster.ends() == [None]
    cluster.wait(32.0)  # its last members are waited for a little longer
    code, message = end_of(cluster)
    assert code == 3
    assert message.startswith("rank 0 failed first: exited with code 3")


def test_what_is_printed_of_a_failure_is_printed_once() -> None:
    cluster = pair()
    cluster.end(1, 5)
    cluster.wait(2.0)
    for host in cluster.hosts.values():
        assert [one for one in host.others if isinstance(one, PrintLine)] == [
            PrintLine("rank 1 on a exited with code 5; stopping all ranks")
        ]
