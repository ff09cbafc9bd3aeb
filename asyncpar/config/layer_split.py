"""How the layers of a model are dealt out to the virtual stages of a pipeline.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from asyncpar.errors import UsageError


def split_layers(num_layers: int, ranks: Sequence[int], given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage, in the order of the model.

    ``ranks[v]`` is the pipeline rank that holds virtual stage ``v``.  ``given`` None: equal numbers.  Otherwise it has
    one number per rank, which the virtual stages there share in parts that differ by one at most, or one per virtual
    stage.  Raises ``UsageError`` unless that comes out at ``num_layers`` with at least one in each.
    """
    virtual, stages = len(ranks), len(set(ranks))
    chunks = virtual // stages
    if given is None:
        return _split_evenly(num_layers, stages, chunks)
    if len(given) not in (stages, virtual) or sum(given) != num_layers or min(given) < 1:
        lengths = f"{stages}" if chunks == 1 else f"{stages} or {virtual}"
        raise UsageError(
            f"layers_per_stage: expected {lengths} positive numbers with sum {num_layers}, got {list(given)}"
        )
    if len(given) == virtual:
        return tuple(given)
    if min(given) < chunks:
        raise UsageError(
            f"layers_per_stage: expected at least {chunks} for each rank, which holds {chunks} pieces of the model, "
            f"got {list(given)}"
        )
    shares = [iter(spread_layers(count, chunks)) for count in given]
    return tuple(next(shares[rank]) for rank in ranks)


def spread_layers(num_layers: int, virtual_stages: int) -> tuple[int, ...]:
    """Return numbers of layers that differ by one at most, larger ones first: what to give where none divides.

    Raises ``UsageError`` when there are fewer layers than virtual stages.
    """
    each, rest = divmod(num_layers, virtual_stages)
    if not each:
        raise UsageError(f"num_layers: expected at least {virtual_stages}, one for each stage, got {num_layers}")
    return tuple(each + (stage < rest) for stage in range(virtual_stages))


def _split_evenly(num_layers: int, stages: int, chunks: int) -> tuple[int, ...]:
    virtual = stages * chunks
    of_what = f"pp_size = {stages}" if chunks == 1 else f"pp_size * num_model_chunks = {stages} * {chunks}"
    if num_layers < virtual:
        raise UsageError(f"num_layers: expected at least {of_what}, got {num_layers}")
    each, rest = divmod(num_layers, virtual)
    if rest:
        raise UsageError(
            f"num_layers: expected a multiple of {of_what}, got {num_layers}; give layers_per_stage to split unevenly"
        )
    return (each,) * virtual
