"""Checkpoints: each rank saves its part, atomically; ranks in any other layout load what they need of it.

``save_checkpoint`` and ``load_checkpoint`` are called by all ranks of a communicator; ``latest`` looks into a folder.
The format is described in ``asyncpar.checkpoint.manifest``.
"""

from asyncpar.checkpoint.files import FileSystem, LocalFiles, NewFile
from asyncpar.checkpoint.folder import Found, latest
from asyncpar.checkpoint.load import Loaded, load_checkpoint
from asyncpar.checkpoint.piece import Piece, Wanted
from asyncpar.checkpoint.save import Saved, save_checkpoint

__all__ = [
    "FileSystem",
    "Found",
    "Loaded",
    "LocalFiles",
    "NewFile",
    "Piece",
    "Saved",
    "Wanted",
    "latest",
    "load_checkpoint",
    "save_checkpoint",
]
