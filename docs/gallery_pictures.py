"""Draw the pictures of the gallery from what the examples print: python docs/gallery_pictures.py [NAME ...]

Every example runs in a folder of its own.  A terminal shows its last lines, a curve the losses that it reports.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "scripts" / "examples"
PICTURES = Path(__file__).resolve().parent / "gallery"
COLUMNS, ROWS = 76, 13
_LINE, _CHARACTER, _MARGIN = 17, 7.25, 14
_WIDTH, _HEIGHT = 560, 250
_LOSS = re.compile(r"(?:step|epoch|train) (\d+)\S*:?.*?loss[ =](?:on each rank after .*?: )?([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Run:
    """An example with its arguments; ``ranks`` under the launcher, or none."""

    example: str
    ranks: int = 0
    arguments: tuple[str, ...] = ()
    draws: str = "terminal"

    @property
    def command(self) -> str:
        """The command as a reader types it."""
        launcher = f"asyncpar launch --nproc-per-node {self.ranks}" if self.ranks else "python"
        if self.example == "ring_suite.py":
            launcher = "pytest -q"
        return " ".join((launcher, self.example, *self.arguments))


RUNS = {
    "actors": Run("actors.py", 2),
    "data_parallel": Run("data_parallel.py", 2, draws="curve"),
    "first_steps": Run("first_steps.py", 4),
    "mesh_training": Run("mesh_training.py", 4),
    "own_model": Run("own_model.py", 4),
    "ring_suite": Run("ring_suite.py"),
    "three_dimensions": Run("three_dimensions.py", 4),
    "train_lm": Run("train_lm.py", 2, ("--steps", "40"), draws="curve"),
    "word_count": Run("word_count.py", 4, (str(ROOT / "asyncpar" / "actors"),)),
}


def run(one: Run) -> str:
    """Run an example and return what it prints."""
    words = {
        "asyncpar": [sys.executable, "-m", "asyncpar"],
        "python": [sys.executable],
        "pytest": [sys.executable, "-m", "pytest"],
    }
    first, *others = one.command.replace(one.example, str(EXAMPLES / one.example)).split()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*words[first], *others],
            cwd=folder,
            env={**os.environ, "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
    return done.stdout.replace(f"{EXAMPLES}/", "").replace(f"{ROOT}/", "")


def draw_terminal(command: str, output: str) -> str:
    """Return a terminal with ``command`` and the first lines of ``output`` as SVG."""
    command = command.replace(f"{ROOT}/", "")
    lines = [line.rstrip() for line in output.splitlines() if line.strip() and not re.fullmatch(r"[=_.\s-]{20,}", line)]
    lines = [line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…" for line in lines]
    lines = lines if len(lines) <= ROWS else [*lines[: ROWS - 1], "…"]
    height = _MARGIN * 2 + _LINE * (1 + len(lines))
    texts = [
        f'<text x="{_MARGIN}" y="{_MARGIN + _LINE * (row + 0.8):g}" fill="{colour}" xml:space="preserve">'
        f"{escape(line)}</text>"
        for row, (line, colour) in enumerate([(f"$ {command}", "#7dd3fc"), *((line, "#e2e8f0") for line in lines)])
    ]
    return _picture(
        _WIDTH + 20, height, f'<rect width="100%" height="100%" rx="8" fill="#0f172a"/>{"".join(texts)}', command
    )


def draw_curve(command: str, output: str) -> str:
    """Return the losses that ``output`` reports over their steps as SVG."""
    points = [(int(step), float(loss)) for step, loss in _LOSS.findall(output)]
    if len(points) < 3:
        raise ValueError(f"{command}: expected a loss in three lines at least, got {output[-500:]!r}")
    (name,) = [word for word in command.split() if word.endswith(".py")]
    kind = "epochs" if "epoch" in output else "steps"
    last, most = max(step for step, _ in points), max(loss for _, loss in points)
    left, bottom, width, height = 50, _HEIGHT - 34, _WIDTH - 70, _HEIGHT - 64
    places = [(left + width * step / last, bottom - height * loss / most) for step, loss in points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    ticks = "".join(
        f'<text x="{left - 8}" y="{bottom - height * part + 4:g}" text-anchor="end">{most * part:.2g}</text>'
        f'<path d="M{left} {bottom - height * part:g}h{width}" stroke="#cbd5e1"/>'
        for part in (0.0, 0.5, 1.0)
    )
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#2563eb"/>' for x, y in places)
    return _picture(
        _WIDTH,
        _HEIGHT,
        f'<rect width="100%" height="100%" rx="8" fill="#fff"/><g fill="#334155">{ticks}'
        f'<text x="{left}" y="18">loss over {kind}: {escape(name)}</text>'
        f'<text x="{left + width}" y="{bottom + 20}" text-anchor="end">{last}</text></g>'
        f'<path d="{path}" fill="none" stroke="#2563eb" stroke-width="2"/>{dots}',
        command,
    )


def _picture(width: int, height: int, inside: str, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" '
        f'font-size="12" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">{inside}</svg>\n'
    )


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or RUNS:
        one = RUNS[name]
        draw = {"terminal": draw_terminal, "curve": draw_curve}[one.draws]
        (PICTURES / f"{name}.svg").write_text(draw(one.command, run(one)))


if __name__ == "__main__":
    main()
