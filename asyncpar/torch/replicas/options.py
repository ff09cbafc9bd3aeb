"""Arguments of torch's DistributedDataParallel that have a single possible value here.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asyncpar.errors import UsageError

_OTHER_DEVICES: Final = "leave it out, as the module is in the CPU's memory, or use torch's class for other devices"

ONLY_VALUES: Final[Mapping[str, tuple[Any, str]]] = {
    "device_ids": (None, _OTHER_DEVICES),
    "output_device": (None, _OTHER_DEVICES),
    "dim": (0, "leave it out: nothing is scattered over devices"),
    "check_reduction": (False, "leave it out: every step is checked on all ranks"),
    "gradient_as_bucket_view": (True, "leave it out, as gradients are always views, or use torch's class"),
    "delay_all_reduce_named_params": (None, "leave it out, or use torch's class"),
    "param_to_hook_all_reduce": (None, "leave it out, or use torch's class"),
    "mixed_precision": (None, "run the forward under torch.autocast, or use torch's class"),
    "device_mesh": (None, "pass process_group=device_mesh.get_group()"),
    "skip_all_reduce_unused_params": (False, "leave it out, or use torch's class"),
    "batched_grad_copy": (False, "leave it out: gradients are not copied into buckets one by one"),
    "bucket_cap_mb_list": (None, "pass bucket_cap_mb, or use torch's class"),
}
"""The value of each argument, and the alternative to passing another."""


def check_only_values(given: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for the first of the arguments ``given`` that has another value than its only one.

    Empty sequences count as None, as in torch's class.
    """
    for name, value in given.items():
        wanted, advice = ONLY_VALUES[name]
        is_empty = wanted is None and isinstance(value, list | tuple) and not value
        if not is_empty and (type(value) is not type(wanted) or value != wanted):
            raise UsageError(f"{name}: expected {wanted}, got {value!r}; {advice}")
