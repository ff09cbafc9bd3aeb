"""Draw some steps of a trace as a picture: what ranks do, and the messages between them.

    asyncpar trace --seconds 3 --json -o t.json
    scripts/bench/run trace_picture t.json -o docs/trace.png --seconds 0.5

The window begins with an action of the pipeline, or else an operation, in the middle of the trace.  Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LANES = ("pipeline", "gradients", "collectives", "program")
COLORS = {
    "forward": "#4a7fc1",
    "backward": "#4d9a7f",
    "backward_input": "#4d9a7f",
    "backward_weight": "#9aa4ad",
    "gradients": "#d08a3c",
    "collectives": "#8b78a8",
    "program": "#b9c0c7",
}

Event = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="what `asyncpar trace --json` wrote")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.png"))
    parser.add_argument("--seconds", type=float, default=0.5, help="length of the window")
    given = parser.parse_args(arguments)
    events: list[Event] = json.loads(given.trace.read_text())["traceEvents"]
    draw(events, given.output, given.seconds)
    print(given.output)


def draw(events: list[Event], output: Path, seconds: float) -> None:
    """Write the picture of a window of ``seconds``.  Raises ``SystemExit`` for a trace without any operation."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    slices = [
        event  # what takes longer than the window is an operation that only waits for an end
        for event in events
        if event["ph"] == "X" and event.get("cat") in LANES and event["dur"] < seconds * 1e6
    ]
    if not slices:
        raise SystemExit("the trace has no operations")
    begin = _middle(slices)
    end = begin + seconds * 1e6
    shown = [one for one in slices if one["ts"] < end and one["ts"] + one["dur"] > begin]
    lanes = [lane for lane in LANES if any(one["cat"] == lane for one in shown)]
    ranks = sorted({one["pid"] for one in shown})
    rows = {
        (rank, lane): -(at * (len(lanes) + 0.6) + place)
        for at, rank in enumerate(ranks)
        for place, lane in enumerate(lanes)
    }
    figure, axes = plt.subplots(figsize=(11, 0.28 * len(ranks) * (len(lanes) + 0.6) + 1.0), dpi=110)
    used: dict[str, str] = {}
    for one in shown:
        name = one["name"].split()[0].split("(")[0]
        label = name if name in COLORS else one["cat"]
        used[label] = COLORS[label]
        left, right = max(one["ts"], begin), min(one["ts"] + one["dur"], end)
        row = rows[one["pid"], one["cat"]]
        axes.barh(row, (right - left) / 1e3, left=(left - begin) / 1e3, height=0.82, color=COLORS[label], linewidth=0)
    _draw_arrows(axes, events, rows, begin, end)
    axes.set_yticks(
        [sum(rows[rank, lane] for lane in lanes) / len(lanes) for rank in ranks], [f"rank {rank}" for rank in ranks]
    )
    axes.set_xlim(0, seconds * 1e3)
    axes.set_xlabel("ms")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    handles = [Patch(color=color, label=label.replace("_", " ")) for label, color in used.items()]
    axes.legend(handles=handles, ncols=6, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=9)
    figure.tight_layout()
    figure.savefig(output)
    plt.close(figure)


def _middle(slices: list[Event]) -> float:
    wanted = [one for one in slices if one["cat"] == "pipeline" and one["name"].startswith("forward")] or slices
    starts = sorted(one["ts"] for one in wanted)
    middle: float = starts[len(starts) // 2]
    return middle


def _draw_arrows(axes: Any, events: list[Event], rows: dict[tuple[int, str], float], begin: float, end: float) -> None:
    """Draw the messages between ranks, from the lane in which ranks compute."""
    top = next(iter(rows))[1]
    sent = {event["id"]: event for event in events if event["ph"] == "s" and begin <= event["ts"] <= end}
    for event in events:
        if event["ph"] == "f" and event["id"] in sent and event["ts"] <= end:
            start = sent[event["id"]]
            if (start["pid"], top) in rows and (event["pid"], top) in rows:
                places = (
                    (start["ts"] - begin) / 1e3,
                    rows[start["pid"], top],
                    (event["ts"] - begin) / 1e3,
                    rows[event["pid"], top],
                )
                axes.annotate(
                    "",
                    xy=places[2:],
                    xytext=places[:2],
                    arrowprops={"arrowstyle": "->", "color": "#33404d", "lw": 0.7, "shrinkA": 0, "shrinkB": 0},
                )


if __name__ == "__main__":
    main()
