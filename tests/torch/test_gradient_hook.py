"""The gradient hook under DistributedDataParallel: the trained model, and the reports about it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from asyncpar.core.config.names import Name
from asyncpar.torch import GradientHook, gradient_hook
from tests.torch.hooked import (
    SIZES,
    SMALL_BUCKETS_MB,
    Linears,
    assert_same_everywhere,
    flat,
    flat_gradients,
    hooked,
    make_inputs,
    make_mlp,
    mean_over_ranks,
    train,
)
from tests.torch.worlds import on_ranks

CODECS = ("none", "bf16", "fp16", "int8", "int4", "topk:0.1", "topk:0.1+int8", "powersgd:2", "auto")
SPARING = CODECS[5:8]
"""Send a part of the gradient, and the rest of it later."""


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_without_a_codec_parameters_are_those_without_a_hook_bit_for_bit(dtype: str) -> None:
    plain, with_hook = (make_mlp().to(getattr(torch, dtype)) for _ in range(2))
    for module, codec in ((plain, None), (with_hook, "none")):
        model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS_MB)
        if codec is not None:
            model.register_comm_hook(GradientHook(codec=Name(codec)), gradient_hook)
        for step in range(4):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model(x.to(getattr(torch, dtype))).square().sum().backward()
    torch.testing.assert_close(flat_gradients(with_hook), flat_gradients(plain), rtol=0, atol=0)


@on_ranks(4)
def test_three_ranks_of_four_round_as_without_a_hook() -> None:
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return
    plain, with_hook = make_mlp(), make_mlp()
    train(DistributedDataParallel(plain, process_group=group), steps=3)
    model = DistributedDataParallel(with_hook, process_group=group)
    model.register_comm_hook(GradientHook(codec="none", group=group), gradient_hook)
    train(model, steps=3)
    torch.testing.assert_close(flat(with_hook), flat(plain), rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("codec", CODECS)
def test_all_ranks_end_with_the_same_bits_that_are_near_the_mean(codec: str) -> None:
    model, state = hooked(make_mlp(), codec=codec)
    exact = DistributedDataParallel(make_mlp())
    losses, wanted = train(model, steps=12), train(exact, steps=12)
    assert_same_everywhere(flat(model))
    assert losses[-1] == pytest.approx(wanted[-1], rel=0.2 if codec in SPARING else 0.02)
    compressed = state.statistics().buckets_compressed
    assert (compressed > 0) == (codec not in ("none", "auto"))  # on one host "auto" is none


@on_ranks(4)
@pytest.mark.parametrize("codec", ["int8", "topk:0.25"])
def test_four_ranks_end_with_the_same_bits(codec: str) -> None:
    model, state = hooked(make_mlp(), codec=codec)
    train(model, steps=3)
    assert_same_everywhere(flat(model))
    assert state.statistics().buckets_compressed == state.statistics().buckets > 0


@on_ranks(2)
def test_int8_with_error_feedback_converges_like_uncompressed() -> None:
    exact, compressed = make_mlp(), make_mlp()
    wanted = train(DistributedDataParallel(exact), steps=80)
    model, _ = hooked(compressed, codec="int8")
    losses = train(model, steps=80)
    ends = [sum(each[-10:]) / 10 for each in (losses, wanted)]
    assert ends[1] < 0.6 * wanted[0]
    assert ends[0] == pytest.approx(ends[1], rel=0.01)


@on_ranks(2)
@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "powersgd:2"])
def test_nothing_is_lost_for_good_though_buckets_are_rebuilt(codec: str) -> None:
    """What was applied and what residuals hold add up to all gradients, after each step."""
    module = Linears()
    model, state = hooked(module, codec=codec, parameters=module.named_parameters())
    applied, wanted = torch.zeros(sum(SIZES)).double(), torch.zeros(sum(SIZES)).double()
    buckets = []
    for step in range(5):
        module.zero_grad()
        model(make_inputs(dist.get_rank(), step)).backward()
        buckets.append([known.lines() for known in state._memory.buckets.values()])  # noqa: SLF001  # which buckets the hook keeps is no statistic
        applied += flat_gradients(module).double()
        wanted += torch.cat(make_inputs(0, step) + make_inputs(1, step)).view(2, -1).double().mean(0)
        residuals = state.state_dict()["residuals"]
        owed = mean_over_ranks(torch.cat([residuals[name] for name, _ in module.named_parameters()]))
        torch.testing.assert_close(applied + owed, wanted, rtol=0, atol=1e-4)
    assert len(buckets[0]) < len(buckets[1])
    assert buckets[1] == buckets[4]
    assert codec != "topk:0.1" or state.statistics().residual_norm > 1


@on_ranks(2)
def test_without_error_feedback_nothing_is_kept() -> None:
    model, state = hooked(make_mlp(), codec="int4", error_feedback=False)
    train(model, steps=3)
    assert_same_everywhere(flat(model))
    assert state.state_dict()["residuals"] == {}


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_gradients_of_other_dtypes_are_compressed_and_keep_their_dtype(dtype: str) -> None:
    kind = getattr(torch, dtype)
    module = Linears(dtype=kind)
    model, state = hooked(module, codec="int8")
    model(make_inputs(dist.get_rank(), 0, kind)).backward()
    got = flat_gradients(module)
    assert got.dtype is kind
    expected = torch.cat(make_inputs(0, 0) + make_inputs(1, 0)).view(2, -1).mean(0)
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.05)
    assert_same_everywhere(got.float())
    assert state.statistics().buckets_compressed == state.statistics().buckets


@on_ranks(2)
@pytest.mark.parametrize("codec", ["none", "int8", "topk:0.1"])
def test_statistics_are_what_communicators_say(codec: str) -> None:
    model, state = hooked(Linears(), codec=codec)
    assert state.statistics().steps == 0
    for step in range(3):
        model(make_inputs(dist.get_rank(), step)).backward()
    figures = state.statistics()
    assert state._reducer is not None  # noqa: SLF001  # the groups of the hook's reducer are counted below
    assert state._reducer._groups is not None  # noqa: SLF001  # the groups of the hook's reducer are counted below
    sent = state._reducer._groups.own.traffic  # noqa: SLF001  # the traffic that the statistics are compared with is counted by the reducer's own group
    assert figures.steps == 3
    assert figures.buckets > 3
    assert figures.bytes_sent == sent.payload_bytes
    assert figures.bytes_uncompressed == 3 * 4 * sum(SIZES)
    least, most = {"none": (1, 1), "int8": (3.5, 4), "topk:0.1": (5, 10)}[codec]
    assert least <= figures.compression_ratio <= most, f"{figures}\n{sent}"
    assert min(figures.exchange, figures.under_way, figures.exposed) > 0
    assert codec == "none" or min(figures.encode, figures.decode) > 0
    assert f"codec {codec}, 2 ranks" in str(figures)
    state.reset_statistics()
    assert state.statistics().bytes_sent == state.statistics().steps == 0
    model(make_inputs(dist.get_rank(), 3)).backward()
    assert state.statistics().steps == 1
    assert state.statistics().bytes_uncompressed == 4 * sum(SIZES)
    assert 0 < state.statistics().bytes_sent < figures.bytes_sent


@on_ranks(2)
def test_small_buckets_and_the_first_steps_are_not_compressed() -> None:
    model, state = hooked(Linears(), codec="topk:0.1", minimum_bytes=6000, warm_up_steps=2)
    counts = []
    for step in range(4):
        model.zero_grad()
        model(make_inputs(dist.get_rank(), step)).backward()
        counts.append(state.statistics().buckets_compressed)
        if step == 1:
            expected = torch.cat(make_inputs(0, 1) + make_inputs(1, 1)).view(2, -1).mean(0)
            torch.testing.assert_close(flat_gradients(model), expected)
    assert counts[:2] == [0, 0]
    sizes = [known.bucket.nbytes for known in state._memory.buckets.values()]  # noqa: SLF001  # which buckets the hook keeps is no statistic
    large = sum(size >= 6000 for size in sizes)
    assert 0 < large < len(sizes)
    assert counts[2:] == [large, 2 * large]


@on_ranks(2)
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_unused_parameters_count_as_zeros(codec: str) -> None:
    used = [[0, 1, 2, 4], [0, 2, 4, 5]]
    module = Linears()
    model, _ = hooked(module, codec=codec, ddp={"find_unused_parameters": True})
    for step in range(3):
        module.zero_grad()
        model(make_inputs(dist.get_rank(), step), used[dist.get_rank()]).backward()
    expected = [torch.zeros(size) for size in SIZES]
    for rank in range(2):
        for index in used[rank]:
            expected[index] += make_inputs(rank, 2)[index] / 2
    torch.testing.assert_close(flat_gradients(module), torch.cat(expected), rtol=0, atol=0.05)
    assert module.weights[3].grad is None  # nobody used it
    assert_same_everywhere(flat_gradients(module))


@on_ranks(2)
def test_gradients_add_up_without_sync_and_are_sent_once() -> None:
    module = Linears()
    model, state = hooked(module, codec="int8")
    for step in range(2):
        module.zero_grad()
        with model.no_sync():
            model(make_inputs(dist.get_rank(), step)).backward()
        model(make_inputs(dist.get_rank(), step + 10)).backward()
    expected = sum(torch.cat(make_inputs(rank, step)) / 2 for rank in range(2) for step in (1, 11))
    torch.testing.assert_close(flat_gradients(module), expected, rtol=0, atol=0.1)
    assert_same_everywhere(flat_gradients(module))
    assert state.statistics().steps == 2


@on_ranks(2)
@pytest.mark.parametrize("setting", ["gradient_as_bucket_view", "static_graph"])
def test_other_ways_of_ddp_come_to_the_same(setting: str) -> None:
    module = make_mlp()
    model, state = hooked(module, codec="int8", ddp={setting: True})
    usual, _ = hooked(make_mlp(), codec="int8")
    train(model, steps=4)
    train(usual, steps=4)
    assert_same_everywhere(flat(module))
    torch.testing.assert_close(flat(module), flat(usual), rtol=0, atol=1e-3)
    assert state.statistics().steps == 4


@on_ranks(2)
def test_ranks_with_fewer_inputs_join() -> None:
    module = make_mlp()
    model, state = hooked(module, codec="int8")
    with model.join():
        train(model, steps=2 + dist.get_rank())
    assert state.statistics().steps == 3


@on_ranks(2)
def test_a_gradient_that_is_not_finite_is_so_everywhere_and_leaves_error_feedback_as_it_was() -> None:
    module = Linears()
    model, state = hooked(module, codec="topk:0.1")
    model(make_inputs(dist.get_rank(), 0)).backward()
    before = state.state_dict()["residuals"]
    module.zero_grad()
    inputs = make_inputs(dist.get_rank(), 1)
    if dist.get_rank() == 1:
        inputs[2][5] = float("inf")
    model(inputs).backward()
    assert module.weights[2].grad.isnan().all()
    assert state.statistics().buckets_not_finite == 1
    after = state.state_dict()["residuals"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    module.zero_grad()
    model(make_inputs(dist.get_rank(), 2)).backward()
    assert flat_gradients(module).isfinite().all()
    assert_same_everywhere(flat_gradients(module))


@on_ranks(2)
@pytest.mark.parametrize("is_named", [True, False])
def test_training_goes_on_from_a_checkpoint(is_named: bool) -> None:
    """What was applied in two runs and what residuals hold at the end add up to all gradients."""
    applied, wanted = torch.zeros(sum(SIZES)).double(), torch.zeros(sum(SIZES)).double()
    saved: Any = None
    for run in range(2):
        module = Linears()
        model, state = hooked(module, codec="topk:0.1", parameters=module.named_parameters() if is_named else None)
        if saved is not None:
            state.load_state_dict(torch.load(saved, weights_only=True))
        for step in range(3 * run, 3 * run + 3):
            module.zero_grad()
            model(make_inputs(dist.get_rank(), step)).backward()
            applied += flat_gradients(module).double()
            wanted += torch.cat(make_inputs(0, step) + make_inputs(1, step)).view(2, -1).double().mean(0)
        saved = io.BytesIO()
        torch.save(state.state_dict(), saved)
        saved.seek(0)
    kept = state.state_dict()
    assert kept["steps"] == 6
    assert len(kept["residuals"]) == len(SIZES)
    by_size = {values.numel(): values for values in kept["residuals"].values()}
    owed = mean_over_ranks(torch.cat([by_size[size] for size in SIZES]))
    torch.testing.assert_close(applied + owed, wanted, rtol=0, atol=1e-4)


@on_ranks(2)
def test_what_powersgd_has_learnt_is_in_the_checkpoint() -> None:
    model, state = hooked(make_mlp(), codec="powersgd:2")
    train(model, steps=3)
    saved = state.state_dict()
    assert saved["codec_state"]
    other, fresh = hooked(make_mlp(), codec="powersgd:2")
    fresh.load_state_dict(saved)
    torch.testing.assert_close(fresh.state_dict(), saved, rtol=0, atol=0)
    train(other, steps=1)
    assert_same_everywhere(flat(other))
    assert fresh.state_dict()["steps"] == 4


@on_ranks(2)
def test_residuals_are_sent_whole_by_a_hook_without_a_codec() -> None:
    module = Linears()
    model, state = hooked(module, codec="topk:0.1", parameters=module.named_parameters())
    model(make_inputs(dist.get_rank(), 0)).backward()
    first = flat_gradients(module).double()
    saved = state.state_dict()
    other = Linears()
    model, state = hooked(other, codec="topk:0.1", warm_up_steps=9, parameters=other.named_parameters())
    state.load_state_dict(saved)
    model(make_inputs(dist.get_rank(), 1)).backward()
    expected = sum(torch.cat(make_inputs(rank, step)).double() / 2 for rank in range(2) for step in range(2))
    torch.testing.assert_close(first + flat_gradients(other).double(), expected, rtol=0, atol=1e-5)
    assert state.state_dict()["residuals"] == {}


@on_ranks(2)
def test_two_models_have_a_hook_each() -> None:
    models = [hooked(make_mlp(seed), codec="int8")[0] for seed in range(2)]
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        (models[0](x).square().sum() + models[1](x).square().sum()).backward()
    for model in models:
        assert_same_everywhere(flat_gradients(model))
