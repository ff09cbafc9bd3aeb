"""The judges of chaos.py and endurance.py: every difference in the logs of ranks is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.chaos.chaos import Fault, drain_rows, healing_seconds, join_rows, join_stalls, main, victim_rows
from scripts.bench.chaos.chaos_agents import joins
from scripts.bench.chaos.chaos_judge import Logs, Verdict, judge
from scripts.bench.chaos.chaos_wire import line_share, received_bytes
from scripts.bench.chaos.chaos_worlds import World, causes_of, crashes_in, ended_by_drains, false_deaths, worlds_in
from scripts.bench.chaos.endurance import other_lineages
from tests.bench.refusals import refusal_of

WANTED = {"parameters": "p", "losses": ["0x1.0p+0", "0x1.8p+0"], "lineage": "l"}
STEPS = 3
PORTIONS = 4
NAMES = ("m000", "m001")
Lines = dict[str, list[dict[str, Any]]]


def undisturbed() -> Lines:
    """Three steps of two ranks: the last one after a change of the world."""
    lines: Lines = {}
    for rank, name in enumerate(NAMES):
        lines[name] = []
        for step in range(STEPS):
            place = {"step": step, "generation": step // 2, "time": float(step)}
            portions = [2 * rank, 2 * rank + 2]
            lines[name] += [
                {"kind": "begun", **place},
                {"kind": "summed", **place, "portions": portions},
                {"kind": "committed", **place, "replay": False, "lineage": f"l{step}"},
            ]
        lines[name].append({"kind": "result", "time": 9.0, **WANTED})
    return lines


def judged(
    change: Callable[[Lines], Any], *, drained: tuple[int, ...] = (), exits: dict[str, int] | None = None
) -> Any:
    lines = undisturbed()
    change(lines)
    logs = Logs(Path())
    logs.lines = lines
    return judge(logs, WANTED, exits or dict.fromkeys(NAMES, 0), steps=STEPS, portions=PORTIONS, drained=drained)


def of(lines: Lines, kind: str, step: int = -1) -> dict[str, Any]:
    """A line of the second rank."""
    return next(one for one in lines["m001"] if one["kind"] == kind and (step < 0 or one["step"] == step))


def nothing(_lines: Lines) -> None:
    pass


def test_an_equal_run_has_no_troubles() -> None:
    assert judged(nothing, drained=(0,)) == Verdict()
    assert judged(nothing).is_equal


@pytest.mark.parametrize(
    ("what", "other"),
    [("parameters", "q"), ("losses", ["0x1.0p+0", "0x1.8000000000001p+0"]), ("losses", []), ("lineage", "m")],
)
def test_a_result_of_one_rank_that_differs_is_named(what: str, other: object) -> None:
    verdict = judged(lambda lines: of(lines, "result").update({what: other}))
    assert verdict.different == [f"m001: {what}"]
    assert not verdict.is_equal
    assert verdict.troubles == verdict.different


def test_a_run_in_which_nobody_has_a_result_differs() -> None:
    def drop(lines: Lines) -> None:
        for name in NAMES:
            lines[name].pop()

    assert judged(drop).different == ["nobody has a result"]


@pytest.mark.parametrize(
    ("portions", "found"), [([2, 3], [0, 1, 2]), ([1, 4], [0, 1, 1, 2, 3]), ([0, 2], [0, 0, 1, 1])]
)
def test_a_portion_that_is_missing_or_used_twice_is_found(portions: list[int], found: list[int]) -> None:
    verdict = judged(lambda lines: of(lines, "summed", 1).update(portions=portions))
    assert verdict.samples == [f"step 1: {found}"]
    assert not verdict.is_equal


def rounds(lines: Lines) -> None:
    """Let the steps be rounds of workers, of which one rank dies as soon as it has committed the last one."""
    for name in NAMES:
        lines[name] = [one for one in lines[name] if one["kind"] != "summed"]
        for line in lines[name]:
            if line["kind"] == "committed":
                line["contributed"] = PORTIONS
    lines["m001"] = [one for one in lines["m001"] if one.get("step") != STEPS - 1 and one["kind"] != "result"]


def test_a_rank_that_dies_as_it_has_committed_a_round_leaves_nothing_out() -> None:
    assert judged(rounds) == Verdict()


@pytest.mark.parametrize("contributed", [PORTIONS - 1, PORTIONS + 1, 0])
def test_a_round_without_some_portions_is_found(contributed: int) -> None:
    def change(lines: Lines) -> None:
        rounds(lines)
        of(lines, "committed", 1).update(contributed=contributed)

    assert judged(change).samples == [f"round 1: {sorted((contributed, PORTIONS))} of {PORTIONS} portions"]


def test_what_an_aborted_world_has_summed_does_not_count() -> None:
    aborted = {"kind": "summed", "step": 2, "generation": 0, "time": 1.5, "portions": [0, 4]}
    assert judged(lambda lines: lines["m000"].append(aborted)) == Verdict()


def test_a_step_that_two_worlds_have_committed_is_repeated() -> None:
    verdict = judged(lambda lines: of(lines, "committed", 2).update(generation=0))
    assert verdict.repeated == ["step 2: committed in the generations [0, 1]"]


def test_a_step_that_nobody_has_committed_is_lost() -> None:
    def drop(lines: Lines) -> None:
        for name in NAMES:
            lines[name] = [one for one in lines[name] if one["kind"] != "committed" or one["step"] != 2]

    assert judged(drop).repeated == ["step 2: committed in the generations []"]


def test_a_rank_that_leaves_a_step_out_is_found() -> None:
    verdict = judged(lambda lines: lines["m001"].remove(of(lines, "committed", 1)))
    assert verdict.repeated == ["m001: committed 0, then 2"]


def healed(lines: Lines, steps: tuple[int, ...]) -> None:
    """Let a newcomer repeat steps of others, before it counts."""
    lines["m002"] = [{**of(lines, "committed", step), "replay": True} for step in steps]


def test_a_newcomer_that_was_healed_anew_goes_on_from_a_later_step() -> None:
    assert judged(lambda lines: healed(lines, (0, 2))) == Verdict()


def test_a_step_that_only_a_newcomer_could_note_is_not_lost() -> None:
    def drop(lines: Lines) -> None:
        healed(lines, (1,))
        for name in NAMES:
            lines[name] = [one for one in lines[name] if one["kind"] == "result" or one["step"] != 1]
        lines["m001"] = [one for one in lines["m001"] if one["kind"] == "result" or one["step"] > 1]
        lines["m000"] = [one for one in lines["m000"] if one["kind"] == "result" or one["step"] < 1]

    def lose(lines: Lines) -> None:
        drop(lines)
        del lines["m002"]

    assert judged(drop).repeated == []
    assert judged(lose).repeated == ["step 1: committed in the generations []"]


@pytest.mark.parametrize("steps", [(2, 0), (1, 1)])
def test_a_newcomer_that_goes_back_repeats_steps(steps: tuple[int, ...]) -> None:
    assert judged(lambda lines: healed(lines, steps)).repeated == [f"m002: committed {steps[0]}, then {steps[1]}"]


def test_a_rank_that_ends_with_an_error_is_named() -> None:
    verdict = judged(nothing, exits={"m000": 0, "m001": 1})
    assert verdict.failed == ["m001: exited with code 1, and nobody had touched it"]
    assert verdict.troubles == verdict.failed


def test_a_step_that_is_begun_twice_counts_where_a_drain_has_ended_the_first_world() -> None:
    begun = {"kind": "begun", "step": 2, "generation": 0, "time": 1.5}

    def begin(lines: Lines) -> None:
        lines["m001"].insert(6, begun)

    assert judged(begin).troubles == []
    verdict = judged(begin, drained=(0,))
    assert verdict.again == ["m001: step 2: done again after a drain"]
    assert [row[2] for row in drain_rows(verdict)] == ["1", "0"]


def test_an_error_in_a_world_that_a_drain_has_ended_counts() -> None:
    interrupted = {"kind": "interrupted", "step": 1, "generation": 0, "time": 1.5, "error": "PeerLost"}

    def interrupt(lines: Lines) -> None:
        lines["m000"].append(interrupted)

    assert judged(interrupt).troubles == []
    assert judged(interrupt, drained=(1,)).troubles == []
    verdict = judged(interrupt, drained=(0,))
    assert verdict.errors == ["m000: step 1: PeerLost because of a drain"]
    assert verdict.troubles == verdict.errors


PRINTED = """
asyncpar agent m000: serves at 127.0.0.1:1
asyncpar agent m000: generation 0; joined: m000/0/aa, m001/0/bb; 2 ranks on 2 hosts
asyncpar agent m001: generation 0; joined: m000/0/aa, m001/0/bb; 2 ranks on 2 hosts
asyncpar agent m000: generation 2; joined: m001/0/cc; m000/0/aa is ready for a change; 2 ranks on 2 hosts
asyncpar agent m001: rank m001/0 was killed by SIGKILL; it starts again in 0.25 s (restart 1 of 9)
asyncpar agent m001: rank m001/0 exited with code 1; it starts again in 0.5 s (restart 2 of 9)
asyncpar agent m001: generation 1; left: m001/0/bb; m001/0/bb was killed by SIGKILL; 1 rank on 1 host
asyncpar agent m000: generation 3; left: m001/0/cc; m001/0/cc did not answer for 10 s; m000 waits; 1 rank on 1 host
[m000:0] generation 4; left: m000/0/aa; 0 ranks on 0 hosts
asyncpar agent m000: generation 4; left: m000/0/aa; m000/0/aa left; 1 rank on 1 host
""".splitlines()


def test_worlds_are_read_from_the_lines_of_agents_each_once_and_in_order() -> None:
    assert worlds_in(PRINTED) == [
        World(0, joined=("m000/0/aa", "m001/0/bb")),
        World(1, left=("m001/0/bb",), why="m001/0/bb was killed by SIGKILL"),
        World(2, joined=("m001/0/cc",), why="m000/0/aa is ready for a change"),
        World(3, left=("m001/0/cc",), why="m001/0/cc did not answer for 10 s; m000 waits"),
        World(4, left=("m000/0/aa",), why="m000/0/aa left"),
    ]


def test_a_rank_that_ends_on_its_own_with_an_error_is_read_from_the_lines_of_agents() -> None:
    assert crashes_in(PRINTED) == ["rank m001/0 exited with code 1"]
    for code, found in ((0, 0), (143, 0), (1435, 1)):
        assert len(crashes_in([f"asyncpar agent m000: rank m000/0 exited with code {code}; it starts again"])) == found


def test_a_rank_that_is_declared_lost_was_touched_or_done_or_its_death_is_false() -> None:
    def deaths(*struck: tuple[int, str, str]) -> list[str]:
        worlds = worlds_in(PRINTED)
        return false_deaths(worlds, causes_of(worlds, struck))

    false = "generation 3: m001/0/cc: m001/0/cc did not answer for 10 s; m000 waits"
    assert deaths((0, "m001/0", "kill"), (2, "m001/0", "stop")) == []
    assert deaths((0, "m001/0", "kill")) == [false]
    assert deaths((0, "m001/0", "kill"), (3, "m001/0", "kill")) == [false], "it was touched later"
    assert len(deaths()) == 2


def test_worlds_that_drains_have_ended_are_those_after_which_only_drained_members_left() -> None:
    worlds = [
        World(0),
        World(1, left=("a/0/1",)),
        World(2),
        World(3, left=("b/0/1", "a/0/2")),
        World(4, left=("c/0/1",)),
    ]

    def ended(*struck: tuple[int, str, str]) -> set[int]:
        return ended_by_drains(worlds, causes_of(worlds, struck), ("drain", "term"))

    assert ended((0, "a/0", "drain"), (1, "b/0", "term"), (1, "a/0", "kill")) == {0}
    assert ended((0, "a/0", "drain"), (1, "b/0", "term"), (1, "a/0", "term"), (3, "c/0", "drain")) == {0, 2, 3}
    assert ended() == set()


def test_a_step_with_another_lineage_than_the_run_without_faults_is_named() -> None:
    logs = Logs(Path())
    logs.lines = undisturbed()
    assert other_lineages(logs, ["l0", "l1", "l2"]) == []
    of(logs.lines, "committed", 1)["lineage"] = "m"
    assert other_lineages(logs, ["l0", "l1", "l2"]) == ["m001: step 1"]


def test_newcomers_take_from_the_start_of_their_process_to_their_first_step() -> None:
    logs = Logs(Path())
    logs.lines = undisturbed()  # in the first world, which nobody joins
    for name, time in (("m002", 2.5), ("m003", 2.75), ("m004", 8.5)):
        logs.lines[name] = [{"kind": "started", "time": time - 1.5, "age": 0.5}]
    logs.lines["m002"] += [
        {**of(logs.lines, "committed", 1), "replay": True},
        {**of(logs.lines, "begun", 2), "time": 2.5},
    ]
    logs.lines["m003"] += [{**of(logs.lines, "committed", 2), "time": 3.75}]
    newcomers = healing_seconds(logs)
    assert newcomers == [2.0, 3.0, None]
    assert [row[2] for row in join_rows(newcomers)] == ["3.00 s", "3.00 s", "2 of 3"]
    assert [row[2] for row in join_rows([])] == ["-", "-", "0 of 0"]


def test_the_stall_of_a_join_is_what_its_first_step_takes_longer_than_the_others_of_its_world() -> None:
    logs = Logs(Path())
    times = [0.0, 1.0, 2.0, 5.0, 6.5, 8.0, 9.0]
    generations = [0, 0, 0, 1, 1, 1, 2]
    logs.lines["m000"] = [
        {"kind": "committed", "step": step, "generation": generation, "time": time, "replay": False}
        for step, (generation, time) in enumerate(zip(generations, times, strict=True))
    ]
    joined = [World(0, joined=("a/0/a",)), World(1, joined=("b/0/b",)), World(2, joined=("c/0/c",))]
    assert join_stalls(logs, joined) == [1.5]
    assert join_stalls(logs, [World(1, joined=("b/0/b",), left=("a/0/a",))]) == []


def test_every_lost_rank_is_shown_with_its_slowest_loss() -> None:
    losses = [(2, 0.4), (0, 0.2), (2, 0.6), (1, None)]
    faults = [Fault("kill", "m", 1.0, 8, 0, rank, recovered) for rank, recovered in losses]
    faults.append(Fault("join", "m", 1.0, 8, 0))
    assert [row[2] for row in victim_rows(faults, 0.1)] == ["0: 0.10 s, 2: 0.50 s"]
    assert [row[2] for row in victim_rows([], 0.1)] == ["-"]


def test_a_host_joins_by_a_change_that_names_it_among_the_newcomers() -> None:
    change = "generation 8; joined: guest/0/d0f0, host12/1/91b3; left: host1/0/aa; host0/0/91b3 is ready for a change"
    assert [joins(change, host) for host in ("guest", "host12", "host1", "host0")] == [True, True, False, False]
    assert not joins("generation 1; host0/0/91b3 is ready for a change", "host0")


def test_the_share_of_line_rate_is_that_of_the_middle_of_a_copy() -> None:
    before = [(0.0, 500), (5.0, 500)]  # it waits
    copy = [(5.0 + second, 500 + 100 * second) for second in range(1, 11)]
    after = [(60.0, 1500), (61.0, 9500)]
    assert line_share([*before, *copy, *after], 1000, 1600) == pytest.approx(0.5)
    assert line_share(before, 1000, 1600) is None
    assert line_share([], 1000, 1600) is None


def test_what_a_device_has_received_is_read_from_the_table_of_devices() -> None:
    table = "Inter-|   Receive\n face |bytes\n    lo: 7 1\n link0:123456 9 0\n"
    assert received_bytes(table) == 123456
    with pytest.raises(ValueError, match="expected a device eth9"):
        received_bytes(table, "eth9")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--namespaces"], "expected --agents"),
        (["--rate", "1000000"], "expected --namespaces"),
        (["--agents", "4", "--joiners", "2"], "expected no --agents"),
        (["--agents", "4", "--victims", "each"], "expected no --agents"),
        (["--joiners", "0"], "expected 1 or more"),
        (["--ranks", "1"], "2 ranks or more"),
        (["--ranks", "0", "--kinds", "join"], "1 ranks or more"),
        (["--kinds", "cut"], "expected kinds among kill, stop"),
        (["--agents", "4", "--kinds", "cut"], "expected kinds among leader, kill"),
    ],
)
def test_wrong_arguments_are_reported(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = refusal_of(main, arguments, capsys)
    assert code != 0
    assert text in printed
