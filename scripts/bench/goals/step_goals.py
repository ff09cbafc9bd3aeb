"""Goals of steps, calls and asks that users feel.  All of them take some hours; rows with a link need root.

The rows with DDP and FSDP2 need the environment that scripts/test-backends makes.
"""

from __future__ import annotations

from typing import Any

from scripts.bench.goals.goal import Goal, Read, last_object, lines

TORCH = "scripts/bench/run torch_ddp"
HOST = f"{TORCH} --parts ddp,fsdp"
LINK = f"{TORCH} --parts link --models large --codec int8"
SUMS = (
    "scripts/bench/run compare --ops all_reduce --sizes 64K,256K,1MB,4MB --peers mpich,openmpi,intel --rounds 5 "
    "--install"
)
ACTORS = "scripts/bench/run actors --rounds 5 --peers xoscar --install"
ZERO = "scripts/bench/run parallel --parts zero --lanes shm"
LAYOUTS = "scripts/bench/run parallel --parts layouts --lanes shm --peers alone,ddp --install"
PARITY = ".venv-backends/bin/python -m pytest -q tests/torch/test_data_parallel.py"
TWO_RANKS = "2 ranks: exposed communication 0.4 of Gloo's"
FOUR_RANKS = "on 2 cores: exposed communication 0.5 of Gloo's"
_CALLS = (
    "64 KiB: the interpreter takes 7 us, numpy over bare shared memory 2.7; slices instead of one wait, halves, more "
    "slots in turn, copies by ufuncs and another place of slots in a page were tried and are not faster"
)
_TURNS = (
    "two ranks take turns on a core at every wait; longer yields, and less that is combined at once (128 and 32 KiB) "
    "were tried and are not faster"
)
_FRESH = (
    "memory that is touched for the first time: the sender's chunks take 0.5 ms per MiB, a landing that a virtual "
    "machine's host does not back yet 1.6 ms per MB; a thread that touches the landing ahead, and chunks without a "
    "reservation were tried and are not faster; huge pages take a ninth of the time (2.6 instead of 23 ms for 64 MiB), "
    "numpy asks for them, and this system has none for shared memory (36 ms)"
)

_BUCKETS = (
    "the memory: 101 MB are reduced in 14 to 16 ms where nothing goes on beside it, and 2 to 5 ms are waits for the "
    "other rank; buckets of 5, 10, 25 and 50 MB beside backward take 38, 34, 24 and 23 ms, as no core is idle"
)
_SHARDS = (
    "FSDP2 itself: where one rank has everything and nothing travels, its own code takes 10 of 25 ms; the rest is "
    "13 MB of copies and a wait for each of its collectives"
)
_EARLY = (
    "the optimizer: AdamW takes 40 ms where one rank has the memory for itself, of a step of 1,013 ms, which becomes "
    "53 ms shorter; buckets of 6, 25 and 50 MiB make steps 4.9, 5.2 and 5.2 % shorter"
)
_CHOICES = (
    "half a step is the budget of 50: what the model takes for 1.3 times slower is not tried, and two hosts of one "
    "machine share its cores, which the model does not know; to measure what ranks of a host send together, to begin "
    "with the cheapest by that, to repeat trials, and to compare by the quickest quarter were the ideas"
)
_REDUCED = "measured beside other programs (load 4); 1.03x at load 19, and 1.01x, idle, before pools followed the model"
_GATHERED = (
    "measured beside other programs (load 4); 1.49x at load 19, where it was 2.98x while its groups had the smallest "
    "slots and blocks of memory began anywhere; before pools followed the model it was 1.22x, idle. Memory that is "
    "taken anew: with max_memory_usage_mb=1024, so that it waits between steps, a step takes as much processor time as "
    "without sharding. A limited wait for blocks that are about to come back (245 instead of 310 ms of processor time) "
    "and parts of parameters in shared memory (203 ms) were tried, in one run each, and are not built"
)
_LARGE_SHARDS = "not found out: 0.32 and 0.43 in two runs of the same settings"
_ASKS = (
    "the interpreter: 125 calls of functions and 16 us on each side; without records, without the search for deadlines "
    "and without garbage collection it is 14 us: all three together save 14 %"
)
_MANY = "the search for deadlines, which takes 2 % of the time at most, and caches: a thousand tasks and messages"


def exposed(case: str, side: str = "zero-copy") -> Read:
    """Return what shows the share of Gloo's exposed communication that a case takes, out of torch_ddp.py."""
    return lines(rf"{case}: {side} takes (-?[\d.]+) of Gloo's time in exposed communication", "{}")


def verdict(target: str) -> Read:
    """Return what shows the reached figure of a row in the table of verdicts of actors.py."""
    return lines(rf"\| {target} *\|[^|]*\| *([^|]+?) *\|", "{}")


def small_sums(ranks: int, sizes: str) -> Read:
    """Return what shows the worst ratio to the best MPI, and where that is, out of the verdicts of compare.py."""
    return lines(rf"\| all_reduce *\| *{ranks} \| *{sizes} \| *best MPI \|[^|]*\| *(\S+) \| *([^|]+?) *\|", "{} at {}")


