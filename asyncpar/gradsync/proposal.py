"""What a rank is about to do in a step, as it tells the others."""

from __future__ import annotations

from collections.abc import Mapping

from asyncpar.gradsync.agreement import Agreement, Lines, digest_of
from asyncpar.gradsync.groups import ENDS, EVERYONE, REPLICAS, SLICES, SyncGroups
from asyncpar.gradsync.keys import Keys
from asyncpar.gradsync.layout import Layout


def propose(
    groups: SyncGroups, keys: Keys, layout: Layout, *, number: int, micro_steps: int, is_observed: bool
) -> Agreement:
    """Return the comparison of a step, which is the ``number``-th, with what all other ranks are about to do."""
    order = "known" if is_observed else "unknown"
    step = (f"step {number} of {micro_steps} micro-steps, order of gradients {order}",)
    if groups.is_data_parallel_only:
        digest = digest_of((*step, layout.digest.hex()))
        return _compare(groups, keys, {REPLICAS: (*step, *layout.lines)}, {REPLICAS: digest})
    lines = {EVERYONE: (*step, *layout.settings), REPLICAS: layout.lines, SLICES: layout.replicated, ENDS: layout.tied}
    return _compare(groups, keys, lines, {REPLICAS: layout.digest})


def propose_to_measure(groups: SyncGroups, keys: Keys) -> Agreement:
    """Return the comparison by which ranks find out whether all of them have yet to measure for ``"auto"``."""
    return _compare(groups, keys, dict.fromkeys(groups.partitions, ("the codec auto, not measured yet",)), {})


def refuse(groups: SyncGroups, keys: Keys, error: BaseException) -> Agreement:
    """Return the comparison by which all others learn that this rank cannot take the step."""
    line = (f"an error: {error}",)
    return _compare(groups, keys, dict.fromkeys(groups.partitions, line), {})


def _compare(groups: SyncGroups, keys: Keys, lines: Lines, digests: Mapping[str, bytes]) -> Agreement:
    return Agreement(
        groups.everyone,
        groups.partitions,
        lines,
        digests=digests,
        key=keys.agreement,
        rare=keys.rare,
        epoch=keys.epoch,
    )
