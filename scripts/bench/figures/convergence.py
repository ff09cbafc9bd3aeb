"""Train the same model with each codec and mode, over real ranks, and compare losses, bytes and times.

    scripts/bench/run convergence
    scripts/bench/run convergence --codecs int8,powersgd:4 --modes local:10/int8 --steps 1000

Every run trains ``train_lm.py`` for the same tokens, from the same seed, with the same optimizer; only what is sent
differs.  A mode may name a codec for its rounds behind a slash.  The loss that counts is that of text held out from
training, on windows that are the same for all.  Bytes are all that left a rank, frame headers too, over TCP.

The settings are good ones for uncompressed training and ask for no favour of it: AdamW with less momentum than usual
(beta1 = 0.4), which serves it as well as 0.9 does, and sparse codecs better: what they send of a value comes late and
at once, and momentum would go on with it when it is out of date (Lin et al. 2018).  Two uncompressed runs that differ
in rounding alone come to losses up to 0.4 % apart, so differences of that size mean nothing.  DiLoCo is there with the
outer optimizer of its paper, which is meant for rounds of hundreds of steps, and with less momentum.

Writes convergence.md, convergence.png (where matplotlib is) and convergence.json into the folder ``--out``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.figures.convergence_figures import (
    SYNCHRONOUS,
    UNCOMPRESSED,
    Configuration,
    Outcome,
    make_table,
)

CODECS = "bf16,int8,int4,sign,topk:0.01,topk:0.01+int8,randomk:0.1,powersgd:4"
MODES = "local:20,diloco:20,diloco:20:0.7:0.7,diloco:20:0.7:0.7/int8,diloco:20:0.7:0.7/int4,stale:4"

_TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train_lm.py"
_MODEL = ("--dim", "64", "--layers", "2", "--heads", "4", "--seq", "32", "--batch", "8", "--held-out", "0.06")
_OPTIMIZER = ("--beta1", "0.4", "--beta2", "0.999", "--lr-floor", "0.01")
_PATIENCE = 1800.0
"""Seconds after which a run counts as stuck."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; a wrong one ends the program with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--codecs", default=CODECS, help=f"with gradients in every step (default: {CODECS})")
    parser.add_argument("--modes", default=MODES, help=f"MODE or MODE/CODEC (default: {MODES})")
    parser.add_argument("--lr", type=float, default=2.5e-3, help="peak learning rate (default: 0.0025)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", nargs="+", type=Path, metavar="PATH", help="as of train_lm.py")
    parser.add_argument("--transport", default="tcp", help="lanes between ranks (default: tcp)")
    parser.add_argument("--out", type=Path, default=Path("out") / "convergence")
    return parser.parse_args(arguments)


def make_configurations(options: argparse.Namespace) -> list[Configuration]:
    """Return what is to be compared, uncompressed training first."""
    codecs = [Configuration(SYNCHRONOUS, codec) for codec in options.codecs.split(",") if codec]
    modes = []
    for mode in filter(None, options.modes.split(",")):
        name, _, codec = mode.partition("/")
        modes.append(Configuration(name, codec or UNCOMPRESSED))
    return list(dict.fromkeys([Configuration(), *codecs, *modes]))


def run(configuration: Configuration, options: argparse.Namespace) -> Outcome:
    """Train once.  Ends the program when the run fails."""
    folder = options.out / configuration.folder
    launch = ["-m", "asyncpar", "launch", "--nproc-per-node", str(options.ranks), "--transport", options.transport]
    settings = ["--steps", str(options.steps), "--lr", str(options.lr), "--seed", str(options.seed)]
    settings += ["--codec", configuration.codec, "--sync", configuration.mode, "--out", str(folder)]
    if options.text:
        settings += ["--text", *map(str, options.text)]
    command = [sys.executable, *launch, str(_TRAIN), *_MODEL, *_OPTIMIZER, *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    if done.returncode:
        raise SystemExit(f"convergence: {configuration.label} failed:\n{done.stderr[-4000:]}")
    return read_outcome(configuration, folder)


def read_outcome(configuration: Configuration, folder: Path) -> Outcome:
    """Read what ``train_lm.py`` has written."""
    summary = json.loads((folder / "summary.json").read_text())
    (losses,) = summary["losses"].values()
    return Outcome(
        configuration=configuration,
        held_out_loss=summary["held_out_loss"],
        last_loss=summary["last_loss"],
        bytes_per_rank=summary["bytes_sent_per_rank"],
        seconds=summary["seconds"],
        losses=losses,
    )


def write(outcomes: Sequence[Outcome], options: argparse.Namespace) -> None:
    """Write table, figures and picture, and print the table."""
    title = f"{options.ranks} ranks, {options.steps} steps of 256 tokens, learning rate {options.lr:g}"
    table = [f"{title}; every run with the same text, seed and optimizer.", "", *make_table(outcomes)]
    (options.out / "convergence.md").write_text("\n".join(table) + "\n")
    content = {"settings": vars(options), "outcomes": [asdict(outcome) for outcome in outcomes]}
    (options.out / "convergence.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
    print("\n".join(table))
    try:
        from scripts.bench.figures.convergence_plot import plot_outcomes

        plot_outcomes(outcomes, options.out / "convergence.png", title=title)
    except ImportError:
        print('no convergence.png: plots need matplotlib: pip install "asyncpar[plot]"', file=sys.stderr)


def main() -> None:
    """Train with one configuration after the other; after each, write what there is."""
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    configurations = make_configurations(options)
    outcomes: list[Outcome] = []
    for index, configuration in enumerate(configurations, 1):
        outcomes.append(run(configuration, options))
        one = outcomes[-1]
        print(
            f"{index}/{len(configurations)} {configuration.label}: held-out loss {one.held_out_loss:.4f}, "
            f"{one.bytes_per_rank:,} bytes per rank, {one.seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    write(outcomes, options)


if __name__ == "__main__":
    main()
