"""Goals of elastic worlds, G1 to G18.  All of them take about three hours, most of it G9 and G11.

Ranks are processes of one host with two cores, so that all of them and what watches them share these.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from scripts.bench.goals.goal import Goal, Read, last_object, lines


def row(number: str, *labels: str) -> Read:
    """Return what shows the rows of goal ``number`` in the table that a script of faults prints, one for each label."""

    def show(found: dict[str, Any]) -> str:
        measured = [value for goal, _, value, _ in found["rows"] if goal == number]
        return ", ".join(" ".join(pair).strip() for pair in zip(labels, measured, strict=True))

    return last_object(show)


def _kept(found: dict[str, Any]) -> str:
    value = {goal: measured for goal, _, measured, _ in found["rows"]}
    costs = ", ".join(f"{kind} {seconds:.1f} s of {count}" for kind, (count, seconds) in sorted(found["costs"].items()))
    return f"{value['G9']} kept, {value['G1']}, {value['G11']} false deaths; a fault costs: {costs}"


def _restarts(found: dict[str, Any]) -> str:
    return (
        f"SIGKILL to the next new step {found['recovery_median']:.2f} s (median of {found['faults']}), "
        f"{found['steps_done_again']} steps done again"
    )


def _simulated(found: dict[str, Any]) -> str:
    kinds = f"{found['faults_per_seed']} faults of {len(found['kinds'])} kinds"
    return (
        f"{found['seeds']:,} elastic programs with {kinds} in {found['seconds']:.0f} s by {found['processes']} "
        f"processes, {found['failed']} failed"
    )


def _besieged(output: str) -> str:
    runs = [json.loads(line) for line in output.splitlines() if line.startswith('{"hosts"')]
    findings = Counter[str]()
    for run in runs:
        findings.update(run["findings"])
    faults, steps, worlds = (sum(run[name] for run in runs) for name in ("faults", "steps", "generations"))
    hosts = ", ".join(str(run["hosts"]) for run in runs)
    found = ", ".join(f"{count} {name}" for name, count in findings.items()) or "nothing found"
    gap = max(run["largest_gap"] for run in runs)
    return f"{hosts} hosts: {faults} faults, {steps:,} steps, {worlds} worlds, {found}; {gap:.1f} s without a commit"


def _banked(found: dict[str, Any]) -> str:
    return (
        f"{found['minutes']:g} minutes: {sum(found['faults'].values())} faults, {found['steps']:,} steps, "
        f"{found['generations']} worlds, {found['asked']:,} transfers, {sum(found['findings'].values()) or 'nothing'} "
        f"found; {found['gaps']['most']:.1f} s without a commit"
    )


FAULTS = "scripts/bench/run chaos --faults 60 --seed 1"
LARGE = "scripts/bench/run chaos --faults 20 --seed 1 --megabytes 100 --compute 0.05 --kinds kill"
JOINS = "scripts/bench/run chaos --faults 6 --seed 1 --megabytes 100 --compute 0.05 --kinds join"
LARGE_JOIN = (
    "scripts/bench/run chaos --faults 1 --every 12 --seed 1 --ranks 1 --megabytes 500 --portions 4 --compute 0.1 "
    "--kinds join"
)
JOINS_AT_ONCE = (
    "scripts/bench/run chaos --faults 1 --every 16 --seed 1 --megabytes 100 --compute 0.05 --kinds join --joiners 4"
)
JOINS_BY_WIRE = (
    "scripts/bench/run chaos --agents 1 --namespaces --rate 1000000000 --faults 3 --every 14 --seed 1 "
    "--megabytes 100 --portions 4 --compute 0.3 --kinds join"
)
EACH_RANK = "scripts/bench/run chaos --faults 8 --every 60 --seed 1 --kinds kill --victims each --mode"
HOSTS = "scripts/bench/run chaos --agents 4 --faults 8 --every 150 --seed 1"
CUTS = "scripts/bench/run chaos --agents 4 --namespaces --faults 60 --every 150 --seed 1"
_TRIED = "one donor, three of them, and reading a donor's memory without its help were tried: a tenth quicker at most"
_START = (
    "a start on cores that train: 0.7 s of imports, 1.3 s of the program's arrays, 0.3 to 1 s until a donor that "
    "computes answers, 0.7 s for the copy, while both sides touch about 1 GB of new memory; " + _TRIED
)
_STOPPED = (
    "a stop is held for a loss after 0.3 s, then a new world forms (0.25 s), what is lost is computed again (0.2 s), "
    "and a process starts for it on the same cores (0.6 s)"
)
WHAT_A_KILL_COSTS = (
    "commits of the others are checked (a vote of 1 ms), a new world forms (0.1 s), lost portions are done again"
)

GOALS = (
    Goal("G1", "60 seeded faults: parameters, losses, sample log bit-equal", FAULTS, row("G1", ""), "-"),
    Goal("G1, hosts", "the same with agents in network namespaces, which are cut off, too", CUTS, row("G1", ""), "-"),
    Goal("G2", "committed steps lost or repeated: 0", FAULTS, row("G2", ""), "-"),
    Goal(
        "G3",
        "SIGKILL to the next commit, less a step, 4 ranks, 100 MB: p50 0.3 s, p99 1 s",
        LARGE,
        row("G3", "p50", "p99"),
        "a new world forms in 0.1 s; four ranks share two cores",
    ),
    Goal("G3, 1 MB", "the same with 1 MB", FAULTS, row("G3", "p50", "p99"), "forming the world"),
    Goal("G4", "SIGSTOP to the next commit: p99 5 s", FAULTS, row("G4", ""), "when silence counts as loss"),
    Goal(
        "G4, black hole",
        "a host is cut off, from both sides or one, to the next commit: p99 5 s",
        CUTS,
        row("G4", "agent stopped:", "rank stopped:", "cut off: p50", "largest"),
        "an agent that does not answer for 2.5 s is declared lost",
    ),
    Goal(
        "G5",
        "survivors' stall per join, 100 MB: 150 ms",
        JOINS,
        row("G5", "p50", "largest"),
        "the newcomer repeats the last step after the others, on the cores that train; then a new world (0.1 s)",
    ),
    Goal(
        "G6",
        "process start to counted member, 100 MB: 3 s",
        JOINS,
        row("G6", "p50", "largest", "newcomers that counted:"),
        _START,
    ),
    Goal(
        "G6, 1 GB",
        "the same, 1 GB of values and momentum: 8 s",
        LARGE_JOIN,
        row("G6", "p50", "largest", "newcomers that counted:"),
        "the copy, by one donor: ranks need memory of eight times their state while one comes, and what is touched for "
        "the first time takes 1.6 ms per MB; " + _TRIED,
    ),
    Goal(
        "G6, 4 joiners",
        "the same, 100 MB, four newcomers at once: 3 s",
        JOINS_AT_ONCE,
        row("G6", "p50", "largest", "newcomers that counted:"),
        "four processes start on two cores, and share donors; " + _TRIED,
    ),
    Goal(
        "G6, 1 Gbit/s",
        "agent's start to counted member, 100 MB, and the share of line rate that the copy uses: 0.9",
        JOINS_BY_WIRE,
        row("G6", "largest", "share of line rate:"),
        "the wire: values and momentum take 1.7 s, the update of each step 0.8 s; the others wait if steps are quicker",
    ),
    Goal(
        "G7",
        "the leader's host killed in a step: 2 s",
        HOSTS,
        row("G7", "p50", "largest"),
        "when silence counts as loss",
    ),
    Goal("G8", "every host replaced in turn", HOSTS, row("G8", ""), "-"),
    Goal(
        "G9",
        "throughput kept, 8 ranks, 30 min, a fault every 15 s: 95 %",
        "scripts/bench/run endurance --minutes 30 --spares 1",
        last_object(_kept),
        _STOPPED,
    ),
    Goal(
        "G9, DiLoCo",
        "the same, a fault every 29 s: 98 %",
        "scripts/bench/run endurance --minutes 30 --spares 1 --mode diloco --every 29",
        last_object(_kept),
        _STOPPED,
    ),
    Goal(
        "G10",
        "votes, fences, digests: at most 1 % of a step (1,024 tokens, 25 MB)",
        "scripts/bench/run elastic_cost --megabytes 25",
        lines(r"elastic [^:]*: ([-+.\d]+ %)", "{}"),
        "3.8 ms of second buffers and 3.3 ms of checksums per 75 MB of state",
    ),
    Goal(
        "G10, 3,072 tokens",
        "the same",
        "scripts/bench/run elastic_cost --megabytes 25 --flops 18432",
        lines(r"elastic [^:]*: ([-+.\d]+ %)", "{}"),
        "the same",
    ),
    Goal(
        "G11",
        "false deaths in 30 min, the GIL held for 4 s, processors taken by others: 0",
        "scripts/bench/run endurance --minutes 30 --kinds hold,hog --seed 3",
        row("G11", ""),
        "-",
    ),
    *(
        Goal(
            f"G12, ZeRO {stage}",
            "any rank lost: 3 s",
            f"{EACH_RANK} zero{stage}",
            row("G12", "largest of rank"),
            "forming the world; lost parts come from a neighbour's memory",
        )
        for stage in (1, 2, 3)
    ),
    Goal(
        "G12, PP 2 x DP 2",
        "any rank lost: 3 s",
        f"{EACH_RANK} pipeline",
        row("G12", "largest of rank"),
        "forming the world; a lost stage comes from its replica",
    ),
    Goal(
        "G14",
        "10,000 seeds in 5 minutes",
        "scripts/bench/run simulation --seeds 10000 --processes 2",
        last_object(_simulated),
        "the production code itself",
    ),
    Goal(
        "G14, safeguards",
        "20 removed safeguards, each found within 500 seeds",
        "scripts/test tests/testing/simulation/test_safeguards.py tests/launch/agents/test_simulation.py -k missing",
        lines(r"(\d+) passed", "{} found"),
        "-",
    ),
    Goal(
        "G15",
        "ULFM's tests (revoke, shrink, agree), overlapping groups",
        "scripts/test tests/collectives/test_ulfm.py tests/collectives/test_revoke.py",
        lines(r"(\d+) passed", "{} tests passed"),
        "-",
    ),
    Goal(
        "G16",
        "drained, or SIGTERM: no work done again, no peer errors",
        FAULTS,
        row("G16", "steps done again:", "peer errors:", "to the next commit, less a step"),
        "forming the world",
    ),
    Goal(
        "G17",
        "pauses and cuts of leaders and others: bit-equal, no crash, no step repeated, 10 s without a commit",
        "scripts/bench/run siege --faults 100 --hosts 3,4,5 --seed 1 --every 2 --settle 4",
        _besieged,
        "an agent that does not answer for 2.5 s is declared lost",
    ),
    Goal(
        "G17, simulated",
        "10,000 seeds of the same in virtual time",
        "scripts/bench/run simulation --seeds 10000 --processes 2 --sieges",
        last_object(_simulated),
        "nine left a task of the simulated connector behind, which is mended; these seeds pass now",
    ),
    Goal(
        "G18",
        "banks of elastic actors under double kills for an hour: every total right, no transfer twice or by half",
        "scripts/bench/run bank --minutes 60 --seed 2",
        last_object(_banked),
        "-",
    ),
    Goal(
        "control, torchrun",
        "the same kills, 1 MB (asyncpar: row G3, 1 MB)",
        "scripts/bench/run chaos_peers torchrun --faults 8 --seed 1 --install",
        last_object(_restarts),
        "all ranks start again from the last checkpoint",
    ),
    Goal(
        "control, torchft",
        "the same kills, 1 MB (asyncpar: row G3, 1 MB)",
        "scripts/bench/run chaos_peers torchft --faults 8 --seed 1 --install",
        last_object(_restarts),
        "replicas that are left go on",
    ),
)
