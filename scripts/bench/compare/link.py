"""Synchronize gradients over a slow wire: two network namespaces, a rank in each, shaped in both directions.

    scripts/bench/run link
    scripts/bench/run link --envs ~/.cache/asyncpar-bench --rounds 5      # beside torch, see compare --install

25 MB of float32 gradients (see peers/gradients.py) are averaged by ``GradientSynchronizer``, as they are and with each
codec; timed is all of it: packing, encoding, exchanging, decoding, writing back.  Beside it, where their environment is
there: Gloo's all_reduce alone, and torch's DistributedDataParallel as it is and with its hooks (see peers/hooks.py).
Gradients are views of buckets on both sides, ours and torch's.  In every round all sides run one after the other.  A
figure of a round is the median over the iterations on the slowest rank, shown are medians over rounds, of ratios to
Gloo in the same round, too.  Numpy's and torch's kernels have one thread per rank, as torch's launcher sets it.

--auto shows what the codec "auto" measures and picks at each speed, and for two ranks inside one host.

The share of the line counts what TCP can carry at best: 1448 bytes of payload per frame of 1514, which is what the
shaper counts; 25 MB among 2 ranks move 25 MB in each direction.  Needs root, ip and tc; says so and ends with 0 where
namespaces are not allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.compare.link_figures import AUTO, THEIRS, Figure, Speed, show, show_choice
from scripts.bench.environments import DEFAULT_ENVIRONMENTS, measure_gloo, python_of, version_of
from scripts.bench.jobs import LAUNCH, ONE_THREAD, JobFailedError, launch_across, records_of, run_together
from scripts.bench.namespaces import DEVICE, End, NoNamespacesError, wire

_RANK = Path(__file__).with_name("link_rank.py")
_PORT = 29_400
_LIMIT = 300.0
_FORMS = "fp32,bf16,int8,int4,sign,topk:0.01,topk:0.01+int8,powersgd:4"


def parse_arguments() -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=_FORMS, help=f"fp32 and codecs (default: {_FORMS})")
    parser.add_argument("--peers", default=",".join(THEIRS), help="forms of torch (default: all)")
    parser.add_argument("--size", type=int, default=25_000_000, help="bytes of float32 (default: 25000000)")
    parser.add_argument("--megabits", default="1000,100", help="speeds of the wire (default: 1000,100)")
    parser.add_argument(
        "--bucket-mb",
        type=float,
        default=0.0,
        help="our gradient buckets, in MiB (default: 8 where little is sent, else 2)",
    )
    parser.add_argument("--copies", action="store_true", help="our gradients lie elsewhere and are copied to and fro")
    parser.add_argument("--auto", action="store_true", help='show what the codec "auto" picks')
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=1.5, help="seconds per form and round, in which at least three")
    parser.add_argument("--envs", type=Path, default=DEFAULT_ENVIRONMENTS, help="folder of the peers' environments")
    parser.add_argument("--json", type=Path, help="write all figures into this file, too")
    arguments = parser.parse_args()
    try:
        arguments.megabits = [int(speed) for speed in arguments.megabits.split(",")]
    except ValueError as error:
        parser.error(f"--megabits: {error}")
    if min(arguments.size, arguments.rounds, *arguments.megabits) < 1 or not arguments.budget > 0:
        parser.error("--size, --megabits, --rounds, --budget: expected positive numbers")
    arguments.forms = [*filter(None, arguments.forms.split(",")), *([AUTO] if arguments.auto else [])]
    return arguments


def measure_ours(ends: tuple[End, End], arguments: argparse.Namespace) -> dict[str, Figure]:
    """Launch a rank on each side and return the figures of each form."""
    return _read(launch_across(ends, _program(arguments, arguments.forms), port=_PORT, limit=_LIMIT))


def measure_inside(arguments: argparse.Namespace) -> Figure:
    """Return the figure of ``auto`` for two ranks on this host."""
    command = [*LAUNCH, "--nproc-per-node", "2", *_program(arguments, [AUTO])]
    return _read(run_together([command], [os.environ | ONE_THREAD], limit=_LIMIT))[AUTO]


def _program(arguments: argparse.Namespace, forms: Sequence[str]) -> list[str]:
    program = [str(_RANK), "--forms", ",".join(forms), "--bucket-mb", str(arguments.bucket_mb)]
    program += ["--size", str(arguments.size), "--budget", str(arguments.budget)]
    return [*program, "--copies"] if arguments.copies else program


def measure_theirs(ends: tuple[End, End], arguments: argparse.Namespace) -> dict[str, Figure]:
    """Run torch on both sides and return its figures; one thread per rank, as its launcher sets it."""
    prefixes = [end.enter([str(python_of("gloo", arguments.envs))]) for end in ends]
    wanted = ["--forms", arguments.peers, "--size", str(arguments.size), "--budget", str(arguments.budget)]
    environment = {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
    return _read(measure_gloo(prefixes, wanted, limit=_LIMIT, environment=environment, program="hooks.py"))


def _read(output: str) -> dict[str, Figure]:
    """Return the figures by form.  Raises ``JobFailedError`` where there was a wrong one."""
    figures = {}
    for record in records_of(output):
        if record["wrong"]:
            raise JobFailedError(f"{record['form']}: the means are wrong on {record['wrong']} ranks")
        figures[record["form"]] = Figure(
            seconds=record["seconds"], sent=record.get("sent"), choice=record.get("choice", "")
        )
    return figures


def measure_speed(megabits: int, arguments: argparse.Namespace, *, has_peers: bool) -> Speed:
    """Run all rounds at one speed."""
    speed = Speed(megabits=megabits, size=arguments.size)
    with wire(megabits * 1_000_000) as ends:
        for _ in range(arguments.rounds):
            figures = measure_theirs(ends, arguments) if has_peers else {}
            speed.rounds.append(measure_ours(ends, arguments) | figures)
    return speed


def _tell(lines: Sequence[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n\n")
    sys.stdout.flush()


def main() -> int:
    """Run all rounds and show what came out."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the namespaces go then, too
    has_peers = bool(arguments.peers) and version_of("gloo", arguments.envs) is not None
    if not has_peers:
        sys.stderr.write(
            f"Gloo is left out: not in {arguments.envs / 'gloo'} (see scripts/bench/run compare --install)\n"
        )
    speeds = []
    try:
        for megabits in arguments.megabits:
            speeds.append(measure_speed(megabits, arguments, has_peers=has_peers))
            _tell(show(speeds[-1]))
            if arguments.auto:
                _tell(show_choice(speeds[-1].rounds[-1][AUTO], f"at {megabits} Mbit/s"))
        if arguments.auto:
            _tell(show_choice(measure_inside(arguments), "inside one host"))
    except NoNamespacesError as error:
        sys.stdout.write(f"skipped: {error}\n")
        return 0
    except JobFailedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    if arguments.json is not None:
        document = {"size": arguments.size, "speeds": [speed.document() for speed in speeds]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
