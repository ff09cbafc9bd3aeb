"""Figures of actor libraries side by side: medians over rounds, ratios, targets.  Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.compare.comparison import OURS
from scripts.bench.tables import format_ratio, format_size, markdown

XOSCAR = "xoscar"
TITLES = {OURS: "asyncpar", XOSCAR: "xoscar", "ray": "Ray", "monarch": "Monarch"}

ARRAY = "array "
"""What the names of figures with an array begin with; the bytes follow."""

SIZE_WANTED = 64_000_000


@dataclass(slots=True)
class Figures:
    """What was measured: by figure and side, one record per round."""

    records: dict[str, dict[str, list[Mapping[str, Any]]]] = field(default_factory=dict)

    def add(self, side: str, record: Mapping[str, Any]) -> None:
        self.records.setdefault(str(record["figure"]), {}).setdefault(side, []).append(record)

    @property
    def sides(self) -> tuple[str, ...]:
        """The libraries that have figures, in the order of ``TITLES``."""
        return tuple(side for side in TITLES if any(side in sides for sides in self.records.values()))

    @property
    def wrong(self) -> int:
        """Answers that were wrong, of all sides."""
        return sum(int(record["wrong"]) for sides in self.records.values() for of in sides.values() for record in of)

    def median(self, figure: str, side: str, key: str) -> float | None:
        """Return the median over the rounds; None where there is none."""
        values = [float(record[key]) for record in self.records.get(figure, {}).get(side, ()) if key in record]
        return statistics.median(values) if values else None

    def ratio(self, figure: str, side: str) -> float | None:
        """Return how many times better than ``side`` we are; None where one of the two has no figure."""
        key = "bytes" if figure == "idle" else "seconds"
        ours, theirs = self.median(figure, OURS, key), self.median(figure, side, key)
        return None if ours is None or theirs is None or ours <= 0 else theirs / ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was to be reached, and what was."""

    what: str
    wanted: str
    reached: str
    is_reached: bool


_TIMES = (("ask", "ask", 4.0), ("concurrent", "concurrent asks", 4.0), (f"{ARRAY}{SIZE_WANTED}", "64 MB array", 10.0))
_LOCAL_SECONDS = 30e-6
_IDLE_ACTORS = 10_000
_IDLE_BYTES = 15_000_000
_FIRST_SHARE = 0.5
_GROWTH = 0.02


def judge(figures: Figures) -> list[Verdict]:
    """Return the verdicts on all targets for which there are figures."""
    verdicts = []
    for figure, what, wanted in _TIMES:
        ratio = figures.ratio(figure, XOSCAR)
        if ratio is not None:
            title = f"{what}, against xoscar"
            verdicts.append(_verdict(title, f"{wanted:g}x", format_ratio(ratio), is_reached=ratio >= wanted))
    local = figures.median("local", OURS, "seconds")
    if local is not None:
        verdicts.append(
            _verdict("ask in the process", "30 us", f"{local * 1e6:.1f} us", is_reached=local <= _LOCAL_SECONDS)
        )
    many, hundred = (figures.median(figure, OURS, "seconds") for figure in ("concurrent 1000", "concurrent"))
    if many is not None and hundred is not None:
        title = "an ask of 1,000 under way, against one of 100"
        verdicts.append(_verdict(title, "1x", format_ratio(hundred / many), is_reached=many <= hundred))
    first, later = (figures.median("first", OURS, key) for key in ("seconds", "later"))
    if first is not None and later is not None:
        share = later / first
        title = "first 64 MB messages of a pair, against later ones"
        verdicts.append(_verdict(title, f"{_FIRST_SHARE:g}x", format_ratio(share), is_reached=share >= _FIRST_SHARE))
    weight = figures.median("idle", OURS, "bytes")
    if weight is not None and figures.median("idle", OURS, "actors") == _IDLE_ACTORS:
        verdicts.append(
            _verdict("10,000 idle actors", "15 MB", f"{weight / 1e6:.1f} MB", is_reached=weight <= _IDLE_BYTES)
        )
    return verdicts + _judge_soak(figures)


