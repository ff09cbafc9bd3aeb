"""What training programs share: text, batches, training loops, progress, and plots."""

from asyncpar.train.batches import Batches, split_rows
from asyncpar.train.corpus import read_corpus, standard_library_text
from asyncpar.train.data_parallel import DataParallelTrainer
from asyncpar.train.expectation import Expectation, encoded_ratio, expect
from asyncpar.train.free_running import FreeTrainer
from asyncpar.train.hybrid import Checkpoints, HybridTrainer
from asyncpar.train.language_model import LanguageModel, TrainingConfig
from asyncpar.train.local_steps import LocalTrainer
from asyncpar.train.mode import ModeKind, TrainingMode, parse_mode
from asyncpar.train.options import (
    is_hybrid,
    make_checkpoints,
    make_compression,
    make_config,
    make_layout,
    parse_arguments,
)
from asyncpar.train.parallel_layout import ParallelLayout, Recompute
from asyncpar.train.plot import plot_losses
from asyncpar.train.progress import Progress, open_progress
from asyncpar.train.replica import StepReport
from asyncpar.train.session import HybridSession, ReplicatedSession, Session
from asyncpar.train.setup import Setup, Trainer, make_trainer
from asyncpar.train.summary import Summary, compare, compression_ratio, find_fault
from asyncpar.train.texts import Texts, evaluate, make_texts

__all__ = [
    "Batches",
    "Checkpoints",
    "DataParallelTrainer",
    "Expectation",
    "FreeTrainer",
    "HybridSession",
    "HybridTrainer",
    "LanguageModel",
    "LocalTrainer",
    "ModeKind",
    "ParallelLayout",
    "Progress",
    "Recompute",
    "ReplicatedSession",
    "Session",
    "Setup",
    "StepReport",
    "Summary",
    "Texts",
    "Trainer",
    "TrainingConfig",
    "TrainingMode",
    "compare",
    "compression_ratio",
    "encoded_ratio",
    "evaluate",
    "expect",
    "find_fault",
    "is_hybrid",
    "make_checkpoints",
    "make_compression",
    "make_config",
    "make_layout",
    "make_texts",
    "make_trainer",
    "open_progress",
    "parse_arguments",
    "parse_mode",
    "plot_losses",
    "read_corpus",
    "split_rows",
    "standard_library_text",
]
