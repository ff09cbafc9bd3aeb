"""One launch, as far as one host is concerned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncpar.launch.job_certificates import JobCertificates
from asyncpar.launch.options import LaunchOptions
from asyncpar.launch.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that an agent needs to know; ``environment`` is what its ranks inherit.

    ``certificates`` None: what hosts tell each other is authenticated by the secret, but not encrypted.
    """

    options: LaunchOptions
    site: Site
    command: tuple[str, ...]
    log_directory: Path | None
    environment: Mapping[str, str]
    certificates: JobCertificates | None = None
