"""Prometheus at the agent of a host: ``/metrics`` with the ranks of that host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.observe.metrics import collect_metrics, labels_of
from asyncpar.observe.summary import RankReport

Source = Callable[[], Iterable[RankReport]]


class RankCollector(Collector):
    """Reads ``source`` when Prometheus asks."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return nothing: a registry need not ask ranks when it learns of this collector."""
        return []

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for metric in collect_metrics(self._source()):
            make = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            labels = ["rank", "host", "op", "group"] if metric.by_operation else ["rank", "host"]
            family = make(f"asyncpar_{metric.name}", metric.help, labels=labels)
            for sample in metric.samples:
                family.add_metric(list(labels_of(metric, sample).values()), sample.value)
            yield family


class MetricsServer:
    """Serves ``http://host:port/metrics`` from a thread of its own, inside ``with``; ``port`` 0 is any free one."""

    def __init__(self, host: str, port: int, source: Source) -> None:
        self._host, self._port = host, port
        self._registry = CollectorRegistry()
        self._registry.register(RankCollector(source))

    def __enter__(self) -> MetricsServer:
        """Begin to serve.  Raises ``UsageError`` when the address cannot be bound."""
        try:
            self._server, self._thread = start_http_server(self._port, self._host, registry=self._registry)
        except OSError as error:
            where = f"{self._host}:{self._port}"
            raise UsageError(f"--metrics: {where} cannot be bound ({os_reason(error)})") from error
        self._port = self._server.server_port
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}/metrics"