def zero(stage: str) -> Read:
    """Return what shows how many times as long as without sharding a step takes."""
    return lines(rf"\| shm, {stage} *\|[^|]*\| *([\d.]+x) \|", "{}")


def _calibration(found: dict[str, Any]) -> str:
    worst = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in found["worst"].items())
    skipped = f"; left out: {', '.join(found['skipped'])}" if found["skipped"] else ""
    return f"{found['within']} of {found['cases']} cases; worst: {worst}{skipped}"


def _streamed(found: dict[str, Any]) -> str:
    if "skipped" in found:
        raise SystemExit(f"streamed.py was skipped: {found['skipped']}; its figure stays as it was")
    return f"{found['shorter']:.1%} shorter"


def _policies(found: dict[str, dict[str, float]]) -> str:
    modes = {mode: one for mode, one in found.items() if mode != "wait"}
    return ", ".join(f"{mode} {one['speedup']:.2f}x, loss {one['loss']:.3f}" for mode, one in modes.items())


GOALS = (
    Goal("DDP small", TWO_RANKS, HOST, exposed("DDP small, 2 ranks"), "-"),
    Goal("DDP large", TWO_RANKS, HOST, exposed("DDP large, 2 ranks"), _BUCKETS),
    Goal("DDP small, 4 ranks", FOUR_RANKS, HOST, exposed("DDP small, 4 ranks"), "-"),
    Goal("DDP large, 4 ranks", FOUR_RANKS, HOST, exposed("DDP large, 4 ranks"), "-"),
    Goal(
        "DDP large, link",
        "1 Gbit/s, int8: exposed communication 0.25 of Gloo's",
        LINK,
        exposed("DDP large, 2 ranks, 1000 Mbit/s", "zero-copy int8"),
        "-",
    ),
    Goal("FSDP2 small", TWO_RANKS, HOST, exposed("FSDP2 small, 2 ranks"), _SHARDS),
    Goal("FSDP2 large", TWO_RANKS, HOST, exposed("FSDP2 large, 2 ranks"), _LARGE_SHARDS),
    Goal("FSDP2 small, 4 ranks", FOUR_RANKS, HOST, exposed("FSDP2 small, 4 ranks"), _SHARDS),
    Goal("FSDP2 large, 4 ranks", FOUR_RANKS, HOST, exposed("FSDP2 large, 4 ranks"), "-"),
    Goal(
        "DDP, parameters",
        "the bits of torch's DDP where the order of sums allows, else within 1e-6",
        PARITY,
        lines(r"(\d+) passed", "{} tests passed"),
        "-",
    ),
    Goal(
        "train_lm, dp 2",
        "no slower than torch's DDP",
        LAYOUTS,
        lines(r"\| dp2 \(DDP\) *\| *asyncpar shm \|[^|]*\|[^|]*\|[^|]*\| *(\S+) \|", "torch takes {} as long"),
        "-",
    ),
    Goal(
        "calibration",
        "within 10 % of the best pinned choice after 50 steps, in every case",
        "scripts/bench/run calibration",
        last_object(_calibration),
        _CHOICES,
    ),
    Goal(
        "streamed",
        "a step with 100 MB at 1 Gbit/s 8 % shorter",
        "scripts/bench/run streamed",
        last_object(_streamed),
        _EARLY,
    ),
    Goal(
        "policies",
        "a rank 3x slower at random: speed and loss, against waiting",
        "scripts/bench/run policies",
        last_object(_policies),
        "-",
    ),
    Goal(
        "small all_reduce",
        "2 ranks, 64 KiB to 1 MiB: 0.5 of the best MPI",
        SUMS,
        small_sums(2, "64 KB to 1 MB"),
        _CALLS,
    ),
    Goal(
        "small all_reduce, 4 ranks",
        "on 2 cores, 64 KiB to 4 MiB: 0.5 of the best MPI",
        SUMS,
        small_sums(4, "64 KB to 4 MB"),
        _TURNS,
    ),
    Goal("asks, 100 under way", "4x xoscar", ACTORS, verdict("concurrent asks, against xoscar"), _ASKS),
    Goal(
        "asks, 1,000 under way",
        "no slower per ask than 100",
        ACTORS,
        verdict("an ask of 1,000 under way, against one of 100"),
        _MANY,
    ),
    Goal(
        "first 64 MB",
        "the first messages of a pair at half the speed of later ones",
        ACTORS,
        verdict("first 64 MB messages of a pair, against later ones"),
        _FRESH,
    ),
    Goal("idle actors", "10,000 in 15 MB", ACTORS, verdict("10,000 idle actors"), "-"),
    Goal("ZeRO 2", "1.2 times no sharding", ZERO, zero("stage2"), _REDUCED),
    Goal("ZeRO 3", "1.2 times no sharding", ZERO, zero("stage3"), _GATHERED),
)
