"""Update rules, and the optimizer that applies one to whole parameters.

``rule.py`` says what a rule is; ``sgd.py`` is the simplest.
"""

from asyncpar.nn.optimizers.adam import Adam, AdamW
from asyncpar.nn.optimizers.norm import all_finite, clip_factor, combined, squared_norm
from asyncpar.nn.optimizers.optimizer import Optimizer, distinct
from asyncpar.nn.optimizers.rule import Rule
from asyncpar.nn.optimizers.sgd import SGD
from asyncpar.nn.optimizers.stretch import MASTER, Stretch

__all__ = [
    "MASTER",
    "SGD",
    "Adam",
    "AdamW",
    "Optimizer",
    "Rule",
    "Stretch",
    "all_finite",
    "clip_factor",
    "combined",
    "distinct",
    "squared_norm",
]
