"""Choose the path of gradients on devices: plain NCCL, encoded on the device, or through pinned host memory."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.codecs import AnyCodec, Identity
from asyncpar.collectives.communicator import engine_of
from asyncpar.errors import UsageError
from asyncpar.gradsync.config import NonFinitePolicy
from asyncpar.gradsync.groups import SyncGroups
from asyncpar.gradsync.schemes.device_encoded import has_kernels
from asyncpar.gradsync.schemes.device_memory import DevicePlace

_LINE = "gradients"
"""Name of this line in the table of device arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWants:
    """Requirements of settings on gradients on devices.  ``by_hosts``: a codec is to work between hosts only."""

    codec: AnyCodec
    groups: SyncGroups
    policy: NonFinitePolicy
    as_views: bool
    by_hosts: bool

    def check(self) -> None:
        """Raise ``UsageError`` for settings that gradients on devices do not support."""
        what = "with gradients on devices"
        if self.as_views:
            raise UsageError(
                f"gradient_as_bucket_view: expected False {what}, which are copied on the device, got True"
            )
        if not isinstance(self.codec, Identity):
            return  # the host can do all of it
        if not self.groups.is_data_parallel_only:
            raise UsageError(f"config: expected data parallelism alone {what} and without a codec")
        if self.policy is NonFinitePolicy.DROP:
            raise UsageError(f"when_not_finite: expected abort or skip_step {what}, got drop")

    def is_staged(self, place: DevicePlace) -> bool:
        """Return whether gradients go through pinned host memory; record the path in the table, and log why staged."""
        name, libraries = self.codec.name, " and ".join(place.libraries)
        why = self._why_staged(place, libraries)
        way = f"{name}, encoded on the device by {libraries}" if why is None else f"{name}, staged: {why}"
        ways = engine_of(self.groups.replicas).device_ways
        ways.note(_LINE, "on the device" if isinstance(self.codec, Identity) else way)
        if why is not None:
            place.host.warn_once(f"gradients: through pinned memory of the host, where {name} works, because {why}")
        return why is not None

    def _why_staged(self, place: DevicePlace, libraries: str) -> str | None:
        """Return why a codec cannot work on the device; None if it can, or there is none."""
        if isinstance(self.codec, Identity):
            return None
        if not has_kernels(self.codec, place):
            return f"{libraries} has no {self.codec.name} on devices"
        if self.by_hosts or not self.groups.is_data_parallel_only:
            return "devices have data parallelism alone, not by hosts"
        return "devices have no policy drop" if self.policy is NonFinitePolicy.DROP else None
