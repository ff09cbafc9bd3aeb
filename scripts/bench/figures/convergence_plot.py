"""Loss over bytes, and what saving costs, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.bench.figures.convergence_figures import Outcome, judge, smooth

POINTS = 60
"""Points of a curve: means over so many parts of the run."""


def plot_outcomes(outcomes: Sequence[Outcome], path: Path, *, title: str) -> None:
    """Draw all runs into the PNG file ``path``; the first is uncompressed.  Needs matplotlib."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    base, *_ = outcomes
    colours = [colormaps["tab20"](2 * index % 20 + index // 10) for index in range(len(outcomes))]
    figure = Figure(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(figure)
    curves, costs = figure.subplots(1, 2)
    for outcome, colour in zip(outcomes, colours, strict=True):
        window = max(1, len(outcome.losses) // POINTS)
        losses = smooth(outcome.losses, window)
        per_step = outcome.bytes_per_rank / max(1, len(outcome.losses))
        sent = [window * (index + 1) * per_step for index in range(len(losses))]
        curves.plot(sent, losses, color=colour, linewidth=2.5 if outcome is base else 1.4)
        marker = {True: "o", False: "X", None: "s"}[judge(outcome, base)]
        saving, difference = outcome.saving(base), 100 * outcome.difference(base)
        costs.plot(
            [saving], [difference], marker, color=colour, markersize=9, linestyle="", label=outcome.configuration.label
        )
    curves.set_xscale("log")
    curves.set_xlabel("bytes sent per rank so far")
    curves.set_ylabel("training loss (nats per byte)")
    curves.set_title("the same loss for fewer bytes")
    costs.set_xscale("log")
    costs.set_xlabel("times fewer bytes")
    costs.set_ylabel("held-out loss above uncompressed (%)")
    costs.set_title("what it costs  (o target reached, x missed, □ no target)")
    costs.axhline(0.0, color="grey", linewidth=0.8)
    for axes in (curves, costs):
        axes.grid(alpha=0.3, which="both")
    figure.legend(*costs.get_legend_handles_labels(), loc="outside right upper", fontsize=9, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
