"""Results of ``link.py``: tables by speed, and targets.  Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scripts.bench.namespaces import payload_rate
from scripts.bench.tables import format_ratio, markdown

AUTO = "auto"
GLOO = "gloo"
FP32 = "fp32"
THEIRS = {
    GLOO: "Gloo fp32, all_reduce alone",
    "ddp": "torch DDP, fp32",
    "fp16": "torch DDP, fp16_compress_hook",
    "powersgd": "torch DDP, powerSGD_hook, rank 4",
}
LINE_SHARE = 0.95
RATIOS = {"int8": 3.7, "int4": 7.0, "topk": 25.0}
"""By the beginning of a form's name: how many times faster than Gloo the fastest of these forms is to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One form in one round.

    ``sent`` is what a rank sent per synchronization in bytes, where that is known; ``choice`` what ``auto`` went by.
    """

    seconds: float
    sent: float | None = None
    choice: str = ""


@dataclass(slots=True, kw_only=True)
class Speed:
    """The rounds at one speed of the wire; a round has a figure for each form."""

    megabits: int
    size: int
    rounds: list[Mapping[str, Figure]] = field(default_factory=list)

    @property
    def forms(self) -> list[str]:
        return list(dict.fromkeys(form for figures in self.rounds for form in figures))

    def seconds(self, form: str) -> float:
        """Return the median over rounds."""
        return statistics.median(figures[form].seconds for figures in self.rounds if form in figures)

    def ratio(self, form: str) -> float | None:
        """Return how many times faster than Gloo ``form`` is: the median over rounds of the ratio within a round."""
        ratios = [
            figures[GLOO].seconds / figures[form].seconds
            for figures in self.rounds
            if GLOO in figures and form in figures
        ]
        return statistics.median(ratios) if ratios else None

    def line_share(self, form: str) -> float:
        """Return the part of what TCP can carry that ``form`` made use of, were it to send every value in float32."""
        return self.size / payload_rate(self.megabits * 1e6) / self.seconds(form)

    def document(self) -> dict[str, object]:
        """Return everything, for JSON."""
        return {
            "megabits": self.megabits,
            "seconds": {form: [figures[form].seconds for figures in self.rounds] for form in self.forms},
            "sent": {form: self.rounds[0][form].sent for form in self.forms},
            "ratios": {form: self.ratio(form) for form in self.forms},
        }


def show(speed: Speed) -> list[str]:
    """Return the table and the verdicts of one speed."""
    return [
        f"{speed.size / 1e6:g} MB of gradients, 2 ranks, {speed.megabits} Mbit/s each way:",
        "",
        *markdown(_rows(speed)),
        "",
        *judge(speed),
    ]


def _rows(speed: Speed) -> Sequence[Sequence[str]]:
    rows = [["", "ms", "MB sent", "faster than Gloo fp32", "share of the line"]]
    for form in speed.forms:
        sent = speed.rounds[0][form].sent
        rows.append(
            [
                THEIRS.get(form, f"asyncpar {form}"),
                f"{speed.seconds(form) * 1e3:.1f}",
                "-" if sent is None else f"{sent / 1e6:.2f}",
                format_ratio(speed.ratio(form)),
                f"{speed.line_share(form):.3f}" if form in (GLOO, FP32) else "-",
            ]
        )
    return rows


def show_choice(figure: Figure, where: str) -> list[str]:
    """Return what ``auto`` picked ``where``, and the figures behind it."""
    if not figure.choice:
        return [f"auto {where}: nothing to pick from, gradients travel as they are", ""]
    return [f"auto {where}, picked (*) by what rank 0 measured:", "", *figure.choice.splitlines(), ""]


def judge(speed: Speed) -> list[str]:
    """Return a line for each thing that was to be reached and was measured."""
    lines = []
    if FP32 in speed.forms:
        share = speed.line_share(FP32)
        lines.append(f"fp32: {share:.3f} of the line, {LINE_SHARE} wanted: {_verdict(share >= LINE_SHARE)}")
    for family, wanted in RATIOS.items():
        ratios = {form: ratio for form in speed.forms if form.startswith(family) and (ratio := speed.ratio(form))}
        if ratios:
            best = max(ratios, key=lambda form: ratios[form])
            verdict = _verdict(ratios[best] >= wanted)
            lines.append(f"{best}: {ratios[best]:.2f}x Gloo fp32, {wanted}x wanted: {verdict}")
    return lines


def _verdict(is_reached: bool) -> str:
    return "ok" if is_reached else "short"
