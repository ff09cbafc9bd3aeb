"""Figures of training runs side by side: losses, bytes, a table, and targets.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SYNCHRONOUS = "sync"
UNCOMPRESSED = "none"


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """One way to train: a mode, and a codec for what it sends."""

    mode: str = SYNCHRONOUS
    codec: str = UNCOMPRESSED

    @property
    def label(self) -> str:
        """Say what is not the ordinary."""
        parts = [part for part in (self.mode, self.codec) if part not in (SYNCHRONOUS, UNCOMPRESSED)]
        return ", ".join(parts) or "uncompressed"

    @property
    def folder(self) -> str:
        """Name a folder for it."""
        return "-".join(self.label.replace(":", "_").replace(",", "").split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to.  ``held_out_loss`` is of text that no run was trained on; ``losses`` are of each step."""

    configuration: Configuration
    held_out_loss: float
    last_loss: float
    bytes_per_rank: int
    seconds: float
    losses: Sequence[float] = field(default_factory=tuple)

    def difference(self, base: Outcome) -> float:
        """Return by how much more this loss is than that of ``base``, relatively."""
        return self.held_out_loss / base.held_out_loss - 1.0

    def saving(self, base: Outcome) -> float:
        """Return how many times less was sent than by ``base``."""
        return base.bytes_per_rank / self.bytes_per_rank if self.bytes_per_rank else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The loss may be ``difference`` above that of uncompressed training, and traffic must be ``saving`` times less."""

    difference: float
    saving: float


def target_of(configuration: Configuration) -> Target | None:
    """Return what is wanted of a configuration; None where nothing was promised.

    A saving is what the format promises, less a few per cent for headers; top-k's payload is so small that they weigh.
    """
    match configuration:
        case Configuration(mode="sync", codec="int8"):
            return Target(difference=0.005, saving=3.7)
        case Configuration(mode="sync", codec="int4"):
            return Target(difference=0.01, saving=7.0)
        case Configuration(mode="sync", codec="topk:0.01"):
            return Target(difference=0.03, saving=25.0)
        case Configuration(mode=mode, codec="none") if mode.split(":")[:2] == ["diloco", "20"]:
            return Target(difference=0.03, saving=19.0)
        case _:
            return None


def judge(outcome: Outcome, base: Outcome) -> bool | None:
    """Return whether a configuration comes to what is wanted of it; None where nothing is."""
    target = target_of(outcome.configuration)
    if target is None:
        return None
    return outcome.difference(base) <= target.difference and outcome.saving(base) >= target.saving


def make_table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of a Markdown table; the first outcome is what the others are compared with."""
    base, *_ = outcomes
    lines = [
        "| mode | codec | held-out loss | against uncompressed | bytes sent per rank | times fewer | time | wanted |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for outcome in outcomes:
        configuration = outcome.configuration
        cells = (
            configuration.mode,
            configuration.codec,
            f"{outcome.held_out_loss:.4f}",
            "" if outcome is base else f"{outcome.difference(base):+.2%}",
            _megabytes(outcome.bytes_per_rank),
            f"{outcome.saving(base):.3g}x",
            f"{outcome.seconds:.0f} s",
            _wanted(outcome, base),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _wanted(outcome: Outcome, base: Outcome) -> str:
    target, is_reached = target_of(outcome.configuration), judge(outcome, base)
    if target is None:
        return ""
    return f"{target.difference:.1%}, {target.saving:g}x: {'reached' if is_reached else 'missed'}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """Return the means over ``window`` steps, one after another; a rest that is shorter is left out."""
    return [sum(losses[i : i + window]) / window for i in range(0, len(losses) - window + 1, window)]