def _judge_soak(figures: Figures) -> list[Verdict]:
    """Memory is flat if it is about the same after a tenth of the asks, half of them, and all."""
    samples = figures.records.get("soak", {}).get(OURS, [])
    if not samples:
        return []
    asks = max(int(sample["asks"]) for sample in samples)
    growths = [
        max(float(sample[end]) for sample in samples) / float(samples[0][end]) - 1 for end in ("caller", "callee")
    ]
    shown = " and ".join(f"{growth:+.1%}" for growth in growths)
    return [
        _verdict(f"memory over {asks:,} asks, caller and callee", "flat", shown, is_reached=max(growths) <= _GROWTH)
    ]


def _verdict(what: str, wanted: str, reached: str, *, is_reached: bool) -> Verdict:
    return Verdict(what=what, wanted=wanted, reached=reached, is_reached=is_reached)


def figure_table(figures: Figures) -> list[str]:
    """Return a markdown table with a column per side and a ratio to each peer; nothing if there are no figures."""
    peers = [side for side in figures.sides if side != OURS]
    titles = ["", *(TITLES[side] for side in figures.sides), *(f"asyncpar against {TITLES[side]}" for side in peers)]
    rows = [titles]
    for figure in figures.records:
        if figure == "soak":
            continue
        values = [_show(figures, figure, side) for side in figures.sides]
        rows.append([_title(figures, figure), *values, *(format_ratio(figures.ratio(figure, side)) for side in peers)])
        if figure in ("ask", "local"):
            tails = [_micros(figures.median(figure, side, "p99")) for side in figures.sides]
            rows.append([f"{_title(figures, figure)}, 99 %", *tails, *("" for _ in peers)])
    return markdown(rows) if len(rows) > 1 else []


def soak_table(figures: Figures) -> list[str]:
    """Return a markdown table of memory after shares of a soak; nothing if there was none."""
    samples = figures.records.get("soak", {}).get(OURS, [])
    rows = [
        [f"{sample['asks']:,}", *(f"{sample[end] / 1e6:.1f} MB" for end in ("caller", "callee"))] for sample in samples
    ]
    return markdown([["asks", "caller holds", "callee holds"], *rows]) if rows else []


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a markdown table of what was to be reached, and what was."""
    rows = [[one.what, one.wanted, one.reached, "ok" if one.is_reached else "short"] for one in verdicts]
    return markdown([["target", "wanted", "reached", ""], *rows])


def _title(figures: Figures, figure: str) -> str:
    if figure.startswith(ARRAY):
        return f"{_size(int(figure.removeprefix(ARRAY)))} array as argument"
    if figure == "idle":
        counts = {int(record["actors"]) for of in figures.records[figure].values() for record in of}
        return f"growth by {'/'.join(f'{count:,}' for count in sorted(counts))} idle actors"
    titles = {
        "ask": "ask",
        "concurrent": "asks, 100 under way",
        "concurrent 1000": "asks, 1,000 under way",
        "first": "slowest of the first messages of a pair",
        "local": "ask in the process",
    }
    return titles.get(figure, figure)


def _size(size: int) -> str:
    """Return ``64 MB`` for what is that exactly, although it is so many KiB, too."""
    return f"{size // 1_000_000} MB" if size % 1_000_000 == 0 else format_size(size)


def _show(figures: Figures, figure: str, side: str) -> str:
    if figure == "idle":
        weight = figures.median(figure, side, "bytes")
        return "-" if weight is None else f"{weight / 1e6:.1f} MB"
    seconds = figures.median(figure, side, "seconds")
    if seconds is None:
        return "-"
    if figure.startswith("concurrent"):
        return f"{1 / seconds:,.0f} /s"
    if figure == "first":
        size = figures.median(figure, side, "size")
        return f"{(size or 0.0) / seconds / 1e9:.2f} GB/s"
    if figure.startswith(ARRAY):
        return f"{int(figure.removeprefix(ARRAY)) / seconds / 1e9:.2f} GB/s"
    return _micros(seconds)


def _micros(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f} us"
