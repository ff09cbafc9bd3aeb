"""Reduce over a slow wire: two network namespaces, a rank in each, and 1 Gbit/s between them in both directions.

    python scripts/bench/link.py
    python scripts/bench/link.py --envs ~/.cache/asyncpar-bench --rounds 5      # beside Gloo, see compare.py --install

25 MB of float32 are reduced as they are, as bfloat16, and as int8 by the gradient synchronizer (in buckets of 4 MiB, so
that encoding overlaps with sending), beside Gloo in float32 where its environment is there.  Each side runs in turn,
round after round; shown are medians over the rounds of the median over the iterations on the slowest rank.

The share of the line counts what TCP can carry at best: 1448 bytes of payload per frame of 1514, which is what the
shaper counts; 25 MB among 2 ranks move 25 MB in each direction.  Needs root, ip and tc; says so and ends with 0 where
namespaces are not allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.comparison import format_ratio, markdown
from scripts.bench.environments import (
    DEFAULT_ENVIRONMENTS,
    JobFailedError,
    measure_gloo,
    python_of,
    run_together,
    version_of,
)
from scripts.bench.namespaces import DEVICE, End, NoNamespacesError, payload_rate, wire

_RANK = Path(__file__).with_name("link_rank.py")
_PORT = 29_400
_LIMIT = 300.0
_LINE_SHARE = 0.95
_INT8_RATIO = 3.7
GLOO = "Gloo fp32"


def parse_arguments() -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default="fp32,bf16,int8", help="default: fp32,bf16,int8")
    parser.add_argument("--size", type=int, default=25_000_000, help="bytes of float32 (default: 25000000)")
    parser.add_argument("--megabits", type=int, default=1000, help="speed of the wire (default: 1000)")
    parser.add_argument("--bucket-mb", type=float, default=4.0, help="gradient buckets for int8, in MiB (default: 4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=5, help="per round (default: 5)")
    parser.add_argument("--envs", type=Path, default=DEFAULT_ENVIRONMENTS, help="folder of the peers' environments")
    parser.add_argument("--json", type=Path, help="write all figures into this file, too")
    arguments = parser.parse_args()
    if min(arguments.size, arguments.megabits, arguments.rounds, arguments.iterations) < 1:
        parser.error("--size, --megabits, --rounds, --iterations: expected positive numbers")
    return arguments


def measure_ours(ends: tuple[End, End], arguments: argparse.Namespace, secret: Path) -> dict[str, float]:
    """Launch an agent on each side and return the seconds of each form."""
    launch = [sys.executable, "-m", "asyncpar", "launch", "--nnodes", "2", "--rdzv-endpoint"]
    launch += [f"{ends[0].address}:{_PORT}", "--secret-file", str(secret)]
    program = [str(_RANK), "--forms", arguments.forms, "--size", str(arguments.size)]
    program += ["--iterations", str(arguments.iterations), "--bucket-mb", str(arguments.bucket_mb)]
    commands = [end.enter([*launch, "--node-rank", str(place), *program]) for place, end in enumerate(ends)]
    output = run_together(commands, [os.environ] * 2, limit=_LIMIT)
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    _check(record["wrong"] for record in records)
    return {record["form"]: record["seconds"] for record in records}


def measure_theirs(ends: tuple[End, End], arguments: argparse.Namespace) -> dict[str, float]:
    """Run Gloo on both sides and return its seconds."""
    prefixes = [end.enter([str(python_of("gloo", arguments.envs))]) for end in ends]
    budget = arguments.iterations * 2 * arguments.size * 8 / (arguments.megabits * 1e6) / 2
    wanted = ["--ops", "all_reduce", "--sizes", str(arguments.size), "--budget", str(budget)]
    output = measure_gloo(prefixes, wanted, limit=_LIMIT, environment={"GLOO_SOCKET_IFNAME": DEVICE})
    record = json.loads(output.splitlines()[-1])
    _check([record["wrong"]])
    return {GLOO: record["seconds"]}


def _check(wrong: Iterable[float]) -> None:
    if any(wrong):
        raise JobFailedError("there were wrong elements")


def show(rounds: dict[str, list[float]], *, size: int, megabits: int) -> list[str]:
    """Return the table and the verdicts."""
    medians = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    line = megabits * 1e6
    least = size / payload_rate(line)
    gloo = medians.get(GLOO)
    rows = [["", "ms", "share of the line", "share of raw bits", "faster than Gloo fp32"]]
    for name, seconds in medians.items():
        is_full = name in (GLOO, "fp32")
        rows.append(
            [
                name if name == GLOO else f"asyncpar {name}",
                f"{seconds * 1e3:.1f}",
                f"{least / seconds:.3f}" if is_full else "-",
                f"{size * 8 / line / seconds:.3f}" if is_full else "-",
                format_ratio(None if gloo is None else gloo / seconds),
            ]
        )
    lines = [f"{size / 1e6:g} MB, 2 ranks, {megabits} Mbit/s each way:", "", *markdown(rows), ""]
    if "fp32" in medians:
        share = least / medians["fp32"]
        lines.append(
            f"fp32: {share:.3f} of the line, {_LINE_SHARE} wanted: {'ok' if share >= _LINE_SHARE else 'short'}"
        )
    if "int8" in medians and gloo is not None:
        ratio = gloo / medians["int8"]
        verdict = "ok" if ratio >= _INT8_RATIO else "short"
        lines.append(f"int8: {ratio:.2f}x Gloo fp32, {_INT8_RATIO}x wanted: {verdict}")
    return lines


@contextmanager
def _secret_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="asyncpar-bench-") as directory:
        path = Path(directory) / "secret"
        path.touch(mode=0o600)
        path.write_bytes(os.urandom(32))
        yield path


def main() -> int:
    """Run all rounds and show what came out."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the namespaces go then, too
    has_gloo = version_of("gloo", arguments.envs) is not None
    if not has_gloo:
        sys.stderr.write(f"Gloo is left out: not in {arguments.envs / 'gloo'} (see compare.py --install)\n")
    rounds: dict[str, list[float]] = {}
    try:
        with wire(arguments.megabits * 1_000_000) as ends, _secret_file() as secret:
            for _ in range(arguments.rounds):
                figures = measure_ours(ends, arguments, secret)
                figures |= measure_theirs(ends, arguments) if has_gloo else {}
                for name, seconds in figures.items():
                    rounds.setdefault(name, []).append(seconds)
    except NoNamespacesError as error:
        sys.stdout.write(f"skipped: {error}\n")
        return 0
    except JobFailedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    sys.stdout.write("\n".join(show(rounds, size=arguments.size, megabits=arguments.megabits)) + "\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"seconds": rounds, "megabits": arguments.megabits}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
