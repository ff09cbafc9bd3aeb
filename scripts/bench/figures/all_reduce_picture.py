"""Draw the times of all_reduce, over the size of the array, as SVG: asyncpar, Gloo, and the best of the MPI libraries.

``figures.py`` writes it to docs/all_reduce.svg from the stored result of ``compare.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_PEERS = {"asyncpar": "#2563eb", "Gloo": "#d97706", "best MPI": "#65a30d"}
_SHORTEST, _LONGEST = 0.5, 200_000.0
_TICKS = {1.0: "1 us", 10.0: "10 us", 100.0: "100 us", 1e3: "1 ms", 1e4: "10 ms", 1e5: "100 ms"}
_LABELLED_SIZES = ("4 B", "1 KiB", "64 KiB", "1 MB", "100 MB")
_PANEL, _GAP, _LEFT, _TOP, _HEIGHT = 320, 40, 60, 56, 240
_UNITS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "MB": 1e6}


@dataclass(frozen=True, slots=True)
class Timings:
    """Times in microseconds of each peer, by size, of one number of ranks."""

    title: str
    sizes: tuple[str, ...]
    peers: dict[str, tuple[float, ...]]


def read_timings(output: Sequence[str]) -> list[Timings]:
    """Read the tables that ``compare.py --ops all_reduce`` has printed, each below its title."""
    found, title = [], ""
    for number, line in enumerate(output):
        if line.startswith("all_reduce, "):
            title = line.removeprefix("all_reduce, ").rstrip(":")
        elif line.startswith("| size"):
            end = next((at for at in range(number, len(output)) if not output[at].startswith("|")), len(output))
            found.append(_read_table(title, output[number:end]))
    return found


def _read_table(title: str, lines: Sequence[str]) -> Timings:
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    columns = {name.removesuffix(" (us)"): at for at, name in enumerate(head) if name.endswith(" (us)")}
    times = {name: tuple(float(row[at]) for row in rows) for name, at in columns.items()}
    libraries = [values for name, values in times.items() if name not in ("asyncpar", "Gloo")]
    best = tuple(min(values) for values in zip(*libraries, strict=True))
    return Timings(
        title,
        tuple(row[0] for row in rows),
        {"asyncpar": times["asyncpar"], "Gloo": times["Gloo"], "best MPI": best},
    )


def draw(panels: Sequence[Timings]) -> str:
    """Return the picture: a panel for each number of ranks, both axes logarithmic."""
    width = _LEFT + len(panels) * (_PANEL + _GAP)
    height = _TOP + _HEIGHT + 50
    parts = [f'<rect width="{width}" height="{height}" fill="#ffffff"/>', _legend()]
    for number, panel in enumerate(panels):
        parts += _panel(panel, _LEFT + number * (_PANEL + _GAP), has_labels=number == 0)
    parts.append(_text(width / 2, height - 8, "size of each rank's array", anchor="middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n<title>Time of all_reduce over the size of the array'
        f"</title>\n{chr(10).join(parts)}\n</svg>\n"
    )


def _legend() -> str:
    names = "".join(
        f'<tspan dx="{14 if at else 0}" fill="{colour}" font-weight="bold">{name}</tspan>'
        for at, (name, colour) in enumerate(_PEERS.items())
    )
    what = "time of all_reduce, float32, one host; lower is better:"
    return f'<text x="{_LEFT}" y="20" fill="#111827">{what} {names}</text>'


def _panel(timings: Timings, left: float, *, has_labels: bool) -> Iterable[str]:
    yield _text(left, _TOP - 10, timings.title, weight="bold")
    for value, label in _TICKS.items():
        y = _y(value)
        yield f'<path d="M{left} {y:.1f}H{left + _PANEL}" stroke="#e5e7eb"/>'
        if has_labels:
            yield _text(left - 8, y + 4, label, anchor="end")
    positions = [left + _x(size, timings.sizes) for size in timings.sizes]
    for size, x in zip(timings.sizes, positions, strict=True):
        if size in _LABELLED_SIZES:
            yield _text(x, _TOP + _HEIGHT + 18, size, anchor="middle")
    for name, colour in _PEERS.items():
        points = [f"{x:.1f} {_y(value):.1f}" for x, value in zip(positions, timings.peers[name], strict=True)]
        yield f'<path d="M{" L".join(points)}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        for x, size, value in zip(positions, timings.sizes, timings.peers[name], strict=True):
            hint = f"<title>{name}, {size}: {value:g} us</title>"
            yield f'<circle cx="{x:.1f}" cy="{_y(value):.1f}" r="3" fill="{colour}">{hint}</circle>'


def _x(size: str, sizes: Sequence[str]) -> float:
    first, last = _bytes(sizes[0]), _bytes(sizes[-1])
    return (_PANEL - 20) * math.log(_bytes(size) / first) / math.log(last / first)


def _y(microseconds: float) -> float:
    return _TOP + _HEIGHT * (1 - math.log(microseconds / _SHORTEST) / math.log(_LONGEST / _SHORTEST))


def _bytes(size: str) -> float:
    found = re.fullmatch(r"([\d.]+) (\w+)", size)
    assert found is not None, size
    return float(found[1]) * _UNITS[found[2]]


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:.1f}" fill="#111827" text-anchor="{anchor}" font-weight="{weight}">{text}</text>'
