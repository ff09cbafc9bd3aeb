"""Parts of training programs: text, batches, training loops, and plots."""

from asyncpar.train.hybrid import Checkpoints, HybridTrainer
from asyncpar.train.language_model import Batches, LanguageModel, TrainingConfig, split_rows
from asyncpar.train.options import (
    is_hybrid,
    make_checkpoints,
    make_compression,
    make_config,
    make_layout,
    parse_arguments,
)
from asyncpar.train.parallel_layout import ParallelLayout, Recompute
from asyncpar.train.replica import StepReport
from asyncpar.train.session import HybridSession, ReplicatedSession, Session
from asyncpar.train.setup import ModeKind, Setup, Trainer, TrainingMode, make_trainer, parse_mode
from asyncpar.train.summary import (
    Expectation,
    Summary,
    compare,
    compression_ratio,
    encoded_ratio,
    expect,
    find_fault,
    plot_losses,
)
from asyncpar.train.texts import Texts, evaluate, make_texts, read_corpus, standard_library_text
from asyncpar.train.trainers import DataParallelTrainer, FreeTrainer, LocalTrainer

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
    "parse_arguments",
    "parse_mode",
    "plot_losses",
    "read_corpus",
    "split_rows",
    "standard_library_text",
]
