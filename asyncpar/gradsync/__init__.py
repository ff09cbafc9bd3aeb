"""Gradient synchronization: buckets in backward order, packed, encoded, reduced, decoded and unpacked.

Read ``plan.py``, then ``schemes/scheme.py`` and ``step.py``; ``synchronizer.py`` puts them together,
``layout_cache.py`` keeps layouts between steps.
"""

from asyncpar.gradsync.config import GradientBucketingConfig, GradientCompressionConfig, NonFinitePolicy
from asyncpar.gradsync.early_update import EarlyUpdate
from asyncpar.gradsync.groups import HostGroups
from asyncpar.gradsync.layout import least_bytes
from asyncpar.gradsync.plan import Bucket, BucketPlan, GradientSpec, Slot, plan_buckets
from asyncpar.gradsync.statistics import StepOutcome, SyncMemory, SyncStatistics
from asyncpar.gradsync.step import SyncStep
from asyncpar.gradsync.synchronizer import GradientSynchronizer
from asyncpar.gradsync.tuning import TuningConfig, TuningOutcome

__all__ = [
    "Bucket",
    "BucketPlan",
    "EarlyUpdate",
    "GradientBucketingConfig",
    "GradientCompressionConfig",
    "GradientSpec",
    "GradientSynchronizer",
    "HostGroups",
    "NonFinitePolicy",
    "Slot",
    "StepOutcome",
    "SyncMemory",
    "SyncStatistics",
    "SyncStep",
    "TuningConfig",
    "TuningOutcome",
    "least_bytes",
    "plan_buckets",
]
