"""What training programs share: text, batches, the data-parallel loop, progress, and plots."""

from asyncpar.train.batches import Batches, split_rows
from asyncpar.train.corpus import read_corpus, standard_library_text
from asyncpar.train.data_parallel import DataParallelTrainer, StepReport
from asyncpar.train.language_model import LanguageModel, TrainingConfig
from asyncpar.train.plot import plot_losses
from asyncpar.train.progress import Progress, open_progress
from asyncpar.train.summary import Summary, compare, compression_ratio, find_fault

__all__ = [
    "Batches",
    "DataParallelTrainer",
    "LanguageModel",
    "Progress",
    "StepReport",
    "Summary",
    "TrainingConfig",
    "compare",
    "compression_ratio",
    "find_fault",
    "open_progress",
    "plot_losses",
    "read_corpus",
    "split_rows",
    "standard_library_text",
]
