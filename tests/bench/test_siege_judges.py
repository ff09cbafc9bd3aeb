"""The judges of siege.py find what they are for in journals and logs that are bad, and nothing in a good run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.chaos.chaos_judge import Logs
from scripts.bench.chaos.siege import parse_arguments
from scripts.bench.chaos.siege_judge import (
    AFTERMATH,
    Hit,
    Line,
    SiegeVerdict,
    is_accounted,
    judge_siege,
    quiet_gaps,
    quiet_stretches,
)
from scripts.bench.chaos.siege_plan import COMPANIONS, KINDS, Strike, choose_hosts, draw_faults

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "chaos" / "siege.py"
STEPS = 6
UNTIL = 7.0
LINEAGES = [f"l{step}" for step in range(STEPS)]
HITS = [Hit(0, "host0", "agent", 2.5, 3.5)]
Journals = dict[str, list[dict[str, Any]]]


def undisturbed() -> Journals:
    """Six steps of two ranks, one per second: the world changes after the third."""
    journals: Journals = {}
    for rank, name in enumerate(("rank-1", "rank-2")):
        journals[name] = []
        for step in range(STEPS):
            place = {"step": step, "generation": step // 3, "time": float(step)}
            journals[name] += [
                {"kind": "summed", **place, "portions": [2 * rank, 2 * rank + 2]},
                {"kind": "committed", **place, "replay": False, "lineage": LINEAGES[step]},
            ]
    return journals


def logs_of(journals: Journals) -> Logs:
    logs = Logs(Path())
    logs.lines = journals
    logs.position = STEPS
    return logs


def judged(
    change: Callable[[Journals], Any] | None = None, *, printed: tuple[tuple[float, str, str], ...] = ()
) -> SiegeVerdict:
    journals = undisturbed()
    if change is not None:
        change(journals)
    lines = [Line(time, source, number, text) for number, (time, source, text) in enumerate(printed, 1)]
    return judge_siege(logs_of(journals), lines, HITS, lineages=LINEAGES, portions=4, until=UNTIL)


def commit(journals: Journals, step: int, name: str = "rank-2") -> dict[str, Any]:
    return next(one for one in journals[name] if one["kind"] == "committed" and one["step"] == step)


def without_step(step: int) -> Callable[[Journals], None]:
    def change(journals: Journals) -> None:
        for name, lines in journals.items():
            journals[name] = [one for one in lines if one["step"] != step]

    return change


def test_a_run_without_faults_has_no_troubles() -> None:
    assert judged() == SiegeVerdict()
    assert judged().troubles == {}


def test_a_step_that_one_rank_commits_with_another_digest_is_split_and_different() -> None:
    verdict = judged(lambda journals: commit(journals, 4).update(lineage="m4"))
    assert verdict.split == ["step 4: l4 by rank-1; m4 by rank-2"]
    assert verdict.different == ["rank-2: step 4"]


def test_a_step_that_all_ranks_commit_with_another_digest_than_the_run_without_faults_is_different() -> None:
    def change(journals: Journals) -> None:
        for name in journals:
            commit(journals, 4, name).update(lineage="m4")

    verdict = judged(change)
    assert verdict.different == ["rank-1: step 4", "rank-2: step 4"]
    assert verdict.split == []


def test_a_step_that_is_committed_again_in_a_later_world_is_repeated() -> None:
    def change(journals: Journals) -> None:
        again = [{**one, "generation": 7, "time": 6.0} for one in undisturbed()["rank-1"] if one["step"] == 1]
        journals["rank-3"] = again

    assert judged(change).repeated == ["step 1: committed in the generations [0, 7]"]


def test_a_rank_that_commits_a_step_twice_is_named() -> None:
    verdict = judged(lambda journals: journals["rank-2"].append({**commit(journals, 5)}))
    assert verdict.repeated == ["rank-2: committed 5, then 5"]


def test_a_step_that_nobody_has_committed_is_lost() -> None:
    assert "step 3: committed in the generations []" in judged(without_step(3)).repeated


def test_a_portion_that_is_missing_is_different() -> None:
    def change(journals: Journals) -> None:
        summed = next(one for one in journals["rank-2"] if one["kind"] == "summed" and one["step"] == 2)
        summed["portions"] = [2, 3]

    assert judged(change).different == ["step 2: [0, 1, 2]"]


@pytest.mark.parametrize(
    "text",
    [
        "asyncpar agent host0: rank host0/0 exited with code 1; it starts again in 0.25 s (crash 1 of 100)",
        "asyncpar agent host0: rank host0/0 was killed by SIGSEGV; it starts again in 0.25 s (crash 1 of 100)",
        "asyncpar agent: host0/0/abc is killed: its pipe: expected a message with a kind, got int",
    ],
)
def test_a_rank_that_ends_by_itself_is_a_crash_also_right_after_a_fault_of_its_host(text: str) -> None:
    verdict = judged(printed=((3.0, "host0", text),))
    assert verdict.crashes == [f"host0:1: {text}"]
    assert [line.text for line in verdict.lines] == [text]


def test_a_traceback_is_found() -> None:
    assert judged(printed=((3.0, "host1", "[host1/0] Traceback (most recent call last):"),)).tracebacks


@pytest.mark.parametrize("time", [2.4, 3.5 + AFTERMATH + 0.1])
def test_a_loss_before_the_fault_or_long_after_it_is_not_accounted_to_it(time: float) -> None:
    text = "asyncpar agent host0: rank host0/0 starts again: is stopped"
    assert judged(printed=((time, "host0", text),)).unaccounted == [f"host0:1: {text}"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("host0", "asyncpar agent host0: rank host0/0 starts again: is stopped"),
        ("host0", "asyncpar agent host0: the others have gone on without this host, since it did not answer them"),
        ("host1", "asyncpar agent host1: rank host1/0 is ended: does not hear host0/0/abc, nor is heard there"),
    ],
)
def test_a_loss_of_the_host_that_was_hit_or_because_of_it_is_accounted_to_the_fault(source: str, text: str) -> None:
    assert judged(printed=((4.0, source, text),)) == SiegeVerdict()


@pytest.mark.parametrize(
    "text",
    [
        "asyncpar agent host1: rank host1/0 is ended: did not answer for 10 s",
        "asyncpar agent host1: the others have gone on without this host, since it did not answer them; it comes again",
    ],
)
def test_a_loss_of_a_host_that_was_not_hit_is_found(text: str) -> None:
    assert judged(printed=((4.0, "host1", text),)).unaccounted == [f"host1:1: {text}"]


@pytest.mark.parametrize("what", ["cut", "mute", "deaf"])
def test_a_cut_explains_the_loss_of_either_side(what: str) -> None:
    assert is_accounted("host1", "", 3.0, [Hit(0, "host0", what, 2.5, 3.5)])


def test_a_job_that_begins_anew_is_found_by_what_its_agents_say() -> None:
    text = "asyncpar agent host1: generation 4; left: host0/0/abc; all members are lost; 0 ranks on 0 hosts"
    assert judged(printed=((4.0, "host1", text),)).repeated == [f"host1:1: {text}"]


# -- gaps --------------------------------------------------------------------------------------------------------------


def test_times_in_which_a_fault_lasts_are_not_quiet() -> None:
    hits = [
        Hit(0, "host0", "cut", 2.0, 5.0),
        Hit(0, "host1", "agent", 3.0, 4.0),  # within the other
        Hit(1, "host0", "rank", 8.0, 9.0),
        Hit(1, "host1", "rank", 8.5, 9.5),
    ]
    assert list(quiet_stretches(hits, began=0.0, until=12.0)) == [(0.0, 2.0, -1), (5.0, 8.0, 0), (9.5, 12.0, 1)]


def test_a_time_without_a_commit_counts_from_the_heal() -> None:
    def late(journals: Journals) -> None:
        for lines in journals.values():
            for line in lines:
                if line["step"] >= 3:
                    line["time"] += 11.0  # from second 2 to second 14, with a fault until 3.5

    journals = undisturbed()
    late(journals)
    gap = max(quiet_gaps(logs_of(journals), HITS, until=17.0), key=lambda one: one.seconds)
    assert (gap.began, gap.seconds, gap.fault) == (3.5, 10.5, 0)
    verdict = judge_siege(logs_of(journals), [], HITS, lineages=LINEAGES, portions=4, until=17.0)
    assert verdict.gaps == ["no commit for 10.5 s after fault 0 had healed"]


def test_a_job_that_stands_still_until_the_end_of_the_run_has_a_gap() -> None:
    gap = max(quiet_gaps(logs_of(undisturbed()), HITS, until=20.0), key=lambda one: one.seconds)
    assert (gap.began, gap.seconds) == (5.0, 15.0)


def test_steps_that_are_committed_again_are_no_progress() -> None:
    journals = undisturbed()
    journals["rank-3"] = [
        {"kind": "committed", "step": 0, "generation": 7, "time": 6.0 + turn, "replay": False, "lineage": "l0"}
        for turn in range(15)
    ]
    gap = max(quiet_gaps(logs_of(journals), HITS, until=20.0), key=lambda one: one.seconds)
    assert gap.seconds == 15.0


def test_a_run_without_a_commit_is_one_gap() -> None:
    (gap,) = quiet_gaps(logs_of({}), HITS, until=20.0)
    assert gap.seconds == 20.0


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_faults_and_each_kind_comes() -> None:
    faults = list(draw_faults(3, 5 * len(KINDS)))
    assert faults == list(draw_faults(3, 5 * len(KINDS)))
    assert faults != list(draw_faults(4, 5 * len(KINDS)))
    singles = {f"{one[0].target}-{one[0].what}" for one in faults}
    assert singles == set(KINDS) - {"pair"}
    assert all(0.5 <= strike.seconds <= 5.0 for strikes in faults for strike in strikes)


def test_a_third_of_the_faults_of_leaders_hit_another_host_while_they_last() -> None:
    leaders = [one for one in draw_faults(1, 3000, ["leader-agent"]) if one[0].target == "leader"]
    doubled = [one for one in leaders if len(one) == 2]
    assert len(leaders) == 3000
    assert abs(len(doubled) / len(leaders) - COMPANIONS) < 0.05
    assert all(second.target == "follower" and 0 <= second.after <= first.seconds for first, second in doubled)


def test_a_pair_hits_two_hosts_at_once() -> None:
    for strikes in draw_faults(1, 50, ["pair"]):
        chosen = choose_hosts(strikes, ["a", "b", "c"], leader="a", members=["a", "b", "c"])
        assert len({one.host for one in chosen}) == 2
        assert [one.after for one in chosen] == [0.0, 0.0]


def test_leaders_and_followers_are_distinguished() -> None:
    strikes = (Strike("leader", "agent", 1.0), Strike("follower", "rank", 1.0, pick=0.99))
    assert [one.host for one in choose_hosts(strikes, ["a", "b", "c"], leader="b", members="abc")] == ["b", "c"]


def test_a_host_that_alone_has_the_state_is_left_alone() -> None:
    pair = (Strike("leader", "cut", 1.0), Strike("follower", "cut", 1.0))
    assert [one.host for one in choose_hosts(pair, ["a", "b", "c"], leader="a", members=["a", "b"])] == ["a", "c"]
    assert choose_hosts(pair[:1], ["a", "b"], leader="a", members=["a"]) == ()


# -- options -----------------------------------------------------------------------------------------------------------


def test_options_have_bounds_of_time() -> None:
    options = parse_arguments(["--faults", "10", "--hosts", "3,5", "--kinds", "leader-agent,pair"])
    assert options.hosts == [3, 5]
    assert options.kinds == ["leader-agent", "pair"]
    assert options.limit == 460.0
    assert parse_arguments(["--limit", "5"]).limit == 5.0


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--kinds", "leader-agent,flood"], "--kinds: expected some of leader-agent"),
        (["--hosts", "3,1"], "--hosts: expected numbers of 2 or more"),
        (["--hosts", "three"], "--hosts: expected numbers of 2 or more"),
        (["--faults", "0"], "expected 1 fault or more"),
        (["--every", "0"], "and times above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_arguments(arguments)
    assert raised.value.code == 2
    assert printed in capsys.readouterr().err


@pytest.mark.process
def test_the_program_says_what_it_is_for() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Besiege an elastic job" in done.stdout
