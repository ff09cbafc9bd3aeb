"""Defects to plant in the code, one in each package, and the tests of the default suite that must then fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """In ``module``, ``right`` becomes ``wrong``; one of the tests at ``found_by`` must find it."""

    module: str
    right: str
    wrong: str
    found_by: str

    def __str__(self) -> str:
        return self.module.removesuffix(".py").replace("/", ".")


PLANTED = (
    Planted(
        module="actors/runtime/mailbox.py",
        right="queue.append(delivery)\n            return queue.popleft()",
        wrong="queue.append(delivery)\n            return queue.pop()",
        found_by="tests/actors/runtime",
    ),
    Planted(
        module="agreement/settings.py",
        right="if len(holders) > 1:",
        wrong="if len(holders) > 2:",
        found_by="tests/agreement",
    ),
    Planted(
        module="backends/compression.py",
        right="case CompressionKind.RANDOM if not 0 < self.ratio <= 1:",
        wrong="case CompressionKind.RANDOM if not 0 <= self.ratio <= 1:",
        found_by="tests/backends",
    ),
    Planted(
        module="blocking/pending.py",
        right="if not self.is_done:\n            self._loop.request(self._cancel_now)",
        wrong="if self.is_done:\n            self._loop.request(self._cancel_now)",
        found_by="tests/blocking/test_pending.py",
    ),
    Planted(
        module="checkpoint/spans.py",
        right="count = math.prod(part.view_shape[: part.dim])",
        wrong="count = math.prod(part.view_shape[: part.dim + 1])",
        found_by="tests/checkpoint",
    ),
    Planted(
        module="codecs/int8.py",
        right="_dequantize(part, scales[piece.blocks])\n                    x -= part",
        wrong="x -= part",
        found_by="tests/codecs",
    ),
    Planted(
        module="core/config/slicing.py",
        right="return min(part * step, count), min((part + 1) * step, count)",
        wrong="return part * step, min((part + 1) * step, count)",
        found_by="tests/core tests/tensors tests/zero",
    ),
    Planted(
        module="dashboard/states.py",
        right="return RankActivity.BLOCKED if is_blocked(report) else RankActivity.SILENT",
        wrong="return RankActivity.BLOCKED",
        found_by="tests/dashboard/test_states.py",
    ),
    Planted(
        module="elasticity/portions.py",
        right="start = rank * each + min(rank, more)",
        wrong="start = rank * each + more",
        found_by="tests/elasticity/test_portions.py",
    ),
    Planted(
        module="engines/machine.py",
        right="due if self._deadline is None else min(self._deadline, due)",
        wrong="due",
        found_by="tests/engines/test_machine.py",
    ),
    Planted(
        module="estimate/pipelining.py",
        right="rounds * (figures.ideal - earlier.ideal)",
        wrong="(rounds - 1) * (figures.ideal - earlier.ideal)",
        found_by="tests/estimate",
    ),
    Planted(
        module="gradsync/plan.py",
        right="limit = bucket_bytes if contents else first_bytes",
        wrong="limit = bucket_bytes",
        found_by="tests/gradsync/test_plan.py",
    ),
    Planted(
        module="hybrid/loss_scaling.py",
        right="self.skipped_steps += 1\n            self._steps_without_overflow = 0",
        wrong="self.skipped_steps += 1",
        found_by="tests/hybrid/test_loss_scaling.py",
    ),
    Planted(
        module="multinode/statistics.py",
        right='"gradient": 1.0 - owned_gradients,',
        wrong='"gradient": owned_gradients,',
        found_by="tests/multinode",
    ),
    Planted(
        module="hosts/restart_budget.py",
        right="while known[0] <= now - self.window:",
        wrong="while known[0] < now - 2 * self.window:",
        found_by="tests/launch/agents/test_slot_machines.py",
    ),
    Planted(
        module="net/transport/flow_control.py",
        right="self._consume(len(early.buffer))\n        _check_length(",
        wrong="_check_length(",
        found_by="tests/net/transport/test_inbox.py",
    ),
    Planted(
        module="nn/optimizers/adam.py",
        right="1.0 / (1.0 - self.beta2**step)",
        wrong="1.0 / (1.0 - self.beta1**step)",
        found_by="tests/nn",
    ),
    Planted(
        module="observe/stragglers.py",
        right="_NORMAL: Final = 1.4826",
        wrong="_NORMAL: Final = 148.26",
        found_by="tests/observe/test_stragglers.py",
    ),
    Planted(
        module="parallel/local/outer.py",
        right="common += mean\n    common *= -config.learning_rate",
        wrong="common *= -config.learning_rate",
        found_by="tests/parallel",
    ),
    Planted(
        module="pipeline/dependencies.py",
        right="return (own, Message(stage + 1, Content.GRADIENT, micro_batch)) if stage < last_stage else (own,)",
        wrong="return (own,)",
        found_by="tests/pipeline",
    ),
    Planted(
        module="shards/plan.py",
        right="bias = None if bias is None else bias[part]",
        wrong="bias = bias",
        found_by="tests/shards",
    ),
    Planted(
        module="tensors/partition.py",
        right="np.moveaxis(rows, 0, dim)",
        wrong="np.moveaxis(rows, dim, 0)",
        found_by="tests/tensors",
    ),
    Planted(
        module="testing/loop.py",
        right="if timeout is None:\n            raise VirtualDeadlock(",
        wrong="if timeout == -1:\n            raise VirtualDeadlock(",
        found_by="tests/testing/test_loop.py",
    ),
    Planted(
        module="collectives/ledger.py",
        right="use = (self._recent.get(hashed) or self._count_of(hashed)) + 1",
        wrong="use = (self._recent.get(hashed) or 0) + 1",
        found_by="tests/collectives/test_ledger.py",
    ),
    Planted(
        module="device/dlpack.py",
        right="bool(versioned.flags & _READ_ONLY)",
        wrong="bool(versioned.flags & (_READ_ONLY << 1))",
        found_by="tests/device/test_arrays.py",
    ),
    Planted(
        module="launch/agents/restarted_world.py",
        right="return self.signalled_at is not None and end.at >= self.signalled_at",
        wrong="return self.signalled_at is not None",
        found_by="tests/launch/agents/test_fixed_hosts.py",
    ),
    Planted(
        module="hosts/first_host.py",
        right="if host.version != own.version:",
        wrong="if host.version < own.version:",
        found_by="tests/hosts/test_first_host.py",
    ),
    Planted(
        module="train/parallel_layout.py",
        right="if dp * self.tp * self.pp != world_size:",
        wrong="if dp * self.tp * self.pp > world_size:",
        found_by="tests/train",
    ),
    Planted(
        module="zero/partition.py",
        right="return min(start + slot.low, stop), min(start + slot.high, stop)",
        wrong="return start + slot.low, start + slot.high",
        found_by="tests/zero/test_partition.py",
    ),
)
