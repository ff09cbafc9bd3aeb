"""The sink ``opentelemetry``: metrics of all ranks through OpenTelemetry's SDK, sent by OTLP.

The destination is set by the standard variables, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from asyncpar import __version__
from asyncpar.observe.metrics import Metric, collect_histograms, collect_metrics, labels_of, split_histogram
from asyncpar.observe.summary import JobSummary


class OpenTelemetrySink:
    """Creates an observable instrument for each metric on its first occurrence."""

    def __init__(self, readers: Sequence[MetricReader] | None = None) -> None:
        """``readers`` None means one that exports by OTLP, as configured by the environment."""
        if readers is None:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

            readers = [PeriodicExportingMetricReader(OTLPMetricExporter())]
        self._readers = readers
        self._provider: MeterProvider | None = None
        self._latest: dict[str, Metric] = {}
        self._made: set[str] = set()

    def take(self, job: JobSummary) -> None:
        """Export the metrics of ``job`` next."""
        if self._provider is None:
            resource = Resource.create(
                {
                    "service.name": "asyncpar",
                    "service.instance.id": job.job,
                    "service.version": __version__,
                    "process.runtime.version": platform.python_version(),
                }
            )
            self._provider = MeterProvider(metric_readers=self._readers, resource=resource, shutdown_on_exit=False)
        histograms = (metric for one in collect_histograms(job.ranks) for metric in split_histogram(one))
        self._latest = {metric.name: metric for metric in (*collect_metrics(job.ranks), *histograms)}
        meter = self._provider.get_meter("asyncpar")
        for name, metric in self._latest.items():
            if name not in self._made:
                self._made.add(name)
                make: Any = meter.create_observable_counter if metric.is_counter else meter.create_observable_gauge
                make(f"asyncpar.{name}", callbacks=[self._observe(name)], unit=metric.unit, description=metric.help)

    def close(self, outcome: str) -> None:  # noqa: ARG002  # there is no metric for it
        """Export the last metrics, and end."""
        if self._provider is not None:
            self._provider.shutdown()

    def _observe(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            metric = self._latest.get(name)
            return [] if metric is None else [Observation(one.value, labels_of(metric, one)) for one in metric.samples]

        return observe
