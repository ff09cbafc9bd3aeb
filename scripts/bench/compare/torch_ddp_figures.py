"""Results of ``torch_ddp.py``: tables, verdicts and faults.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scripts.bench.compare.comparison import GLOO, OURS
from scripts.bench.compare.torch_ddp_options import ZERO_COPY
from scripts.bench.rounds import Figures, Key, Record, Samples
from scripts.bench.tables import format_ratio, format_size, format_time, markdown

NATIVE = "native"
"""asyncpar from asyncio, without torch (`asyncpar bench`)."""

WANTED_RATIO = 3.0
WANTED_EXPOSED = {"2": 0.4, "4": 0.5}
"""By the number of ranks of this host."""

WANTED_CODED = 0.25
"""Between hosts, with a codec."""

WANTED_ADDED = 15e-6
_CLOSE, _CLOSE_CODED = 1e-4, 2e-2
_SMALL = 4
_PARTS = ("step", "compute", "exposed", "alone")


def _calls(figures: Figures) -> Samples:
    """Return seconds by ranks, operation, size and side (``asyncpar int8``: with that codec)."""
    return figures.samples("call", ("ranks", "op", "size", "side"), "seconds")


def _steps(figures: Figures) -> Samples:
    """Return seconds by what, where, ranks, model, side and part of a step."""
    samples = Samples()
    for turn, record in figures.of("ddp", "fsdp"):
        for part in _PARTS:
            if part in record:
                samples.add(turn, (*_case(record), record["side"], part), record[part])
    return samples


def _cases(figures: Figures) -> list[tuple[Key, list[str]]]:
    """Return what was trained, and on which sides, in the order in which it came."""
    found: dict[Key, dict[str, None]] = {}
    for _, record in figures.of("ddp", "fsdp"):
        found.setdefault(_case(record), {})[record["side"]] = None
    return [(case, sorted(sides, key=lambda side: (side != GLOO, side))) for case, sides in found.items()]


def _case(record: Record) -> Key:
    return record["what"], record["where"], str(record["ranks"]), record["model"]


def call_tables(figures: Figures) -> list[str]:
    """Return a table for each number of ranks: microseconds of calls through torch, and of asyncpar without it."""
    samples = _calls(figures)
    lines: list[str] = []
    for ranks in dict.fromkeys(key[0] for key in samples.rounds):
        rows = [["", "asyncpar (us)", "Gloo (us)", "Gloo / asyncpar", "without torch (us)", "torch adds (us)"]]
        for op, size in dict.fromkeys(key[1:3] for key in samples.rounds if key[0] == ranks):
            if op == "nothing":
                continue
            ours, theirs = (ranks, op, size, OURS), (ranks, op, size, GLOO)
            native = (ranks, _native_op(op), size, NATIVE)
            rows.append(
                [
                    f"{_TITLES.get(op, op)}, {format_size(int(size))}",
                    format_time(samples.median(ours)),
                    format_time(samples.median(theirs)),
                    format_ratio(samples.ratio(theirs, ours)),
                    format_time(samples.median(native)),
                    format_time(_difference(samples, ours, native)),
                ]
            )
        lines += [f"calls, {ranks} ranks:", "", *markdown(rows), ""]
    return lines


_TITLES = {"async": "all_reduce, async and wait"}


def _native_op(op: str) -> str:
    return "all_reduce" if op == "async" else op


def _difference(samples: Samples, first: Key, second: Key) -> float | None:
    ours, theirs = samples.median(first), samples.median(second)
    return None if ours is None or theirs is None else ours - theirs


def step_table(figures: Figures) -> list[str]:
    """Return a row for each model, place and side; milliseconds, ratios of Gloo in the same round to it."""
    samples = _steps(figures)
    rows = [["", "step (ms)", "without comm.", "exposed", "Gloo / it", "comm. alone", "Gloo / it"]]
    for case, sides in _cases(figures):
        for side in sides:
            medians = [samples.median((*case, side, part)) for part in _PARTS]
            exposed, alone = (
                format_ratio(samples.ratio((*case, GLOO, part), (*case, side, part))) if side != GLOO else ""
                for part in ("exposed", "alone")
            )
            step, compute, shown, pure = map(_millis, medians)
            rows.append([_title(case, side), step, compute, shown, exposed, pure, alone])
    return [*markdown(rows), ""] if len(rows) > 1 else []


def _title(case: Sequence[str], side: str) -> str:
    what, where, ranks, model = case
    title = {"ddp": "DDP", "fsdp": "FSDP2"}[what]
    return f"{title} {model}, {ranks} ranks{'' if where == 'host' else f', {where}'}: {side}"


def _millis(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Something that was to be reached, and whether it was."""

    text: str
    is_reached: bool

    def __str__(self) -> str:
        return f"{self.text}: {'ok' if self.is_reached else 'short'}"


