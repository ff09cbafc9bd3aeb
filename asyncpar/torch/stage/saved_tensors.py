"""The memory that autograd keeps between the passes, as a list of blocks.

Theory of operation.  Autograd passes every tensor that it keeps to a hook, and keeps the result of the hook instead.
Here this is a note: the block of memory, or the parameter, that contains the tensor, and the position.  The blocks, one
for each piece of memory however many tensors it contains, are a list of numpy arrays beside the graph; the owner of
that list can count it, or write it to disk and pass back a copy.  Nothing is copied here.

For a parameter the note refers to the parameter, whose value autograd reads wherever it is then.  So sharded training
may release parameters between the passes and restore them elsewhere.  With hooks, autograd itself cannot detect whether
the tensors it kept were changed meanwhile; so the notes have the versions of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array

Blocks: TypeAlias = list[Array | None]


@dataclass(slots=True, eq=False)
class InBlock:
    """A tensor that is contained in a block."""

    block: int
    dtype: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_changed: bool = False
    is_needed_later: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class InTensor:
    """A view of a parameter or buffer; ``offset`` counts from the beginning of that."""

    tensor: torch.Tensor
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Itself:
    """A tensor that numpy cannot see, or without elements."""

    tensor: torch.Tensor
    version: int


Note: TypeAlias = InBlock | InTensor | Itself


class SavedTensors:
    """The notes of one forward pass; ``state`` are parameters and buffers."""

    def __init__(self, name: str, state: Iterable[torch.Tensor]) -> None:
        self._name = name
        self._state: dict[int, list[torch.Tensor]] = {}
        for one in state:
            self._state.setdefault(one.untyped_storage().data_ptr(), []).append(one)
        self._places: dict[int, int] = {}
        self._written: list[tuple[torch.Tensor, int, InBlock]] = []
        self._notes: list[InBlock] = []
        self._blocks: Blocks = []
        self._is_partial = False
        self._inside = 0

    # -- the forward pass ----------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Record the tensors that autograd keeps of operations in the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        for tensor, version, note in self._written:
            note.is_changed = tensor._version != version
            self._notes.append(note)
        self._written.clear()
        self._state.clear()
        self._places.clear()

    def take_blocks(self) -> Blocks:
        """Return the memory of all noted tensors and drop it here."""
        blocks, self._blocks = self._blocks, []
        return blocks

    def _pack(self, tensor: torch.Tensor) -> Note:
        plain = tensor.detach()  # so that no node refers to itself
        version = plain._version
        if not _is_plain(plain):
            return Itself(plain, version)
        storage = plain.untyped_storage()
        address = storage.data_ptr()
        size, stride, offset = tuple(plain.shape), plain.stride(), plain.storage_offset()
        owners = self._state.get(address)
        if owners is not None:
            for owner in owners:
                start = offset - owner.storage_offset()
                if owner.dtype == plain.dtype and 0 <= start < owner.numel():
                    return InTensor(owner, version, size, stride, start)
            return Itself(plain, version)
        place = self._places.get(address)
        if place is None:
            place = self._places[address] = len(self._blocks)
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self._blocks.append(whole.numpy())
        note = InBlock(place, plain.dtype, size, stride, offset)
        self._written.append((plain, version, note))
        return note

    # -- backward passes -----------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, blocks: Blocks) -> Iterator[None]:
        """Make autograd read the noted tensors from ``blocks``: those of ``take_blocks``, or equal ones."""
        self._blocks = blocks
        try:
            yield
        finally:
            self._blocks = []

    @contextmanager
    def reading_once(self, blocks: Blocks, later: Sequence[Any]) -> Iterator[None]:
        """Read like ``reading``; the nodes ``later`` will read their tensors again (see ``needed_later``)."""
        hooks = [
            hook for node in later for hook in (node.register_prehook(self._enter), node.register_hook(self._leave))
        ]
        self._is_partial = True
        try:
            with self.reading(blocks):
                yield
        finally:
            self._is_partial, self._inside = False, 0
            for hook in hooks:
                hook.remove()

    def needed_later(self, blocks: Blocks) -> Blocks:
        """Return ``blocks`` with None for those that are no longer needed."""
        needed = {note.block for note in self._notes if note.is_needed_later}
        return [block if place in needed else None for place, block in enumerate(blocks)]

    def _enter(self, _: object) -> None:
        self._inside += 1

    def _leave(self, _: object, __: object) -> None:
        self._inside -= 1

    def _unpack(self, note: Note) -> torch.Tensor:
        match note:
            case InBlock():
                return self._find(note)
            case InTensor(tensor=tensor):
                self._check(tensor._version == note.version)
                if _reach(note) > tensor.untyped_storage().nbytes() // tensor.itemsize:  # it is released
                    return torch.full((), math.nan, dtype=tensor.dtype).expand(note.size)
                return tensor.detach().as_strided(note.size, note.stride, tensor.storage_offset() + note.offset)
            case Itself(tensor=tensor):
                self._check(tensor._version == note.version)
                return tensor

    def _find(self, note: InBlock) -> torch.Tensor:
        self._check(not note.is_changed)
        if self._is_partial and not self._inside:
            note.is_needed_later = False
        block = self._blocks[note.block] if note.block < len(self._blocks) else None
        if block is None:
            raise UsageError(
                f"{self._name}: the tensors that forward saved serve one backward pass; this is the second"
            )
        width = note.dtype.itemsize
        cells = torch.from_numpy(block[: block.size // width * width]).view(note.dtype)
        return cells.as_strided(note.size, note.stride, note.offset)

    def _check(self, is_unchanged: bool) -> None:
        if not is_unchanged:
            raise UsageError(
                f"{self._name}: expected what backward needs to stay as it was, but it was changed in place after it "
                "was used"
            )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a numpy array can share the memory of ``tensor``."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


def _reach(note: InTensor) -> int:
    """Return the number of elements from the beginning of its tensor to the end of the view."""
    last = sum((length - 1) * step for length, step in zip(note.size, note.stride, strict=True))
    return note.offset + last + 1
