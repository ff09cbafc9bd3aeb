"""Gradient synchronization: buckets in backward order, packed, encoded, reduced, decoded and unpacked.

Read ``plan.py``, then ``phases.py``, then ``flow.py`` and ``step.py``; ``synchronizer.py`` puts them together.
"""

from asyncpar.gradsync.config import GradientBucketingConfig, GradientCompressionConfig
from asyncpar.gradsync.plan import Bucket, BucketPlan, GradientSpec, Slot, plan_buckets
from asyncpar.gradsync.statistics import SyncStatistics
from asyncpar.gradsync.step import SyncStep
from asyncpar.gradsync.synchronizer import GradientSynchronizer

__all__ = [
    "Bucket",
    "BucketPlan",
    "GradientBucketingConfig",
    "GradientCompressionConfig",
    "GradientSpec",
    "GradientSynchronizer",
    "Slot",
    "SyncStatistics",
    "SyncStep",
    "plan_buckets",
]
