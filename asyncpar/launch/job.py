"""One launch on one host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncpar.launch.host_placement import HostPlacement
from asyncpar.launch.job_credentials import JobCertificates
from asyncpar.launch.options import LaunchOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """Settings of an agent; ``environment`` is inherited by its ranks.

    ``certificates`` None: traffic between hosts is authenticated by the secret, but not encrypted.
    """

    options: LaunchOptions
    placement: HostPlacement
    command: tuple[str, ...]
    log_directory: Path | None
    environment: Mapping[str, str]
    certificates: JobCertificates | None = None
