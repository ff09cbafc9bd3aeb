"""Pictures."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from asyncpar.bench.plot import check_plot, plot_report
from asyncpar.bench.report import BenchReport
from asyncpar.errors import UsageError
from tests.bench.samples import ROW, SURROUNDINGS

REPORT = BenchReport(
    surroundings=SURROUNDINGS,
    measurements=(
        ROW,
        replace(ROW, size=4000),
        replace(ROW, operation="barrier", size=0, predicted_us=0.0),
    ),
)


def test_a_png_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "bench.png"
    check_plot(path)
    assert list(tmp_path.iterdir()) == []
    plot_report(REPORT, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_name_does_not_decide_the_format(tmp_path: Path) -> None:
    plot_report(REPORT, tmp_path / "bench")
    assert (tmp_path / "bench").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r'pip install "asyncpar\[plot\]"'):
        check_plot(tmp_path / "x.png")
    with pytest.raises(UsageError, match=r'pip install "asyncpar\[plot\]"'):
        plot_report(REPORT, tmp_path / "x.png")


def test_places_that_cannot_take_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        check_plot(tmp_path)
    with pytest.raises(UsageError, match=r"no file can be made in .*: No such file or directory"):
        check_plot(tmp_path / "nowhere" / "bench.png")
    with pytest.raises(UsageError, match="no file can be made in"):
        check_plot(Path("/proc/self/bench.png"))


def test_time_and_size_are_logarithmic_bandwidth_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_report(REPORT, tmp_path / "bench.png")
    times, bandwidths = drawn[0].axes
    assert (times.get_xscale(), times.get_yscale()) == ("log", "log")
    assert (bandwidths.get_xscale(), bandwidths.get_yscale()) == ("log", "linear")
    assert [line.get_label() for line in times.lines] == [
        "all_reduce",
        "all_reduce, predicted",
        "barrier",
        "barrier, predicted",
    ]
    assert [axes.get_ylabel() for axes in (times, bandwidths)] == ["time (us)", "bus bandwidth (GB/s)"]
