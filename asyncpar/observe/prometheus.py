"""Prometheus endpoint of a host's agent: ``/metrics`` with the ranks of that host.

Each connection is served by a thread.  Clients are not authenticated, so all of them are strangers: they are bounded in
number and in time.
"""

from __future__ import annotations

import logging
import platform
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from asyncpar import __version__
from asyncpar.core.addresses import join_address
from asyncpar.core.concurrency.doorkeeper import STRANGER_SECONDS, PendingConnections, stranger_places
from asyncpar.core.descriptors import is_exhausted, is_reserved
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.observe.durations import BOUNDS, cumulate
from asyncpar.observe.metrics import collect_histograms, collect_metrics, labels_of
from asyncpar.observe.summary import RankReport

Source = Callable[[], Iterable[RankReport]]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily

_POLL_SECONDS: Final = 0.5
_FULL_SECONDS: Final = 0.1
_log = logging.getLogger(__name__)


class RankCollector(Collector):
    """Reads ``source`` on each scrape of Prometheus."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return nothing, so that a registry need not ask ranks when it learns of this collector."""
        return []

    def collect(self) -> Iterator[Family]:
        reports = list(self._source())
        yield _describe_build()
        for metric in collect_metrics(reports):
            make = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            labels = ["job_name", "rank", "host", *(["op", "group"] if metric.by_operation else [])]
            family = make(f"asyncpar_{metric.name}", metric.help, labels=labels)
            for sample in metric.samples:
                family.add_metric(list(labels_of(metric, sample).values()), sample.value)
            yield family
        for histogram in collect_histograms(reports):
            buckets = [*map(floatToGoString, BOUNDS), "+Inf"]
            shown = HistogramMetricFamily(
                f"asyncpar_{histogram.name}", histogram.help, labels=["job_name", "rank", "host", "op"]
            )
            for one in histogram.samples:
                counts = list(zip(buckets, map(float, cumulate(one.counts)), strict=True))
                shown.add_metric(list(one.labels.values()), counts, one.seconds)
            yield shown


def _describe_build() -> InfoMetricFamily:
    build = {"version": __version__, "python": platform.python_version()}
    return InfoMetricFamily("asyncpar_build", "Versions of asyncpar and Python on this host.", value=build)


class _QuietHandler(WSGIRequestHandler):
    """Answers one request, and logs none."""

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002 - the name of the base class


class _BoundedServer(ThreadingMixIn, WSGIServer):
    """Server with a thread per connection, bounded in number, and in time to ``STRANGER_SECONDS``."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int) -> None:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._changed = threading.Lock()
        self._strangers = PendingConnections[socket.socket](random.SystemRandom())
        self._due: dict[socket.socket, float] = {}
        super().__init__((str(address[0]), int(address[1])), _QuietHandler)

    def server_bind(self) -> None:
        """Bind without asking a name server for this host's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if is_exhausted(error):
                time.sleep(_FULL_SECONDS)  # this is called again at once as long as a client waits
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Accept a connection, and shut another one down if that makes room; its thread closes it."""
        if is_reserved(request.fileno()):
            return False
        total, per_address = stranger_places()
        with self._changed:
            pushed = self._strangers.enter(request, limit=total, address=client_address[0], per_address=per_address)
            self._due[request] = time.monotonic() + STRANGER_SECONDS
            if pushed is not None:
                self._cut(pushed)
        return True

    def service_actions(self) -> None:
        """Cut off connections that have lasted too long."""
        now = time.monotonic()
        with self._changed:
            for request in [request for request, due in self._due.items() if due <= now]:
                self._cut(request)

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            self._strangers.leave(request)
            self._due.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the names of the base class
        _log.debug("a request of metrics from %s ended", client_address, exc_info=True)

    def end(self) -> None:
        """Stop serving, and end the threads of connections."""
        self.shutdown()
        self.server_close()
        with self._changed:
            for request in tuple(self._due):
                self._cut(request)

    def _cut(self, request: socket.socket) -> None:
        self._strangers.leave(request)
        self._due.pop(request, None)
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer has already left
            return


class MetricsServer:
    """Serves ``http://host:port/metrics`` from a thread of its own, inside ``with``; ``port`` 0 is any free one."""

    def __init__(self, host: str, port: int, source: Source) -> None:
        self._host, self._port = host, port
        self._registry = CollectorRegistry()
        self._registry.register(RankCollector(source))

    def __enter__(self) -> MetricsServer:
        """Start serving.  Raises ``UsageError`` when the address cannot be bound."""
        try:
            self._server = _BoundedServer(self._host, self._port)
        except OSError as error:
            where = join_address(self._host, self._port)
            raise UsageError(f"--metrics: {where} cannot be bound ({os_reason(error)})") from error
        self._server.set_app(make_wsgi_app(self._registry))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="asyncpar metrics", daemon=True
        )
        self._thread.start()
        self._port = self._server.server_port
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._server.end()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://{join_address(self._host, self._port)}/metrics"
