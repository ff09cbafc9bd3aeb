"""A report to show."""

from __future__ import annotations

from asyncpar.bench.report import BenchEnvironment, Measurement

SURROUNDINGS = BenchEnvironment(
    ranks=4, hosts=1, cores=2, lane="tcp", transport=None, version="1", python="3.11", numpy="2"
)
ROW = Measurement(
    operation="all_reduce",
    size=1000,
    count=250,
    type="float32",
    redop="sum",
    root=-1,
    time_us=10.0,
    minimum_us=9.0,
    p90_us=12.0,
    iterations=100,
    wrong=0,
    algorithm="ring",
    predicted_us=8.0,
    algbw=0.1,
    busbw=0.15,
)
