"""Checkpoints: each rank saves its part, atomically; ranks in any other layout load the parts that they need.

``save`` and ``load`` take plain nested dictionaries of arrays, equal on all ranks except ``PerRank`` values;
``save_checkpoint`` and ``load_checkpoint`` take pieces of arrays, for experts.  All are called by all ranks of a
communicator, or by a process alone; ``latest`` inspects a folder.  ``asyncpar.checkpoint.blocking`` has ``save`` and
``load`` for blocking programs.  The format is described in ``asyncpar.checkpoint.manifest``.
"""

from asyncpar.checkpoint import blocking
from asyncpar.checkpoint.files import FileSystem, LocalFiles, NewFile
from asyncpar.checkpoint.folder import Found, latest
from asyncpar.checkpoint.loading import Loaded, load_checkpoint
from asyncpar.checkpoint.piece import Piece, Wanted
from asyncpar.checkpoint.saving import Saved, save_checkpoint
from asyncpar.checkpoint.tree import PerRank
from asyncpar.checkpoint.values import Checkpoint, load, save
from asyncpar.core.config.slicing import TensorSlice

__all__ = [
    "Checkpoint",
    "FileSystem",
    "Found",
    "Loaded",
    "LocalFiles",
    "NewFile",
    "PerRank",
    "Piece",
    "Saved",
    "TensorSlice",
    "Wanted",
    "blocking",
    "latest",
    "load",
    "load_checkpoint",
    "save",
    "save_checkpoint",
]
