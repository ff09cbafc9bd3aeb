"""Time and bandwidth over size as a picture."""

from __future__ import annotations

import os
import tempfile
from itertools import groupby
from pathlib import Path

from asyncpar.bench.report import BenchReport
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError


def check_plot(path: Path) -> None:
    """Raise ``UsageError`` unless ``plot_report`` could write ``path``; leaves no file there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError('--plot: plots need matplotlib: pip install "asyncpar[plot]"') from error
    if path.is_dir():
        raise UsageError(f"--plot: expected the path of a file, {path} is a directory")
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"--plot: {path} cannot be written: permission denied")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"--plot: no file can be made in {path.parent}: {os_reason(error)}") from error


def plot_report(report: BenchReport, path: Path) -> None:
    """Plot measured and predicted time, and bus bandwidth, over size into the PNG file ``path``.

    Raises ``UsageError`` with the way to install matplotlib if it is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError('--plot: plots need matplotlib: pip install "asyncpar[plot]"') from error
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    times, bandwidths = figure.subplots(1, 2)
    for operation, group in groupby(report.measurements, key=lambda row: row.operation):
        rows = list(group)
        sizes = [max(row.size, 1) for row in rows]
        (line,) = times.plot(sizes, [row.time_us for row in rows], marker="o", label=operation)
        predicted = [row.predicted_us if row.predicted_us > 0 else float("nan") for row in rows]
        times.plot(sizes, predicted, linestyle="--", color=line.get_color(), label=f"{operation}, predicted")
        bandwidths.plot(sizes, [row.busbw for row in rows], marker="o", label=operation)
    for axes, quantity in ((times, "time (us)"), (bandwidths, "bus bandwidth (GB/s)")):
        axes.set_xscale("log")
        axes.set_xlabel("size (bytes)")
        axes.set_ylabel(quantity)
        axes.grid(alpha=0.3)
        axes.legend()
    times.set_yscale("log")
    surroundings = report.surroundings
    figure.suptitle(f"asyncpar {surroundings.version}: {surroundings.ranks} ranks, {surroundings.lane} lanes")
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise UsageError(f"--plot: {path} cannot be written: {os_reason(error)}") from error
