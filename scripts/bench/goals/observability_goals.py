"""Goals of seeing a job, A1 to A10.  All of them take about an hour, most of it A10."""

from __future__ import annotations

from typing import Any

from scripts.bench.goals.goal import Goal, last_object, lines


def _cost(found: dict[str, Any]) -> str:
    return f"{found['percent']:+.1f} % (median of {found['pairs']} pairs)"


def _stragglers(found: dict[str, dict[str, Any]]) -> str:
    counts = {case: [seen.get(how, 0) for how in ("right", "wrong", "silent")] for case, seen in found.items()}
    return f"right looks: {', '.join(f'{case} {looks[0]} of {sum(looks)}' for case, looks in counts.items())}"


def _trace(found: dict[str, Any]) -> str:
    lost = found["messages_without_arrow"] + found["arrows_without_begin"]
    viewer = "not opened" if found["viewer"] is None else "all of it in Perfetto's viewer"
    return (
        f"{found['megabytes']:.1f} MB, {found['arrows']} arrows, {lost} missing, "
        f"{found['arrows_backwards']} backwards, clocks {found['clock_ahead_s']:g} s apart; {viewer}"
    )


GOALS = (
    Goal(
        "A1",
        "a record takes at most 0.8 us",
        "scripts/bench/run recorder",
        lines(r"records alone: ([\d.]+) us per operation, ([\d.]+) us", "{} us; {} us for one that is over at once"),
        "packing a record and two readings of the clock are half of it, the interpreter most of the rest; native byte "
        "order, fewer names and a table of offsets were tried and save 0.08 us together",
    ),
    Goal(
        "A1, step",
        "at most 1 % of a `train_lm` step",
        "scripts/bench/run observe_cost --steps 300 --dp 2",
        last_object(_cost),
        "the number of operations in a step",
    ),
    Goal(
        "A1, page",
        "at most 2 % with the dashboard open",
        "scripts/bench/run --dashboard observe_cost --steps 200 --dp 2",
        last_object(_cost),
        "the launcher paints and serves on the ranks' cores",
    ),
    Goal(
        "A2",
        "`status` names a stopped rank of 4, its operation and place within 2 s",
        "scripts/bench/run look --rounds 10",
        lines(r"status names.*?: (median [\d.]+ s, slowest [\d.]+ s)", "{}"),
        "ranks tell what they do once a second; then the start of the command",
    ),
    Goal(
        "A3",
        "12 planted hangs: culprit and cause of each",
        "scripts/bench/run hangs",
        lines(r"culprit and cause: (\d+ of \d+(?:; torch's analyzer \d+ of \d+, the culprit alone \d+)?)", "{}"),
        "virtual time; what agents see of stopped, dead and blocked ranks is put in",
    ),
    Goal(
        "A4",
        "torch's analyzer on our dumps: nothing false in healthy runs, agrees on four mismatches",
        ".venv-backends/bin/python -m pytest -q tests/observe/test_flight.py",
        lines(r"(\d+) passed", "{} tests passed"),
        "torch's format has no roots and no reductions",
    ),
    Goal(
        "A5",
        "4 ranks traced for 10 s: at most 50 MB, every arrow, none backwards, clocks 5 s apart",
        "scripts/bench/run traces --seconds 10",
        last_object(_trace),
        "300,000 events; a ring keeps 4,096, looked at twice a second",
    ),
    Goal(
        "A6",
        "stacks of 8 ranks within 1 s, one of them stopped",
        "scripts/bench/run look --rounds 10",
        lines(r"stacks of 8.*?: (median [\d.]+ s, slowest [\d.]+ s)", "{}"),
        "the start of the command; a rank has 0.7 s to answer",
    ),
    Goal(
        "A7",
        "a slow rank and its cause within 20 steps; no false alarm",
        "scripts/bench/run stragglers --seconds 15",
        last_object(_stragglers),
        "where ranks share processors, rounds vary, and small differences are not told",
    ),
    Goal(
        "A8",
        "page at most 300 kB; 64 ranks at 1 Hz at most 5 % of a core, memory flat",
        "scripts/bench/run dashboard",
        lines(
            r"page_bytes +(\d+).*core_percent +([\d.]+).*after_a_fifth +([\d.]+).*at_the_end +([\d.]+)",
            "{} bytes; {} % of a core; {} MB after a fifth, {} MB at the end",
        ),
        "unpacking what hosts tell, the picture and its encoding",
    ),
    Goal(
        "A9",
        "`doctor`: 10 planted faults, each found within 10 s",
        "scripts/bench/run doctor_faults",
        lines(r"(\d+ of \d+), the slowest in ([\d.]+) s", "{}, the slowest in {} s"),
        "hosts that do not answer are waited for",
    ),
    Goal(
        "A10",
        "a post-mortem after SIGKILL of a rank or launcher: 200 of 200",
        "scripts/bench/run post_mortem --kills 200 --seed 1",
        last_object(lambda found: f"{found['complete']} of {found['kills']}"),
        "whatever must outlive a death is in files from the start",
    ),
    Goal(
        "A10, agent",
        "a post-mortem after SIGKILL of an agent: 50 of 50",
        "scripts/bench/run post_mortem --kills 50 --seed 1 --agents",
        last_object(lambda found: f"{found['complete']} of {found['kills']}"),
        "its reaper writes the summary",
    ),
)
