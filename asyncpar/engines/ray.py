"""``ap.ray``: ranks in the placement groups of a Ray cluster: ``launch`` and ``run``, and backends for Ray's libraries.

``AsyncparConfig`` is the backend of Ray Train; ``register_collective_backend`` adds that of ``ray.util.collective``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from asyncpar.engines.awaited_arguments import with_values
from asyncpar.engines.blocking_run import make_run
from asyncpar.engines.job import JobOptions, make_spec, run_job
from asyncpar.engines.output import Console
from asyncpar.errors import UsageError

if TYPE_CHECKING:
    from asyncpar.engines.ray_engine import RayEngine


async def launch(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    placement: str = "PACK",
    resources: Mapping[str, float] | None = None,
    console: Console | None = None,
    **options: Unpack[JobOptions],
) -> list[Any]:
    """Run ``function(*arguments)`` in ``ranks`` processes on a Ray cluster; return their results in order of ranks.

    Each has a bundle of ``resources`` (one CPU), ``per_place`` of them together; ``placement`` is Ray's strategy for
    bundles.  In ``function``, ``asyncpar.init()`` joins the world of these ranks.  ``console`` takes output and
    progress (None: printed).
    Raises as ``ap.cluster.launch`` does; an actor of Ray that dies is a ``PeerLost`` for each of its ranks.
    """
    engine = _engine(placement, resources)
    function, arguments = await with_values(function, arguments)
    spec = make_spec(function, arguments, ranks=ranks, pickle=True, **options)
    return await run_job(engine, spec, console)


run = make_run(launch)


def register_collective_backend() -> None:
    """Register the backend ``"asyncpar"`` with ``ray.util.collective`` in this process.  Idempotent.

    Ray requires that in the driver and in every actor of a group: call it in both, or let Ray call it in all workers,
    by ``ray.init(runtime_env={"worker_process_setup_hook": ap.ray.register_collective_backend})``.  Then
    ``create_collective_group(actors, ..., backend="asyncpar")`` and ``init_collective_group`` accept it.  Actors of a
    group reach each other on any port.  Raises ``UsageError`` where ray is not installed, or lacks the registration
    (before 2.55).
    """
    try:
        from asyncpar.engines.ray_collective import register
    except ImportError as error:
        raise _missing(error) from error
    register()


def __getattr__(name: str) -> Any:
    """Return the configuration of the backend of Ray Train, which imports ray.

    Raises ``UsageError`` where ray is not installed.
    """
    if name == "AsyncparConfig":
        try:
            from asyncpar.engines.ray_train import AsyncparConfig
        except ImportError as error:
            raise _missing(error) from error
        return AsyncparConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _engine(placement: str, resources: Mapping[str, float] | None) -> RayEngine:
    """Return the engine.  Raises ``UsageError`` where ray is not installed."""
    try:
        from asyncpar.engines.ray_engine import RayEngine
    except ImportError as error:
        raise _missing(error) from error
    return RayEngine(placement=placement, resources=resources)


def _missing(error: ImportError) -> UsageError:
    return UsageError(f"ray: it cannot be imported ({error}); pip install 'asyncpar[ray]'")
