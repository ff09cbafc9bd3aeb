"""The picture of a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench.figures import trace_picture


def test_a_trace_becomes_a_picture(tmp_path: Path) -> None:
    ranks = [
        {
            "ph": "X",
            "pid": rank,
            "tid": 1,
            "name": f"forward {at}",
            "cat": "pipeline",
            "ts": at * 1e5 + rank,
            "dur": 5e4,
        }
        for rank in (0, 1)
        for at in range(10)
    ]
    ends = [{"ph": ph, "id": 1, "pid": pid, "tid": 1, "ts": ts} for ph, pid, ts in (("s", 0, 6e5), ("f", 1, 6.1e5))]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [*ranks, *ends]}))
    trace_picture.main([str(tmp_path / "t.json"), "-o", str(tmp_path / "t.png"), "--seconds", "0.3"])
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_without_operations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no operations"):
        trace_picture.draw([{"ph": "M", "pid": 0}], tmp_path / "t.png", 1.0)
