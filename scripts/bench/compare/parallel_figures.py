"""Results of ``parallel.py``: tables and faults.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.core.config.schedule_type import schedule_record
from scripts.bench.compare.comparison import OURS
from scripts.bench.rounds import Figures, Record, Samples
from scripts.bench.tables import format_ratio, markdown

TORCH = "torch"
ALONE = "alone"
PEERS = {ALONE: ALONE, "ddp": "dp2", "fsdp": "dp2-zero3", "pipeline": "pp2"}
"""What torch can be asked for, and which of our layouts is its like."""

_LIKE = {"ddp2": "dp2", "fsdp2": "dp2-zero3"}
_TITLES = {
    ALONE: "one process",
    "dp2": "dp2 (DDP)",
    "dp2-zero3": "ZeRO 3 (FSDP2)",
    "pp2": "pp2 (1F1B)",
}
_CLOSE = 1e-4


def schedule_table(figures: Figures) -> list[str]:
    """Return a row for each schedule: makespan over the busiest rank's computing, in seconds of virtual time."""
    rows = [["schedule", "table", "simulated", "measured", "bubble", "in flight"]]
    for _, record in figures.of("schedule"):
        makespan, ideal = record["measured"]
        rows.append(
            [
                _schedule_title(record),
                _over(record["table"]),
                _over(record["simulated"]),
                _over(record["measured"]),
                f"{(makespan - ideal) / ideal:.1%}",
                " ".join(map(str, record["peaks"])),
            ]
        )
    return markdown(rows) if len(rows) > 1 else []


def _schedule_title(record: Record) -> str:
    kind = PipelineScheduleType(record["kind"])
    short = schedule_record(kind).short
    is_v_shaped = kind in (PipelineScheduleType.ZBV, PipelineScheduleType.DUALPIPE_V)
    return short if record["chunks"] == 1 or is_v_shaped else f"{short}, {record['chunks']} chunks"


