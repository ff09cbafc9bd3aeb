"""The ranks of a pipeline that hold each virtual stage.  Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from asyncpar.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """``ranks[s]`` is the rank of virtual stage ``s``; each rank holds the same number of them, its *chunks*.

    The chunks of a rank are numbered in the order of the model.
    """

    ranks: tuple[int, ...]
    num_stages: int
    chunks: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        held = Counter[int]()
        chunks = list[int]()
        for rank in self.ranks:
            chunks.append(held[rank])
            held[rank] += 1
        counts = [held[rank] for rank in range(self.num_stages)]
        if not counts or min(counts) < 1 or max(counts) != min(counts) or sum(counts) != len(self.ranks):
            raise UsageError(
                f"ranks: expected each rank from 0 to {self.num_stages - 1} to hold equally many of the "
                f"{len(self.ranks)} virtual stages, got {dict(held)}"
            )
        object.__setattr__(self, "chunks", tuple(chunks))

    @classmethod
    def looped(cls, num_stages: int, num_model_chunks: int = 1) -> StageLayout:
        """Place a model that goes round the ranks ``num_model_chunks`` times, each time from first to last."""
        return cls(ranks=tuple(range(num_stages)) * num_model_chunks, num_stages=num_stages)

    @property
    def num_virtual_stages(self) -> int:
        return len(self.ranks)

    @property
    def num_model_chunks(self) -> int:
        return len(self.ranks) // self.num_stages

    def rank_of(self, virtual: int) -> int:
        """Return the rank that holds a virtual stage."""
        check_index("virtual", virtual, len(self.ranks))
        return self.ranks[virtual]

    def chunk_of(self, virtual: int) -> int:
        """Return the place of a virtual stage among those of its rank."""
        check_index("virtual", virtual, len(self.ranks))
        return self.chunks[virtual]

    def virtual_stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the virtual stages of a rank, by chunk."""
        check_index("rank", rank, self.num_stages)
        return tuple(virtual for virtual, holder in enumerate(self.ranks) if holder == rank)


def check_index(name: str, index: object, size: int) -> None:
    """Raise a UsageError unless ``index`` is one of 0 .. size - 1."""
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < size:
        raise UsageError(f"{name}: expected 0..{size - 1}, got {index!r}")
