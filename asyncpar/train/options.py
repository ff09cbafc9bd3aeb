"""The command line of a training program."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from asyncpar.codecs import codec_forms
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.rank_place import find_rank_place
from asyncpar.core.config.schedule_type import SCHEDULES, parse_schedule_name
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientCompressionConfig, TuningConfig
from asyncpar.hybrid import Precision
from asyncpar.nn import TransformerConfig, WarmupCosine
from asyncpar.nn.optimizers import AdamW
from asyncpar.train.hybrid import Checkpoints
from asyncpar.train.language_model import TrainingConfig
from asyncpar.train.parallel_layout import ParallelLayout, Recompute
from asyncpar.train.setup import parse_mode

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Parser(argparse.ArgumentParser):
    """Raises ``UsageError`` for wrong options, and prints its help only on the first rank."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        place = LaunchEnvironment.from_mapping(os.environ) or find_rank_place(os.environ)
        if place is None or place.rank == 0:
            super().print_help(file)


def parse_arguments(
    arguments: Sequence[str] | None = None,
    *,
    description: str = "Train a byte-level transformer on text, data, tensor and pipeline parallel.",
    parents: Sequence[argparse.ArgumentParser] = (),
) -> argparse.Namespace:
    """Return the options.  Raises ``UsageError`` for a wrong one.

    ``arguments`` are those of the command line (None: this process's).  A program has its own options in ``parents``,
    as ``argparse`` has them, and its own ``description``.
    """
    parser = Parser(description=description, parents=parents)
    parser.add_argument(
        "--text", nargs="+", type=Path, metavar="PATH", help="files or folders (default: the standard library's source)"
    )
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=64, help="windows per step, over all ranks (default: 64)")
    parser.add_argument("--seq", type=int, default=64, help="bytes per window (default: 64)")
    parser.add_argument("--dim", type=int, default=128, help="features (default: 128)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default: 0.002)")
    parser.add_argument("--lr-floor", type=float, default=0.1, help="last rate as a part of the peak (default: 0.1)")
    parser.add_argument("--beta1", type=float, default=0.9, help="of AdamW (default: 0.9; 0 to 0.5 for sparse codecs)")
    parser.add_argument("--beta2", type=float, default=0.99, help="of AdamW (default: 0.99; 0.999 for sparse codecs)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument(
        "--codec",
        "--compress",
        default="none",
        metavar="NAME",
        help=f"gradients on the wire: {', '.join(codec_forms())}, a chain such as topk:0.01+int8, auto (default: none)",
    )
    parser.add_argument(
        "--sync",
        default="sync",
        metavar="MODE",
        help="sync, local:H, diloco:H[:RATE[:MOMENTUM]], hierarchical:H[:RATE[:MOMENTUM]], async, stale:STEPS "
        "(default: sync)",
    )
    parser.add_argument(
        "--held-out", type=float, default=0.0, metavar="PART", help="part of the text to evaluate on (default: 0)"
    )
    _add_layout(parser)
    parser.add_argument(
        "--clip-norm", type=float, default=1.0, help="limit of the norm of all gradients; 0: none (default: 1)"
    )
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="largest bucket in MiB (default: 25)")
    parser.add_argument(
        "--tune",
        nargs="?",
        const="",
        metavar="PIN",
        help="look for the quickest bucket size, all-reduce and messages while training, and print them; a PIN such as "
        "25m@ring/256k fixes them",
    )
    parser.add_argument("--check", action="store_true", help="repeat the run in one process and compare")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for loss.png and summary.json")
    return parser.parse_args(arguments)