def _over(pair: Sequence[float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:g}/{pair[1]:g}"


def hop_table(figures: Figures) -> list[str]:
    """Return a row for each lane, size and place to compute; microseconds."""
    samples = Samples()
    for turn, record in figures.of("hops"):
        for name, seconds in record["seconds"].items():
            samples.add(turn, (record["lane"], str(record["size"]), name), seconds)
    one, stream = (
        str(kind) for kind in (PipelineScheduleType.ROUND_ROBIN, PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD)
    )
    rows = [["us", "raw", "one by one", "added, a hop", "1F1B", "run, once"]]
    for lane, size in dict.fromkeys(key[:2] for key in samples.rounds):
        for place in ("loop", "thread"):

            def at(name: str, lane: str = lane, size: str = size) -> float | None:
                return samples.median((lane, size, name))

            raw, trip = at("raw"), at(f"{one} {place}")
            above = None if raw is None or trip is None else (trip - raw) / 2
            cells = [raw, trip, above, at(f"{stream} {place}"), at(f"{one} {place} once")]
            rows.append([f"{lane}, {_size(int(size))}, {place}", *map(_micros, cells)])
    return markdown(rows) if len(rows) > 1 else []


def zero_table(figures: Figures) -> list[str]:
    """Return a row for each lane and stage; times in milliseconds of the slowest rank, bytes of the worst."""
    names = ("lane", "stage")
    every = {
        figure: figures.samples("zero", names, figure) for figure in ("seconds", "reduction", "update", "sent", "held")
    }
    rows = [["ms", "step", "to none", "gradients", "update", "MB sent", "MB held"]]
    for key in every["seconds"].rounds:
        lane, stage = key
        rows.append(
            [
                f"{lane}, {stage}",
                _millis(every["seconds"].median(key)),
                format_ratio(every["seconds"].ratio(key, (lane, "none"))),
                _millis(every["reduction"].median(key)),
                _millis(every["update"].median(key)),
                *(_megabytes(every[figure].median(key)) for figure in ("sent", "held")),
            ]
        )
    return markdown(rows) if len(rows) > 1 else []


def layout_table(figures: Figures, tokens: int) -> list[str]:
    """Return a row for each of our layouts; shares are means over ranks."""
    ours = Figures([(turn, record) for turn, record in figures.of("train") if record["side"] == OURS])
    names = ("layout", "lane")
    seconds = ours.samples("train", names, "seconds")
    parts = [ours.samples("train", names, part) for part in ("computing", "communicating", "waiting")]
    counts = ours.samples("train", names, "micro_batches")
    rows = [["layout", "m.b.", "ms", "tokens/s", "speedup", "compute", "comm.", "wait"]]
    for key in seconds.rounds:
        layout, lane = key
        median = seconds.median(key)
        rows.append(
            [
                layout if layout == ALONE else f"{layout}, {lane}",
                f"{counts.median(key):.0f}",
                _millis(median),
                _rate(tokens, median),
                format_ratio(_inverse(seconds.ratio(key, (ALONE, "none")))),
                *(_percent(part.median(key)) for part in parts),
            ]
        )
    return markdown(rows) if len(rows) > 1 else []


def peer_table(figures: Figures, tokens: int) -> list[str]:
    """Return a row for each layout and side that torch has, too; nothing where it has none."""
    samples = Samples()
    for turn, record in figures.of("train"):
        layout = _LIKE.get(str(record["layout"]), str(record["layout"]))
        lane = record.get("lane", "gloo" if layout != ALONE else "none")
        samples.add(turn, (layout, record["side"], lane), record["seconds"])
    shared = [layout for layout in _TITLES if any(key[:2] == (layout, TORCH) for key in samples.rounds)]
    rows = [["", "side", "ms", "tokens/s", "speedup", "torch took"]]
    for layout in shared:
        theirs = next(key for key in samples.rounds if key[:2] == (layout, TORCH))
        for key in sorted(one for one in samples.rounds if one[0] == layout):
            _, side, lane = key
            median = samples.median(key)
            rows.append(
                [
                    _TITLES[layout],
                    side if lane == "none" else f"{side} {lane}",
                    _millis(median),
                    _rate(tokens, median),
                    format_ratio(_inverse(samples.ratio(key, (ALONE, side, "none")))),
                    "" if side == TORCH else format_ratio(samples.ratio(theirs, key)),
                ]
            )
    return markdown(rows) if len(rows) > 1 else []


def find_faults(figures: Figures) -> list[str]:
    """Return what is not as it must be: schedules off the table, wrong values, losses that do not agree."""
    faults = []
    for _, record in figures.of("schedule"):
        for name in ("table", "simulated"):
            if record[name] is not None and tuple(record[name]) != tuple(record["measured"]):
                title = _schedule_title(record)
                faults.append(f"{title}: expected {_over(record[name])} ({name}), got {_over(record['measured'])}")
    for _, record in figures.of("zero"):
        if record["wrong"]:
            faults.append(f"ZeRO {record['stage']} over {record['lane']}: {record['wrong']} values are wrong")
    return faults + _diverging(record for _, record in figures.of("train"))


def _diverging(records: Iterable[Record]) -> list[str]:
    """All sides start with the same values and see the same batches: their last losses agree."""
    expected: float | None = None
    faults = []
    for record in records:
        loss = float(record["losses"][-1])
        expected = loss if expected is None else expected
        if not abs(loss - expected) <= _CLOSE * abs(expected):
            faults.append(
                f"{record['side']} {record['layout']}: expected a last loss of {expected:.6f}, got {loss:.6f}"
            )
    return faults


def _inverse(ratio: float | None) -> float | None:
    return 1.0 / ratio if ratio else None


def _size(size: int) -> str:
    return f"{size / 1e6:g} MB" if size >= 1_000_000 else f"{size / 1e3:g} kB"


def _micros(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:,.0f}"


def _millis(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}" if seconds < 1.0 else f"{seconds * 1e3:,.0f}"


def _megabytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f}"


def _rate(tokens: int, seconds: float | None) -> str:
    return "-" if not seconds else f"{tokens / seconds:,.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
