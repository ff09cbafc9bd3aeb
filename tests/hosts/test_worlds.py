"""The machine of the agent that leads, by conversation."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from asyncpar.hosts.codec import decode_group, decode_message, encode_group, encode_message
from asyncpar.hosts.director import SHORT_PATIENCE
from asyncpar.hosts.group import GroupNode, GroupState, HostFacts, choose_voters
from asyncpar.hosts.lineage import Lineage, MemberReport
from asyncpar.hosts.messages import (
    ChangePending,
    HostCommand,
    HostDraining,
    HostEvent,
    HostLeaving,
    JobClosed,
    JobOpened,
    JobStopped,
    MemberArrived,
    MemberDied,
    MemberDismissed,
    MemberDraining,
    MemberFailed,
    MemberHealing,
    MemberLeft,
    MemberProgressed,
    MemberReady,
    MemberReported,
    MembersWanted,
    MemberWaits,
    MemberWithdrawn,
    WorldAnnounced,
    WorldEnded,
    WorldStarted,
    WorldTerms,
)
from asyncpar.hosts.worlds import (
    CommandHosts,
    HostReported,
    LeaderCommand,
    NodeGone,
    NodeJoined,
    ProposeState,
    StateDecided,
    VotersDue,
    WorldMachine,
    WorldTick,
)

ZERO = Lineage(0, b"zero")
NINTH = Lineage(9, b"nine")


def node(name: str) -> GroupNode:
    return GroupNode(node=f"{name}#1", name=name, address=f"{name}:1")


class Talk:
    """A conversation with the leader of hosts, whose proposals are decided at once unless ``holds``."""

    def __init__(self, *hosts: str, least: int = 1, most: int = 2, on_total_loss: str = "restart") -> None:
        self.state = GroupState(nodes=tuple(map(node, hosts)))
        self.machine = WorldMachine(self.state, now=0.0)
        self.now = 0.0
        self.holds = False
        self.held: GroupState | None = None
        self.heard: list[HostCommand] = []
        terms = WorldTerms(least_hosts=least, most_hosts=most, members=1, last_call=5.0, on_total_loss=on_total_loss)
        self.job = JobOpened(number=1, terms=terms, record=b"job")

    def obey(self, commands: list[LeaderCommand]) -> None:
        for command in commands:
            match command:
                case ProposeState(state):
                    self.held = state
                    if not self.holds:
                        self.decide()
                case CommandHosts(told):
                    self.heard.append(told)

    def decide(self) -> None:
        assert self.held is not None
        self.state, self.held = self.held, None
        self.obey(self.machine.handle(StateDecided(self.state), now=self.now))

    def tell(self, host: str, *events: HostEvent) -> None:
        for event in events:
            self.obey(self.machine.handle(HostReported(f"{host}#1", event), now=self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.machine.handle(WorldTick(), now=self.now))

    def arrive(self, *members: str, lineage: Lineage = ZERO) -> None:
        for member in members:
            host = member.partition("/")[0]
            arrived = MemberArrived(member=member, host=host, lineage=lineage, address=f"snapshots of {member}")
            self.tell(host, arrived)

    def report(self, *members: str, generation: int, lineage: Lineage = ZERO) -> None:
        for member in members:
            report = MemberReport(generation=generation, lineage=lineage)
            self.tell(member.partition("/")[0], MemberReported(member=member, report=report))

    @property
    def members(self) -> list[str]:
        return [] if self.state.world is None else [member.name for member in self.state.world.members]

    def change_leader(self) -> None:
        self.machine = WorldMachine(self.state, now=self.now)


def begun(*hosts: str, least: int = 1) -> Talk:
    talk = Talk(*hosts, least=least, most=len(hosts))
    talk.tell(hosts[0], talk.job)
    talk.arrive(*(f"{host}/0/a" for host in hosts))
    return talk


def test_a_world_forms_when_all_are_there_or_after_the_last_call() -> None:
    assert begun("a", "b").members == ["a/0/a", "b/0/a"]
    talk = Talk("a", "b")
    talk.tell("a", talk.job)
    talk.arrive("a/0/a")
    talk.wait(4.9)
    assert talk.members == []
    talk.wait(0.2)
    assert talk.members == ["a/0/a"]


def test_members_that_begin_with_other_settings_stop_the_job_and_are_named() -> None:
    talk = Talk("a", "b")
    talk.tell("a", talk.job)
    for host, portions in (("a", "8"), ("b", "16")):
        settings = (("portions", portions), ("seed", "1"))
        talk.tell(host, MemberArrived(member=f"{host}/0/a", host=host, lineage=ZERO, settings=settings))
    talk.wait(6.0)
    stopped = [told.why for told in talk.heard if isinstance(told, JobStopped)]
    assert stopped == ["portions: expected the same on all ranks when the job begins, got 8 at a/0/a, 16 at b/0/a"]
    assert talk.members == []


def test_what_comes_while_a_change_is_decided_is_not_lost() -> None:
    talk = Talk("a", "b")
    talk.holds = True
    talk.tell("a", talk.job)
    talk.arrive("a/0/a", "b/0/a")
    assert talk.members == []
    talk.holds = False
    talk.decide()
    assert talk.members == ["a/0/a", "b/0/a"]


def test_nobody_hears_of_a_world_before_it_is_decided() -> None:
    talk = begun("a", "b")
    talk.tell("a", MemberReady("a/0/a", 0, "x"))
    talk.holds = True
    talk.tell("b", MemberDied("b/0/a", "was killed"))
    talk.report("a/0/a", generation=0)
    assert talk.heard == [WorldEnded(0, "b/0/a was killed")]
    assert talk.members == ["a/0/a", "b/0/a"]
    talk.decide()
    assert talk.members == ["a/0/a"]
    assert talk.state.world is not None
    assert "was killed" in talk.state.world.change.why


def test_another_leader_goes_on_with_what_hosts_tell_it_anew() -> None:
    talk = begun("a", "b")
    for host in ("a", "b"):
        talk.tell(host, MemberReady(f"{host}/0/a", 0, f"{host} there"))
    talk.report("a/0/a", generation=0)
    talk.change_leader()
    for host in ("b", "a"):
        talk.tell(host, MemberReady(f"{host}/0/a", 0, f"{host} there"))
    assert talk.heard.count(WorldStarted(0, ("a there", "b there"))) == 2  # the service passes it on once
    talk.report("a/0/a", "b/0/a", generation=0)
    assert talk.state.world is not None
    assert talk.state.world.generation == 1
    talk.change_leader()
    talk.report("a/0/a", generation=0)  # told again: it is in the world, and is not sent away
    assert not any(isinstance(told, MemberDismissed) for told in talk.heard)


def test_another_leader_waits_for_no_member_whose_host_is_gone() -> None:
    """A leader that leaves takes itself out first; the world without its ranks is formed by the next one."""
    talk = begun("a", "b")
    talk.holds = True
    talk.tell("a", HostLeaving("a"))
    assert talk.held is not None
    talk.state, talk.holds = talk.held, False
    assert ([host.name for host in talk.state.nodes], talk.members) == (["b"], ["a/0/a", "b/0/a"])
    talk.change_leader()
    talk.wait(0.1)
    assert [type(told) for told in talk.heard[-1:]] == [WorldEnded]
    talk.report("b/0/a", generation=0)
    assert talk.members == ["b/0/a"]


def test_a_lost_host_takes_its_members_along_and_may_come_again() -> None:
    talk = begun("a", "b", "c")
    talk.obey(talk.machine.handle(NodeGone("c#1", "its agent is gone"), now=talk.now))
    talk.report("a/0/a", "b/0/a", generation=0)
    assert talk.members == ["a/0/a", "b/0/a"]
    assert talk.state.world is not None
    assert "lost with its host (its agent is gone)" in talk.state.world.change.why
    assert [one.name for one in talk.state.nodes] == ["a", "b"]
    talk.obey(talk.machine.handle(NodeJoined(replace(node("c"), node="c#2")), now=talk.now))
    assert choose_voters(talk.state, ("b#1", "c#1"), "a#1") == ("a#1", "b#1", "c#2")
    talk.tell("b", HostLeaving("b"))
    assert [one.name for one in talk.state.nodes] == ["a", "c"]


def test_a_member_that_asks_to_leave_is_drained_and_another_leader_hears_of_it() -> None:
    talk = begun("a", "b")
    talk.tell("b", MemberDraining("b/0/a"))
    talk.report("a/0/a", "b/0/a", generation=0)
    assert talk.members == ["a/0/a"]
    assert talk.state.world is not None
    assert (talk.state.world.change.left, talk.state.world.change.is_by_loss) == (("b/0/a",), False)
    assert WorldEnded(0, "a/0/a is ready for a change", is_planned=True) in talk.heard
    facts = HostFacts()
    facts.note(MemberDraining("b/0/a"))
    facts.prune(talk.state)
    assert facts.all() == [MemberDraining("b/0/a")]
    facts.note(MemberLeft("b/0/a"))
    assert facts.all() == [MemberLeft("b/0/a")]


def test_below_the_least_number_of_hosts_no_world_forms() -> None:
    talk = begun("a", "b", least=2)
    talk.tell("b", MemberDied("b/0/a", "was killed"))
    talk.report("a/0/a", generation=0)
    assert talk.members == ["a/0/a", "b/0/a"]
    talk.arrive("b/0/b")
    assert talk.members == ["a/0/a", "b/0/b"]


def test_when_all_are_lost_a_world_of_nobody_comes_and_then_a_first_one_again() -> None:
    talk = begun("a", "b")
    talk.tell("a", MemberDied("a/0/a", "crashed"))
    talk.tell("b", MemberDied("b/0/a", "crashed"))
    assert talk.state.world is not None
    assert (talk.members, talk.state.world.generation) == ([], 1)
    talk.arrive("a/0/b", "b/0/b")
    assert (talk.members, talk.state.world.generation) == (["a/0/b", "b/0/b"], 2)


def test_members_that_are_done_leave_no_world_of_nobody() -> None:
    talk = begun("a", "b")
    talk.tell("a", MemberLeft("a/0/a"))
    talk.tell("b", MemberLeft("b/0/a"))
    talk.tell("b", JobClosed(number=1, record=b"end"))
    assert talk.members == ["a/0/a", "b/0/a"]
    assert not talk.state.is_job_open


def test_jobs_open_one_after_another_and_generations_go_on() -> None:
    talk = begun("a", "b")
    talk.tell("a", msgspec.structs.replace(talk.job, number=2))
    assert talk.state.job == talk.job
    talk.tell("b", JobClosed(number=2, record=b"none"))
    assert talk.state.is_job_open
    talk.tell("b", JobClosed(number=1, record=b"end"))
    talk.tell("a", msgspec.structs.replace(talk.job, number=2))
    assert talk.state.is_job_open
    talk.arrive("a/0/b", "b/0/b")
    assert talk.state.world is not None
    assert talk.state.world.generation == 1


def test_facts_are_kept_until_they_are_decided_and_void_ones_go() -> None:
    facts = HostFacts()
    arrived = MemberArrived(member="a/0/a", host="a", lineage=ZERO)
    facts.note(arrived)
    facts.note(MemberWithdrawn("a/0/a"))
    assert facts.all() == [MemberWithdrawn("a/0/a")]
    facts.note(arrived)
    facts.note(MemberProgressed("a/0/a", Lineage(1, b"one")))
    assert facts.all()[0] == msgspec.structs.replace(arrived, lineage=Lineage(1, b"one"))
    talk = begun("a", "b")
    facts.prune(talk.state)
    assert facts.all() == []
    facts.note(MemberReady("a/0/a", 0, "x"))
    facts.prune(talk.state)
    assert facts.all() == [MemberReady("a/0/a", 0, "x")]
    facts.note(MemberDied("a/0/a", "crashed"))
    assert facts.all() == [MemberDied("a/0/a", "crashed")]


def test_states_and_messages_travel_as_they_are() -> None:
    state = begun("a", "b").state
    assert decode_group(encode_group(state)) == state
    assert isinstance(state.world, WorldAnnounced)
    report = MemberReport(generation=1, lineage=ZERO, prepared=ZERO, suspects=((1, "gone"),))
    for message in (MemberReported(member="a/0/a", report=report, why="w"), WorldStarted(1, ("x", "y"))):
        assert decode_message(encode_message(message)) == message


def test_witnesses_vote_last_and_always() -> None:
    nodes = tuple(node(name) for name in "abcdef") + tuple(replace(node(name), is_witness=True) for name in "wx")
    state = GroupState(nodes=nodes)
    assert choose_voters(state, (), "a#1") == ("a#1", "b#1", "c#1", "d#1", "w#1")
    two = replace(state, nodes=(nodes[0], nodes[1], nodes[6]))
    assert choose_voters(two, (), "w#1") == ("a#1", "b#1", "w#1")
    assert choose_voters(two, ("b#1", "w#1"), "w#1") == ("b#1", "a#1", "w#1")
    assert choose_voters(replace(state, nodes=nodes[6:]), (), "x#1") == ("x#1", "w#1")


def test_who_was_let_in_votes_once_it_is_heard() -> None:
    state = GroupState(nodes=tuple(map(node, "abc")))
    heard = {"b#1"}
    assert choose_voters(state, ("a#1",), "a#1", heard.__contains__) == ("a#1", "b#1")
    heard.add("c#1")
    assert choose_voters(state, ("a#1", "b#1"), "a#1", heard.__contains__) == ("a#1", "b#1", "c#1")
    assert choose_voters(state, ("a#1", "c#1"), "a#1", set[str]().__contains__) == ("a#1", "c#1"), "it votes already"
    talk = begun("a", "b")
    before = talk.state
    talk.holds = True
    talk.obey(talk.machine.handle(VotersDue(), now=talk.now))
    assert talk.held == before, "it is decided anew, as it is"


def test_who_was_healed_by_members_that_are_lost_begins_anew_with_the_others() -> None:
    talk = begun("a", "b")
    talk.tell("b", MemberDied("b/0/a", "was killed"))
    talk.tell("a", MemberDied("a/0/a", "was killed"))
    assert talk.members == []
    talk.arrive("b/0/b", lineage=Lineage(7, b"healed"))
    talk.arrive("a/0/b")
    dismissed = [told.member for told in talk.heard if isinstance(told, MemberDismissed)]
    assert dismissed == ["b/0/b"]
    talk.wait(6.0)
    assert talk.members == ["a/0/b"]


def dismissed(talk: Talk) -> list[str]:
    return [told.member for told in talk.heard if isinstance(told, MemberDismissed) and told.is_drained]


def test_hosts_that_all_drain_leave_together_at_the_end_of_one_step() -> None:
    talk = begun("a", "b", "c")
    talk.tell("a", HostDraining("a"))
    talk.tell("b", HostDraining("b"))
    talk.tell("c", HostDraining("c"))
    talk.report("a/0/a", "b/0/a", "c/0/a", generation=0)
    assert dismissed(talk) == ["a/0/a", "b/0/a", "c/0/a"]
    for host in ("a", "b", "c"):
        talk.tell(host, MemberLeft(f"{host}/0/a"), HostLeaving(host))
    talk.wait(10.0)
    assert talk.state.generation == 1, "no world comes after it"
    assert reasons(talk) == []


def test_the_last_of_the_draining_hosts_ends_with_its_step_without_another_world() -> None:
    talk = begun("a", "b")
    talk.tell("a", HostDraining("a"))
    talk.report("a/0/a", "b/0/a", generation=0)
    assert dismissed(talk) == ["a/0/a"]
    assert talk.members == ["b/0/a"]
    talk.tell("b", HostDraining("b"))
    talk.report("b/0/a", generation=1)
    assert dismissed(talk) == ["a/0/a", "b/0/a"]
    assert talk.state.generation == 2


def test_draining_hosts_hand_over_to_one_that_comes() -> None:
    talk = begun("a", "b")
    for host in ("a", "b"):
        talk.tell(host, HostDraining(host))
    talk.obey(talk.machine.handle(NodeJoined(node("c")), now=talk.now))
    talk.arrive("c/0/a")
    talk.report("a/0/a", "b/0/a", generation=0)
    assert "c/0/a" in talk.members
    assert len(dismissed(talk)) == 1, "one after another"


def lose_all(on_total_loss: str, *, steps: int, is_led_by_another: bool = False) -> Talk:
    """Have a world of two whose members are lost, when they had committed ``steps``."""
    talk = Talk("a", "b", on_total_loss=on_total_loss)
    talk.tell("a", talk.job)
    talk.arrive("a/0/a", "b/0/a")
    talk.tell("b", MemberDied("b/0/a", "was killed", steps))
    if is_led_by_another:
        talk.change_leader()
        talk.tell("b", MemberDied("b/0/a", "was killed", steps))  # told again
    talk.tell("a", MemberDied("a/0/a", "was killed", steps - 1))
    assert talk.members == []
    return talk


def reasons(talk: Talk) -> list[str]:
    return [told.why for told in talk.heard if isinstance(told, JobStopped)]


@pytest.mark.parametrize("is_led_by_another", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 355])
def test_a_job_whose_members_are_all_lost_ends_where_there_is_no_checkpoint(
    steps: int, *, is_led_by_another: bool
) -> None:
    talk = lose_all("checkpoint", steps=steps, is_led_by_another=is_led_by_another)
    if is_led_by_another:
        talk.change_leader()
    talk.arrive("a/0/b", "b/0/b")
    talk.wait(6.0)
    assert talk.members == []
    (why,) = reasons(talk)
    counts = {0: "its first committed steps", 1: "at least 1 committed step;", 355: "at least 355 committed steps;"}
    assert f"all members are lost, and with them {counts[steps]}" in why
    assert "--on-total-loss restart" in why


@pytest.mark.parametrize("is_led_by_another", [False, True])
def test_a_job_whose_members_are_all_lost_goes_on_from_a_checkpoint_again_and_again(*, is_led_by_another: bool) -> None:
    talk = lose_all("checkpoint", steps=355, is_led_by_another=is_led_by_another)
    saved = Lineage(0, b"saved")
    talk.arrive("a/0/b", "b/0/b", lineage=saved)
    assert talk.members == ["a/0/b", "b/0/b"]
    talk.tell("a", MemberDied("a/0/b", "was killed", 7))
    talk.tell("b", MemberDied("b/0/b", "was killed", 7))
    talk.arrive("a/0/c", "b/0/c", lineage=saved)
    assert talk.members == ["a/0/c", "b/0/c"], "it is still the last checkpoint"
    talk.tell("a", MemberDied("a/0/c", "was killed", 9))
    talk.tell("b", MemberDied("b/0/c", "was killed", 9))
    talk.arrive("a/0/d", "b/0/d")
    assert ["at least 9 committed steps" in why for why in reasons(talk)] == [True], "the checkpoint was deleted"


def test_a_job_whose_members_are_all_lost_begins_anew_if_that_was_asked_for_or_nothing_was_committed() -> None:
    for talk in (lose_all("restart", steps=355), lose_all("checkpoint", steps=-1), lose_all("fail", steps=-1)):
        talk.arrive("a/0/b", "b/0/b")
        assert talk.members == ["a/0/b", "b/0/b"]
        assert reasons(talk) == []


def test_a_job_whose_members_are_all_lost_ends_at_once_if_that_was_asked_for() -> None:
    talk = lose_all("fail", steps=12)
    assert reasons(talk) == ["all members are lost, and with them at least 12 committed steps (--on-total-loss fail)"]


def test_too_few_commit_a_step_that_newcomers_have_to_be_healed_of() -> None:
    talk = begun("a", "b", least=2)
    talk.tell("b", MemberDied("b/0/a", "was killed"))
    done = ZERO.child(b"step")
    report = MemberReport(generation=0, lineage=ZERO, prepared=done)
    talk.tell("a", MemberReported(member="a/0/a", report=report))
    assert talk.members == ["a/0/a", "b/0/a"]
    talk.arrive("b/0/b", lineage=ZERO)
    assert talk.members == ["a/0/a"]
    assert talk.state.world is not None
    assert talk.state.world.lineage == done
    talk.tell("b", MemberProgressed("b/0/b", done))
    talk.report("a/0/a", generation=1, lineage=done)
    assert talk.members == ["a/0/a", "b/0/b"]


def short(talk: Talk) -> list[str]:
    """Lose b of two hosts that are both needed; return the members of the world that comes."""
    talk.tell("b", MemberDied("b/0/a", "was killed"))
    talk.report("a/0/a", generation=talk.state.generation - 1)
    return talk.members


def test_too_few_go_on_for_a_newcomer_that_waits_for_their_next_step() -> None:
    talk = begun("a", "b", least=2)
    assert short(talk) == ["a/0/a", "b/0/a"]
    talk.tell("b", MemberHealing("b/0/b", "b"))
    assert talk.members == ["a/0/a"]
    talk.wait(10.0)
    assert not any(told.generation == 1 for told in talk.heard if isinstance(told, WorldEnded))
    talk.arrive("b/0/b", lineage=ZERO.child(b"step"))
    talk.report("a/0/a", generation=1, lineage=ZERO.child(b"step"))
    assert talk.members == ["a/0/a", "b/0/b"]


def test_who_heals_counts_whatever_comes_first_and_for_every_leader() -> None:
    talk = begun("a", "b", "c", least=3)
    talk.tell("b", MemberDied("b/0/a", "was killed"), MemberHealing("b/0/b", "b"))
    talk.tell("c", MemberDied("c/0/a", "was killed"))
    talk.report("a/0/a", generation=0)
    assert len(talk.members) == 3, "nobody comes for c"
    talk.change_leader()
    facts = HostFacts()
    facts.note(MemberHealing("b/0/b", "b"))
    talk.tell("c", MemberDied("c/0/a", "was killed"), MemberHealing("c/0/b", "c"))
    talk.tell("b", MemberDied("b/0/a", "was killed"), *facts.all())
    assert len(talk.members) == 3, "a has not reported yet"
    talk.report("a/0/a", generation=0)
    assert talk.members == ["a/0/a"]


def test_a_newcomer_that_is_ahead_of_too_few_is_caught_up_with() -> None:
    talk = begun("a", "b", least=2)
    assert short(talk) == ["a/0/a", "b/0/a"]
    talk.arrive("b/0/b", lineage=ZERO.child(b"it had the sums of the step that is aborted"))
    assert talk.members == ["a/0/a"]


def test_too_few_do_not_go_on_when_nobody_comes_any_more() -> None:
    for is_host in (False, True):
        talk = begun("a", "b", least=2)
        short(talk)
        talk.tell("b", MemberHealing("b/0/b", "b"))
        if is_host:
            talk.obey(talk.machine.handle(NodeGone("b#1", "its agent is gone"), now=talk.now))
        else:
            talk.tell("b", MemberDied("b/0/b", "was killed"))
        talk.wait(0.1)
        assert not [told for told in talk.heard if isinstance(told, WorldEnded) and told.generation == 1]
        talk.wait(SHORT_PATIENCE)
        assert [told for told in talk.heard if isinstance(told, WorldEnded) and told.generation == 1]
        talk.report("a/0/a", generation=1)
        assert talk.state.world is not None
        assert talk.state.world.generation == 1, "it waits"


def test_a_change_names_the_end_of_members_not_what_others_saw_of_it() -> None:
    talk = begun("a", "b")
    report = MemberReport(generation=0, lineage=ZERO, suspects=((1, "the peer closed the connection"),))
    talk.tell("a", MemberReported(member="a/0/a", report=report))
    talk.obey(talk.machine.handle(NodeGone("b#1", "its agent is gone"), now=talk.now))
    assert talk.state.world is not None
    assert talk.state.world.change.why == "b/0/a was lost with its host (its agent is gone)"


def test_a_step_that_fails_in_every_place_stops_the_job_and_is_named() -> None:
    talk = begun("a", "b")
    talk.tell("a", MemberFailed("a/0/a", 7, "ValueError: bad batch"))
    assert "a/0/a failed at step 7: ValueError: bad batch" in next(
        told.why for told in talk.heard if isinstance(told, WorldEnded)
    )
    talk.report("b/0/a", generation=0)
    talk.tell("a", MemberFailed("a/0/a", 7, "ValueError: bad batch"))  # told again
    assert not any(isinstance(told, JobStopped) for told in talk.heard)
    talk.tell("b", MemberFailed("b/0/a", 7, "ValueError: bad batch"))
    stopped = [told.why for told in talk.heard if isinstance(told, JobStopped)]
    assert stopped == [
        "step 7: it failed in every place; the fault is in the program, not in the world: ValueError: bad batch"
    ]


def test_steps_that_fail_one_after_another_stop_nothing() -> None:
    talk = begun("a", "b")
    talk.tell("a", MemberFailed("a/0/a", 7, "x"))
    talk.report("b/0/a", generation=0)
    talk.arrive("a/0/b", lineage=ZERO)
    talk.tell("b", MemberFailed("b/0/a", 8, "x"))
    assert not any(isinstance(told, JobStopped) for told in talk.heard)
    alone = begun("a")
    alone.tell("a", MemberFailed("a/0/a", 7, "x"))
    assert not any(isinstance(told, JobStopped) for told in alone.heard)
    alone.arrive("a/0/b")
    alone.tell("a", MemberFailed("a/0/b", 7, "x"))
    assert any(isinstance(told, JobStopped) for told in alone.heard)


def crowded() -> Talk:
    """Begin a job of two hosts at most, to which a third one comes."""
    talk = Talk("a", "b", "c", most=2)
    talk.tell("a", talk.job)
    talk.arrive("a/0/a", "b/0/a", "c/0/a")
    talk.tell("c", MemberProgressed("c/0/a", ZERO))
    talk.wait(5.0)
    return talk


def test_hosts_beyond_the_most_change_nothing_and_enter_no_world() -> None:
    talk = crowded()
    assert not any(isinstance(told, ChangePending) for told in talk.heard)
    talk.report("a/0/a", "b/0/a", generation=0)
    assert talk.members == ["a/0/a", "b/0/a"]
    talk.change_leader()
    talk.arrive("c/0/a")
    talk.report("a/0/a", "b/0/a", generation=1)
    assert talk.members == ["a/0/a", "b/0/a"]


def test_a_host_that_waits_takes_the_place_of_one_that_is_lost_or_drained() -> None:
    talk = crowded()
    talk.obey(talk.machine.handle(NodeGone("b#1", "its agent is gone"), now=talk.now))
    talk.report("a/0/a", generation=0)
    assert talk.members == ["a/0/a", "c/0/a"]
    talk = crowded()
    talk.tell("b", HostDraining("b"))
    talk.report("a/0/a", "b/0/a", generation=0)
    assert talk.members == ["a/0/a", "c/0/a"]


def test_of_two_hosts_that_wait_for_one_place_one_enters() -> None:
    talk = Talk("a", "b", "c", "d", most=2)
    talk.tell("a", talk.job)
    talk.arrive("a/0/a", "b/0/a", "d/0/a", "c/0/a")
    talk.tell("b", MemberDied("b/0/a", "was killed"))
    talk.report("a/0/a", generation=0)
    assert talk.members == ["a/0/a", "d/0/a"], "who came first"


def test_hosts_that_arrive_one_soon_after_another_make_one_change() -> None:
    talk = Talk("a", "b", "c", "d", most=4)
    talk.tell("a", talk.job)
    talk.arrive("a/0/a")
    talk.wait(5.0)
    for host in ("b", "c", "d"):
        talk.tell(host, MemberHealing(f"{host}/0/a", host))
    for host in ("b", "c", "d"):
        assert ChangePending(0) not in talk.heard
        talk.arrive(f"{host}/0/a")
        talk.tell(host, MemberProgressed(f"{host}/0/a", ZERO))
        talk.wait(0.2)
    assert talk.heard.count(ChangePending(0)) == 1, "when the last is there"
    talk.report("a/0/a", generation=0)
    assert talk.members == ["a/0/a", "b/0/a", "c/0/a", "d/0/a"]
    assert talk.state.generation == 2, "two worlds"


def test_a_host_that_nobody_else_follows_comes_in_at_once() -> None:
    talk = Talk("a", "b", most=2)
    talk.tell("a", talk.job)
    talk.arrive("a/0/a")
    talk.wait(5.0)
    talk.tell("b", MemberHealing("b/0/a", "b"))
    talk.arrive("b/0/a")
    talk.tell("b", MemberProgressed("b/0/a", ZERO))
    assert ChangePending(0) in talk.heard


def test_a_host_that_fell_behind_while_others_were_gathered_comes_in_at_once_the_next_time() -> None:
    talk = Talk("a", "b", "c", most=3)
    talk.tell("a", talk.job)
    talk.arrive("a/0/a")
    talk.wait(5.0)
    talk.tell("c", MemberHealing("c/0/a", "c"))
    talk.tell("b", MemberHealing("b/0/a", "b"))
    talk.arrive("b/0/a")
    assert ChangePending(0) not in talk.heard
    talk.wait(0.7)
    assert ChangePending(0) in talk.heard, "c is too slow"
    talk.tell("b", MemberProgressed("b/0/a", ZERO))
    talk.report("a/0/a", generation=0, lineage=NINTH)
    assert talk.members == ["a/0/a"], "b is nine steps behind, and takes 0.7 s for one"
    talk.tell("b", MemberProgressed("b/0/a", NINTH))
    assert ChangePending(1) in talk.heard


def test_nothing_changes_for_a_newcomer_that_is_lost_while_others_are_gathered() -> None:
    talk = Talk("a", "b", "c", most=3)
    talk.tell("a", talk.job)
    talk.arrive("a/0/a")
    talk.wait(5.0)
    talk.tell("c", MemberHealing("c/0/a", "c"))
    talk.arrive("b/0/a")
    talk.tell("b", MemberProgressed("b/0/a", ZERO), MemberDied("b/0/a", "was killed"))
    talk.wait(1.0)
    assert ChangePending(0) not in talk.heard


def lose(talk: Talk, start: int) -> None:
    """Lose the agent of host b, which starts again, and arrives with another rank."""
    talk.obey(talk.machine.handle(NodeGone(f"b#{start}", "its agent is gone"), now=talk.now))
    talk.report("a/0/a", generation=talk.state.generation - 1)
    talk.obey(talk.machine.handle(NodeJoined(replace(node("b"), node=f"b#{start + 1}")), now=talk.now))
    member = f"b/0/{start}"
    arrived = MemberArrived(member=member, host="b", lineage=ZERO)
    for event in (arrived, MemberProgressed(member, ZERO)):
        talk.obey(talk.machine.handle(HostReported(f"b#{start + 1}", event), now=talk.now))


def flap(least: int) -> Talk:
    talk = begun("a", "b", least=least)
    for start in (1, 2, 3):
        lose(talk, start)
        assert talk.state.world is not None
        if "lost 3 times" in talk.state.world.change.why:
            break
        talk.wait(0.6)
        talk.report("a/0/a", generation=talk.state.generation - 1)
    return talk


def test_a_host_that_is_lost_again_and_again_waits_and_is_told_why() -> None:
    talk = flap(least=1)
    assert talk.state.world is not None
    assert talk.state.world.change.why.endswith(
        "(its agent is gone; this host was lost 3 times within 10 minutes, and may come in again after 1 s)"
    )
    assert MemberWaits("b/0/3", "its host was lost 3 times within 10 minutes") in talk.heard
    generation = talk.state.generation - 1
    talk.wait(0.9)
    assert ChangePending(generation) not in talk.heard
    talk.wait(0.2)
    assert ChangePending(generation) in talk.heard
    talk.report("a/0/a", generation=generation)
    assert talk.members == ["a/0/a", "b/0/3"]


def test_a_host_that_is_lost_again_and_again_does_not_wait_where_it_is_needed() -> None:
    talk = begun("a", "b", least=2)
    for start in (1, 2, 3, 4):
        lose(talk, start)
        talk.report("a/0/a", generation=talk.state.generation - 1)
        assert talk.members == ["a/0/a", f"b/0/{start}"]


def test_when_too_few_are_left_those_who_wait_are_called_once() -> None:
    talk = begun("a", "b", least=2)
    talk.obey(talk.machine.handle(NodeGone("b#1", "its agent is gone"), now=talk.now))
    assert MembersWanted(0) not in talk.heard
    talk.report("a/0/a", generation=0)
    talk.wait(1.0)
    assert talk.heard.count(MembersWanted(0)) == 1


def test_more_members_of_a_host_that_has_a_place_need_no_other() -> None:
    talk = crowded()
    talk.arrive("b/1/a")
    talk.tell("b", MemberProgressed("b/1/a", ZERO))
    talk.wait(1.0)
    assert ChangePending(0) in talk.heard
    talk.report("a/0/a", "b/0/a", generation=0)
    assert talk.members == ["a/0/a", "b/0/a", "b/1/a"]
