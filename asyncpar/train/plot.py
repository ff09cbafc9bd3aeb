"""Loss curves as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncpar.errors import UsageError


def plot_losses(curves: Mapping[str, Sequence[float]], path: Path, *, title: str) -> None:
    """Draw each curve over its steps into the PNG file ``path``.

    Needs matplotlib; raises ``UsageError`` that says how to install it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError('plots need matplotlib: pip install "asyncpar[plot]"') from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (label, losses) in enumerate(curves.items()):
        axes.plot(range(1, len(losses) + 1), losses, label=label, linestyle="--" if index else "-")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
