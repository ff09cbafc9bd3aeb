"""Lineages: the history of a state, members' states at the end of a world, and where survivors resume.  Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec

DIGEST_BYTES = 16
LINEAGE_BITS = 31


class Lineage(msgspec.Struct, frozen=True):
    """The history of a state: ``step`` steps are committed, and ``digest`` is that of the state and its history.

    The history enters the digest through the parents.
    """

    step: int
    digest: bytes

    def child(self, state: bytes) -> Lineage:
        """Return the lineage one step later, in which the digest of the state is ``state``."""
        return Lineage(self.step + 1, hashlib.blake2b(self.digest + state, digest_size=DIGEST_BYTES).digest())

    @property
    def word(self) -> int:
        """Bits of the digest that fit into a vote."""
        return int.from_bytes(self.digest[:4], "little") & ((1 << LINEAGE_BITS) - 1)

    def __str__(self) -> str:
        return f"step {self.step}, digest {self.digest.hex()[:12]}"


def first_lineage(state: bytes) -> Lineage:
    """Return the lineage of an initial state."""
    return Lineage(0, hashlib.blake2b(state, digest_size=DIGEST_BYTES).digest())


def differs_from_group(lineage: Lineage) -> str:
    """Return why a joining rank with ``lineage`` is refused by members with another one at the same step."""
    return f"its step {lineage.step - 1} has another digest than the group's; the program or its libraries differ"


class Decision(StrEnum):
    """The outcome of the step that was under way when a world ended."""

    ROLL_FORWARD = "roll forward"
    ABORT = "abort"


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a member at the end of its world.

    ``prepared`` is the result of its step under way, if the member has voted for it.  ``suspects`` are the ranks of the
    ended world that it considers lost, with the reason: hearsay, for agents that can observe processes.
    """

    generation: int
    lineage: Lineage
    prepared: Lineage | None = None
    suspects: tuple[tuple[int, str], ...] = ()


def target_step(reports: Sequence[MemberReport]) -> int:
    """Return the number of steps that are committed when survivors with these ``reports`` go on.

    If one has committed a step, all have voted for it, so all survivors can commit it, too.  Beyond that, a step is
    committed if each has prepared it: a lost rank may have committed it before.  Pure.
    """
    most = max(report.lineage.step for report in reports)
    if all(_has_reached(report, most + 1) for report in reports):
        return most + 1
    return most


def is_sound(reports: Sequence[MemberReport]) -> bool:
    """Return whether every one of ``reports`` can reach ``target_step``; anything else is a fault of the protocol."""
    target = target_step(reports)
    return all(_has_reached(report, target) for report in reports)


def lineage_at(report: MemberReport, step: int) -> Lineage | None:
    """Return the lineage of the sender of ``report`` at ``step``; None if it cannot reach it."""
    if report.lineage.step == step:
        return report.lineage
    if report.prepared is not None and report.prepared.step == step:
        return report.prepared
    return None


def _has_reached(report: MemberReport, step: int) -> bool:
    return report.lineage.step >= step or (report.prepared is not None and report.prepared.step >= step)
