"""Steps that begin without a comparison, because all ranks take them like the one before.

Theory of operation.  Ranks compare what they are about to do before they exchange gradients.  A step that has succeeded
on a rank was compared and taken by all of them, so in the next one nothing needs to be compared as long as nothing
changes.  A rank where something has changed (a step that failed, other gradients, a setting), or that refuses the step,
gives notice to all others before it compares.  A rank that receives the notice compares, too: it cancels the buckets
that it has begun, passes the notice on, begins a new epoch, and after the comparison it reduces the buckets again.

No bucket can be reduced meanwhile: every reduction needs all ranks, and the one that gave notice takes part in none
before the comparison.  So this is for steps in which all ranks reduce every bucket together, on the host, where a
second run does the same as the first.  No rank waits in a bucket for a rank that does not come: that one has given
notice, or has failed and closed the bucket.  A rank that cancels buckets because of a notice passes it on first, so the
others receive the notice before they learn of cancelled buckets, and do not take these for a failure.

A change that all ranks expect, such as the order of buckets after the first step, needs no notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from asyncpar.collectives.communicator import notice_of
from asyncpar.collectives.notice import GroupNotice
from asyncpar.gradsync.groups import Keys, SyncGroups
from asyncpar.gradsync.layout import BucketLayout
from asyncpar.gradsync.schemes.device import DeviceScheme

_MOST_RANKS: Final = 64
"""Limit of ranks, since a notice goes from every rank to every other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """Terms common to all ranks in a step, besides its number.  ``drawn_before``: the steps of earlier runs."""

    layout: bytes
    micro_steps: int
    is_observed: bool
    drawn_before: int


class SettingsCache:
    """The terms of the last step of a synchronizer, on which all ranks agreed, as far as they hold for the next one."""

    def __init__(self, groups: SyncGroups, keys: Keys) -> None:
        self._communicator = groups.everyone
        self._keys = keys
        self._is_possible = groups.is_data_parallel_only and 1 < groups.everyone.size <= _MOST_RANKS
        self._terms: StepTerms | None = None
        self._may_hold_elsewhere = False
        """Whether other ranks may begin the next step without a comparison."""
        self._last_epoch: int | None = None
        """The epoch of the last step that succeeded."""
        self._notice: GroupNotice | None = None

    def begin_step(self) -> None:
        """Start receiving changes of other ranks, which may have been announced before."""
        if self._communicator.size > 1:
            self._notice = notice_of(self._communicator, self._keys.changes)

    def end_step(self) -> None:
        """Stop receiving changes; idempotent."""
        if self._notice is not None:
            self._notice.close()
            self._notice = None

    def holds_for(self, terms: StepTerms) -> bool:
        """Decide whether the step needs no comparison; if it does because of this rank, give notice to the others."""
        if self._terms == terms and not self.has_changed:
            return True
        self.announce_change()
        return False

    def announce_change(self) -> None:
        """Give the other ranks notice to compare in this step, unless they do so anyway."""
        self._terms = None
        if self._notice is not None and self._may_hold_elsewhere and not self._notice.is_given:
            self._may_hold_elsewhere = False
            self._notice.give()
            self.begin_epoch()
        elif self.has_changed:
            self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin a new epoch, unless a failure has begun one since the last step that succeeded.

        All ranks that give or receive a notice do so.

        Thus a rank that is cancelled in the comparison closes buckets by the names that the others use after it.
        """
        if self._keys.epoch == self._last_epoch:
            self._keys.epoch += 1

    @property
    def has_changed(self) -> bool:
        """Whether another rank has announced a change."""
        return self._notice is not None and self._notice.is_given

    def on_change(self, cancel: Callable[[], None] | None) -> None:
        """Pass a change of another rank on and call ``cancel``, now if one was announced already; None: stop that."""
        notice = self._notice
        assert notice is not None, "a step of several ranks is under way"
        notice.on_given = None
        if cancel is None:
            return

        def pass_on() -> None:
            notice.give()
            cancel()

        if notice.is_given:
            pass_on()
        else:
            notice.on_given = pass_on

    def succeed(self, terms: StepTerms | None) -> None:
        """Apply ``terms`` to the next step; None: all ranks know that it takes a comparison."""
        self._terms = terms if self._is_possible else None
        self._may_hold_elsewhere = self._terms is not None
        self._last_epoch = self._keys.epoch

    def fail(self) -> None:
        """Require a comparison in the next step, which other ranks may not expect."""
        self._terms = None
        self._may_hold_elsewhere = self._is_possible

    def invalidate(self) -> None:
        """Require a comparison in the next step: a setting has changed here, and on all others if used correctly."""
        self._terms = None

    def restart(self) -> None:
        """Require a comparison in the next step, as all ranks know."""
        self._terms, self._may_hold_elsewhere, self._last_epoch = None, False, None


def can_repeat(layout: BucketLayout) -> bool:
    """Return whether the reduction of all buckets can be repeated within a step: on the host, with at least one."""
    is_on_device = layout.mirrors is not None or any(isinstance(scheme, DeviceScheme) for scheme in layout.schemes)
    return bool(layout.schemes) and not is_on_device
