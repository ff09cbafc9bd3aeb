"""Refusal of wrappers that require fixed ranks, in the worlds of an elastic job, and what to use in their place."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from asyncpar.errors import UsageError

_AVERAGING: Final = (
    'run the model itself on each of step.portions, then step.add(portion, gradients), step.reduce("mean") and '
    "step.update(optimizer, gradients); local steps are those of job.rounds"
)
_INSTEAD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "averaging": _AVERAGING,
        "replicas": f"make it without one, and {_AVERAGING}",
        "sharding": "use job.state(parameters, optimizer, zero=1), or 2, or 3",
    }
)


def refuse_fixed_ranks(what: str, use: str, *, generation: int) -> UsageError:
    """Return the error for ``what``, which requires fixed ranks in world ``generation``, with advice for ``use``."""
    return UsageError(
        f"{what}: expected ranks that stay, got those of generation {generation} of an elastic job, which others "
        f"follow; {_INSTEAD[use]}"
    )