def _add_layout(parser: Parser) -> None:
    """Add the options of the layout over ranks."""
    parser.add_argument("--dp", type=int, help="replicas (default: as many as there are ranks for)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks that share each layer (default: 1)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
    parser.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help=f"of the pipeline: {', '.join(SCHEDULES.names)}, or a .csv file with one (default: 1f1b)",
    )
    parser.add_argument("--chunks", type=int, default=1, help="model chunks per stage, where schedules have them")
    parser.add_argument("--zero", type=int, choices=range(4), default=0, help="what replicas share out (default: 0)")
    parser.add_argument("--micro-batches", type=int, help="per replica and step (default: 4 in a pipeline, else 1)")
    parser.add_argument(
        "--recompute",
        choices=[str(kind) for kind in Recompute],
        default=str(Recompute.BASIC),
        help="which blocks are computed again in the backward pass: none, every second, three of four (the fourth on "
        "disk with extreme), all (default: basic)",
    )
    parser.add_argument(
        "--precision",
        choices=[str(kind) for kind in Precision],
        default=str(Precision.FULL),
        help="in which parameters and gradients are stored (default: full)",
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="save to it, and go on from the latest in it, in any layout"
    )
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS", help="(default: 50)")


def make_layout(options: argparse.Namespace) -> ParallelLayout:
    """Return the layout of the run over ranks."""
    return ParallelLayout(
        dp=options.dp,
        tp=options.tp,
        pp=options.pp,
        schedule=_schedule_of(options.schedule),
        chunks=options.chunks,
        zero=options.zero,
        micro_batches=options.micro_batches,
        recompute=Recompute(options.recompute),
        precision=Precision(options.precision),
    )


def _schedule_of(name: str) -> str | Path:
    return Path(name) if name.endswith(".csv") else parse_schedule_name(name)


def make_checkpoints(options: argparse.Namespace) -> Checkpoints | None:
    """Return the settings of checkpoints, if any."""
    if options.checkpoint is None:
        return None
    return Checkpoints(folder=options.checkpoint, every=options.checkpoint_every)


def is_hybrid(options: argparse.Namespace) -> bool:
    """Return whether the run uses more than data parallelism."""
    return not make_layout(options).is_plain or options.checkpoint is not None


def make_config(options: argparse.Namespace) -> TrainingConfig:
    """Return the settings that determine the numbers.  Raises ``UsageError`` for settings out of range.

    The rate is low enough, the warm-up long enough and epsilon large enough that training is stable: an unstable run
    amplifies the rounding of different orders of summation, a stable one keeps two runs together to 1e-7.
    """
    for name in ("steps", "batch", "seq", "dim", "layers", "heads", "lr", "bucket_mb"):
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')}: expected a positive number, got {value}")
    if options.seed < 0:
        raise UsageError(f"--seed: expected 0 or more, got {options.seed}")
    if not 0.0 <= options.held_out <= 0.5:
        raise UsageError(f"--held-out: expected a part in 0..0.5, got {options.held_out}")
    if parse_mode(options.sync).is_free and options.codec != "none":
        raise UsageError(f"--codec: expected none with --sync {options.sync}, got {options.codec}")
    if is_hybrid(options) and options.sync != "sync":
        raise UsageError(
            f"--sync: expected sync with tensor or pipeline parallelism, ZeRO, recomputation, other "
            f"precision, micro-batches or checkpoints, got {options.sync}"
        )
    if options.tune is not None and (is_hybrid(options) or options.sync != "sync"):
        raise UsageError("--tune: is for data parallelism alone, --sync sync and no checkpoints; leave it out")
    if not 0.0 <= options.lr_floor <= 1.0:
        raise UsageError(f"--lr-floor: expected a part of the peak in 0..1, got {options.lr_floor}")
    warmup = min(40, options.steps // 4)
    return TrainingConfig(
        model=TransformerConfig(
            length=options.seq,
            features=options.dim,
            layers=options.layers,
            heads=options.heads,
            seed=options.seed,
            dtype=options.dtype,
        ),
        rule=AdamW(beta1=options.beta1, beta2=options.beta2, epsilon=1e-5),
        schedule=WarmupCosine(peak=options.lr, steps=options.steps, warmup=warmup, floor=options.lr_floor),
        steps=options.steps,
        rows=options.batch,
        clip_norm=options.clip_norm or None,
        tuning=None if options.tune is None else TuningConfig(pin=options.tune),
    )


def make_compression(options: argparse.Namespace) -> GradientCompressionConfig:
    """Return the settings of the codec.  Raises ``UsageError`` for an unknown one."""
    return GradientCompressionConfig(codec=None if options.codec == "none" else options.codec)
