"""Figures as rounds of records make them."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.bench.rounds import Figures, Record


def figures_of(*rounds: Sequence[Record]) -> Figures:
    return Figures([(turn, record) for turn, records in enumerate(rounds) for record in records])
