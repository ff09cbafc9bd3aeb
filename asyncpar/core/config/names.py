"""Names that are arguments, as type checkers know them.

A wrong name is a type error: ``comm.all_reduce(x, "summ")``.  ``Name`` is the way to write one that is in no list here,
as it is registered or was read from somewhere: ``ap.init(transport=ap.Name("my_lanes.ring:KIND"))``.  All of them are
plain texts, which are checked again when they are used.
"""

from __future__ import annotations

from typing import Literal, NewType, TypeAlias

Name = NewType("Name", str)
"""A name that type checkers do not know: one that a program has registered, or has read."""

ReduceOp: TypeAlias = Literal["sum", "mean", "prod", "min", "max", "band", "bor", "bxor"] | Name
"""What values of all ranks are combined by."""

LaneName: TypeAlias = Literal["shm", "tcp", "grpc"] | Name
"""A kind of lane between two processes."""