def judge(figures: Figures) -> list[Verdict]:
    """Return a verdict on each thing that was to be reached and was measured."""
    return [*_judge_ddp(figures), *_judge_zero_copy(figures), *_judge_calls(figures)]


def _judge_ddp(figures: Figures) -> Iterator[Verdict]:
    samples = _steps(figures)
    for case, _ in _cases(figures):
        if case[:2] != ("ddp", "host"):
            continue
        for part, name in (("alone", "communication alone"), ("exposed", "exposed communication")):
            ratio = samples.ratio((*case, GLOO, part), (*case, OURS, part))
            if ratio is not None:
                text = (
                    f"DDP {case[3]}, {case[2]} ranks, {name}: Gloo takes {ratio:.2f}x as long, {WANTED_RATIO:g}x wanted"
                )
                yield Verdict(text=text, is_reached=ratio >= WANTED_RATIO)


def _judge_zero_copy(figures: Figures) -> Iterator[Verdict]:
    samples = _steps(figures)
    for case, sides in _cases(figures):
        for side in sides:
            is_here, is_coded = case[1] == "host", side.startswith(f"{ZERO_COPY} ")
            wanted = WANTED_EXPOSED.get(case[2]) if is_here else WANTED_CODED if is_coded else None
            ratio = samples.ratio((*case, side, "exposed"), (*case, GLOO, "exposed"))
            if side.startswith(ZERO_COPY) and wanted is not None and ratio is not None:
                text = (
                    f"{_title(case, side)} takes {ratio:.2f} of Gloo's time in exposed communication, {wanted:g} wanted"
                )
                yield Verdict(text=text, is_reached=ratio <= wanted)


def _judge_calls(figures: Figures) -> Iterator[Verdict]:
    samples = _calls(figures)
    for ranks in dict.fromkeys(key[0] for key in samples.rounds):
        native = (ranks, "all_reduce", str(_SMALL), NATIVE)
        own = samples.median((ranks, "nothing", str(_SMALL), OURS))
        for op in ("all_reduce", "async"):
            added = _difference(samples, (ranks, op, str(_SMALL), OURS), native)
            if added is not None and own is not None:
                text = (
                    f"{_TITLES.get(op, op)} of {_SMALL} B, {ranks} ranks: the binding adds "
                    f"{(added - own) * 1e6:.1f} us, torch itself {own * 1e6:.1f} us; "
                    f"at most {WANTED_ADDED * 1e6:g} us wanted"
                )
                yield Verdict(text=text, is_reached=added - own <= WANTED_ADDED)


def find_faults(figures: Figures) -> list[str]:
    """Return what is wrong: elements of results, and losses that differ between sides."""
    faults = []
    expected: dict[tuple[str, str], float] = {}
    for _, record in figures.records:
        if record["what"] == "call":
            if record["wrong"]:
                faults.append(
                    f"{record['side']} {record['op']} of {record['size']} B: {record['wrong']} wrong elements"
                )
            continue
        loss = float(record["losses"][-1])
        # the batches, and so the losses, are those of a number of ranks: the same ones for DDP and FSDP
        wanted = expected.setdefault((str(record["ranks"]), record["model"]), loss)
        close = _CLOSE if record["side"] in (OURS, GLOO, ZERO_COPY) else _CLOSE_CODED
        if not abs(loss - wanted) <= close * abs(wanted):
            faults.append(f"{_title(_case(record), record['side'])}: expected a loss of {wanted:.6f}, got {loss:.6f}")
    return faults
