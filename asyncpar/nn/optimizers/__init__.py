"""Update rules, and the optimizer that applies one to whole parameters.

``rule.py`` defines the interface of rules; ``sgd.py`` is the simplest.
"""

from asyncpar.nn.optimizers.adam import Adam, AdamW
from asyncpar.nn.optimizers.early_step import EarlyStep
from asyncpar.nn.optimizers.flat_range import MASTER, FlatRange
from asyncpar.nn.optimizers.norm import all_finite, clip_factor, combined, squared_norm
from asyncpar.nn.optimizers.optimizer import Optimizer, distinct, restore_skipped, skipped_steps
from asyncpar.nn.optimizers.rule import Rule
from asyncpar.nn.optimizers.sgd import SGD

__all__ = [
    "MASTER",
    "SGD",
    "Adam",
    "AdamW",
    "EarlyStep",
    "FlatRange",
    "Optimizer",
    "Rule",
    "all_finite",
    "clip_factor",
    "combined",
    "distinct",
    "restore_skipped",
    "skipped_steps",
    "squared_norm",
]
