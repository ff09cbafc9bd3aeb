"""The sink ``kubeflow``: progress and figures of a job, for the status of its TrainJob in Kubeflow Trainer.

With the feature gate TrainJobStatus (Trainer 2.2 on), the controller gives pods three variables: an HTTPS address that
accepts the status by POST, the file of its certificate authority, and the file of a token, which is renewed every
hour.  Source: KEP-2779 and ``pkg/statusserver`` of https://github.com/kubeflow/trainer, version 2.3.
"""

from __future__ import annotations

import json
import logging
import math
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from asyncpar.errors import LaunchError, UsageError
from asyncpar.observe.sinks import KUBEFLOW_URL
from asyncpar.observe.summary import JobSummary, ProgressSummary

_AUTHORITY: Final = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_TOKEN: Final = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # the name of a variable
_EVERY: Final = 5.0
"""Minimum seconds between two posts, as in Kubeflow's own SDK; doubled after each failure, up to ``_SLOWEST``."""
_SLOWEST: Final = 60.0
_PATIENCE: Final = 10.0
_PASSING: Final = frozenset({403, 408, 429})
"""Temporary refusals, besides those from 500 on: an old token, an overloaded server."""
_MOST_METRICS: Final = 256
_LONGEST: Final = 64
_MOST_SECONDS: Final = 2**31 - 1
_log = logging.getLogger(__name__)


class KubeflowSink:
    """Posts the status every five seconds, and the last one at the end."""

    def __init__(
        self, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raise ``UsageError`` if Kubeflow has not set its variables."""
        for name in (KUBEFLOW_URL, _AUTHORITY, _TOKEN):
            if not environment.get(name):
                raise UsageError(f"{name}: expected to be set by Kubeflow Trainer (feature gate TrainJobStatus)")
        self._url = environment[KUBEFLOW_URL]
        if not self._url.startswith("https://"):
            raise UsageError(f"{KUBEFLOW_URL}: expected an https address, got {self._url!r}")
        self._authority, self._token = environment[_AUTHORITY], Path(environment[_TOKEN])
        self._clock = clock
        self._next, self._delay = clock(), _EVERY
        self._maker = StatusMaker()
        self._unsent: dict[str, Any] | None = None
        self._failure: Exception | None = None
        self._has_sent = False

    def take(self, job: JobSummary) -> None:
        """Post the status of ``job``, unless there is none or one was posted a moment ago."""
        status = self._maker.status_of(job)
        if status is None:
            return
        self._unsent = status
        if self._clock() >= self._next:
            self._post()

    def close(self, outcome: str) -> None:  # noqa: ARG002  # Kubernetes knows how pods ended
        """Post the status that was not posted yet.  Raises the error if no post ever arrived."""
        if self._unsent is not None:
            self._post()
        if self._failure is not None and not self._has_sent:
            raise self._failure

    def _post(self) -> None:
        """Post the pending status; temporary failures are logged, and others raised."""
        try:
            post_status(self._url, {"trainerStatus": self._unsent}, authority=self._authority, token=self._token)
        except urllib.error.HTTPError as error:
            with error:
                refusal = LaunchError(f"the status server answers {error.code}: {_message_of(error)}")
            if error.code < 500 and error.code not in _PASSING:
                raise refusal from error
            self._note(refusal)
        except OSError as error:  # no route, no name, no answer, no file, another certificate
            self._note(error)
        else:
            self._unsent, self._failure, self._has_sent, self._delay = None, None, True, _EVERY
        self._next = self._clock() + self._delay

    def _note(self, failure: Exception) -> None:
        if self._failure is None:
            _log.warning("kubeflow: the status of the job was not taken, and is tried again: %s", failure)
        self._failure, self._delay = failure, min(2 * self._delay, _SLOWEST)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Turns redirects into errors: they would send the token elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request to continue with."""


def post_status(url: str, request: dict[str, Any], *, authority: str, token: Path) -> None:
    """Post ``request`` with the current token of the file.  Raises ``OSError``, like all of ``urllib``."""
    context = ssl.create_default_context(cafile=authority)
    headers = {"Authorization": f"Bearer {token.read_text().strip()}", "Content-Type": "application/json"}
    posted = urllib.request.Request(url, data=json.dumps(request).encode(), headers=headers)
    opener = urllib.request.build_opener(_NoRedirects(), urllib.request.HTTPSHandler(context=context))
    with opener.open(posted, timeout=_PATIENCE):
        pass


def _message_of(error: urllib.error.HTTPError) -> str:
    """Return the message of a Kubernetes ``Status``, or whatever else there is."""
    text = error.read(4096).decode(errors="replace")
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or str(error.reason)


class StatusMaker:
    """Makes the status of jobs; tracks the speed of the task, to estimate the remaining time."""

    def __init__(self) -> None:
        self._task: tuple[str, float | None] | None = None
        self._begun, self._first, self._last = 0.0, 0.0, 0.0

    def status_of(self, job: JobSummary) -> dict[str, Any] | None:
        """Return the ``trainerStatus`` of ``job``, from the lowest rank that has one; None if none has."""
        summaries = [report.summary for report in job.ranks if report.summary is not None]
        progress = next((one.progress for one in summaries if one.progress is not None), None)
        values = next((one.values for one in summaries if one.values), {})
        if progress is None:
            return None
        figures = {**progress.fields, **{name: f"{value:.6g}" for name, value in values.items()}}
        metrics = [
            {"name": name[:_LONGEST], "value": value[:_LONGEST]} for name, value in figures.items() if name and value
        ]
        status: dict[str, Any] = {
            "lastUpdatedTime": datetime.fromtimestamp(job.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        }
        if progress.total is not None:
            status["progressPercentage"] = min(100, int(100 * progress.completed / progress.total))
            left = self._seconds_left(progress, progress.total, job.time)
            if left is not None:
                status["estimatedRemainingSeconds"] = left
        if metrics:
            status["metrics"] = metrics[:_MOST_METRICS]
        return status

    def _seconds_left(self, progress: ProgressSummary, total: float, now: float) -> int | None:
        task = progress.description, total
        if task != self._task or progress.completed < self._last:  # another task, or the same one again
            self._task, self._begun, self._first = task, now, progress.completed
        self._last = progress.completed
        if progress.completed >= total:
            return 0
        done, seconds = progress.completed - self._first, now - self._begun
        return (
            None
            if done <= 0 or seconds <= 0
            else min(_MOST_SECONDS, math.ceil((total - progress.completed) * seconds / done))
        )
