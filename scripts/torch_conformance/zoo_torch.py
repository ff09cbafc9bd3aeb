"""Models of the zoo that torch alone can build.  Each is small, and odd in its own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

D = 8
"""Width of most of them."""

Batch = Callable[[torch.Generator], Any]


def square(outputs: Any) -> torch.Tensor:
    """Return the sum of the means of the squares of all floating tensors in ``outputs``."""
    leaves = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor)]
    parts = [each.abs().square().mean().float() for each in leaves if each.is_floating_point() or each.is_complex()]
    return torch.stack(parts).sum()


def rows(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, D, generator=generator)


def normal(*shape: int) -> Batch:
    """Return a maker of batches of this shape."""
    return lambda generator: torch.randn(*shape, generator=generator)


def integers(high: int, *shape: int) -> Batch:
    return lambda generator: torch.randint(0, high, shape, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how its inputs are made, and what of its outputs is the loss.

    ``settings`` are those of DistributedDataParallel; ``train`` replaces a step's forward and backward.
    """

    make: Callable[[], nn.Module]
    batch: Batch = rows
    loss: Callable[[Any], torch.Tensor] = square
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    train: Callable[[nn.Module, Any], torch.Tensor] | None = None


class Own(nn.Module):
    """A module whose forward is a function of it and its inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._function(self, *inputs, **named)


def mlp(width: int = D) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


def convolutions(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3))


class Residual(nn.Module):
    """A residual block of convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.body(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


IMAGES = normal(4, 3, 8, 8)


class Outputs(NamedTuple):
    """Outputs with names."""

    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Result:
    """Outputs in a class of the program, which torch does not look into."""

    value: torch.Tensor


class Doubled(torch.autograd.Function):
    """An operation with a backward of its own."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


def _experts(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Choose an expert by the batch: ranks may choose different ones, and leave others out."""
    scores = module.gate(x).mean(0)
    chosen = int(scores.argmax())
    found: torch.Tensor = module.experts[chosen](x) * scores[chosen]
    return found


def _shared(module: Any, words: torch.Tensor) -> torch.Tensor:
    return functional.linear(module.body(module.words(words)), module.words.weight)


def _autoencoder(module: Any, x: torch.Tensor) -> torch.Tensor:
    mean, spread = module.inner(x).chunk(2, -1)
    found: torch.Tensor = module.outer(mean + spread.exp() * 0.1) - x
    return found + 0.01 * mean.mean(-1, keepdim=True)


def _penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Add the norm of the gradient of the inputs, which takes a second derivative."""
    x = x.requires_grad_()
    y = model(x)
    (inner,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss = y.square().mean() + inner.square().mean()
    loss.backward()
    return loss


def _several_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = (model(x) - model(x + 1)).square().mean()
    loss.backward()
    return loss


def _parts(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Accumulate over halves of the batch."""
    total = torch.zeros(())
    halves = x.chunk(2)
    with model.no_sync():
        first = square(model(halves[0]))
        first.backward()
    loss = square(model(halves[1]))
    loss.backward()
    return total + first.detach() + loss


def _autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = square(model(x))
    loss.backward()
    return loss


def _twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Evaluate without gradients, then train."""
    with torch.no_grad():
        model.eval()
        model(x)
        model.train()
    loss = square(model(x))
    loss.backward()
    return loss


def _named(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = square(model(inputs={"rows": [x]}, scale=2))
    loss.backward()
    return loss


def _scan(module: Any, x: torch.Tensor) -> torch.Tensor:
    state = torch.zeros_like(x)
    for _ in range(3):
        state = torch.tanh(module.inner(state) + module.outer(x))
    return state


def _graph(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Pass messages along a ring."""
    for layer in module.layers:
        x = torch.zeros_like(x).index_add(0, torch.tensor([1, 2, 3, 0]), layer(x)) + x
    return x


def _flow(module: Any, x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    scale, shift = module.body(left).chunk(2, -1)
    return torch.cat([left, right * scale.exp() + shift], -1)


def _unet(module: Any, x: torch.Tensor) -> torch.Tensor:
    inner = module.down(x)
    found: torch.Tensor = module.out(torch.cat([x, module.up(inner)], 1))
    return found


def _low_rank() -> nn.Module:
    base = mlp().requires_grad_(False)
    return Own(lambda m, x: m.base(x) + m.b(m.a(x)), base=base, a=nn.Linear(D, 2), b=nn.Linear(2, D))


def _channels_last() -> nn.Module:
    return convolutions(nn.BatchNorm2d).to(memory_format=torch.channels_last)


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(D), nn.ReLU(), nn.LazyLinear(3))


def _hooked() -> nn.Module:
    made = mlp()
    made[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return made


def _mixed() -> nn.Module:
    made = nn.Sequential(mlp(), mlp().double(), mlp().bfloat16())
    return Own(lambda m, x: m.b[2](m.b[1](m.b[0](x).double()).bfloat16()).float(), b=made)


def _complex(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex64) @ module.weight


def _twins(module: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module.body(x) - module.body(x.flip(0))
    return found


def _mixture(module: Any, x: torch.Tensor) -> torch.Tensor:
    weights = module.weights(x).softmax(-1)
    return torch.einsum("bk,bkd->bd", weights, torch.stack([each(x) for each in module.means], 1))


def _policy(outputs: torch.Tensor) -> torch.Tensor:
    chosen = torch.distributions.Categorical(logits=outputs)
    return -(chosen.log_prob(torch.zeros(len(outputs))) * 0.5 + 0.01 * chosen.entropy()).mean()


def _ctc(outputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = functional.ctc_loss(
        outputs.log_softmax(-1), torch.ones(4, 2, dtype=torch.long), torch.full((4,), 6), torch.full((4,), 2)
    )
    return found


def _first(outputs: Any) -> torch.Tensor:
    return square(outputs[0])


def _value(outputs: Result) -> torch.Tensor:
    return square(outputs.value)


def _frozen() -> nn.Module:
    made = nn.Sequential(mlp(), mlp())
    made[0].requires_grad_(False)
    return made


def _buffers(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.seen.add_(x.detach().mean(0))
    found: torch.Tensor = module.body(x + module.seen)
    return found


def _attention(module: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module.attention(x, x, x)[0]
    return found


def _parameters(module: Any, x: torch.Tensor) -> torch.Tensor:
    for each in module.more:
        x = x * each
    return x + module.named["bias"]


def _sampled(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Leave the middle out in some steps, on all ranks alike."""
    module.number += 1
    return module.last(module.middle(x) if module.number % 2 else x)


def _unused(**settings: Any) -> Case:
    return Case(make=lambda: Own(lambda m, x: m.body(x), body=mlp(), more=mlp()), settings=settings)


def _qat() -> nn.Module:
    made = nn.Sequential(mlp())
    made.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(made.train())


def _checkpointed(*, reentrant: bool) -> Callable[..., torch.Tensor]:
    return lambda m, x: m.last(checkpoint(m.body, x.requires_grad_(), use_reentrant=reentrant))


def _both(module: Any, x: torch.Tensor) -> Sequence[Any]:
    y = module.body(x)
    return [{"a": y, "b": (y.sum(), None)}, Outputs(y, 2 * y)]


def _clipped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = square(model(x))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return loss


def _kept(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Keep gradients in their memory between steps, with zeros."""
    loss = square(model(x))
    loss.backward()
    for each in model.parameters():
        assert each.grad is not None, "all are used"
        each.grad = each.grad.clone() if each.dim() == 1 else each.grad
    return loss


def _two_losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    losses = y.square().mean(), y.abs().mean()
    torch.autograd.backward(losses)
    return losses[0] + losses[1].detach()


def _scaled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = square(model(x))
    torch.amp.GradScaler("cpu", init_scale=8.0).scale(loss).backward()
    return loss


def _renewed(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Put another tensor in the place of a buffer, as programs do that avoid changes in place."""
    module.seen = module.seen + x.detach().mean(0)
    found: torch.Tensor = module.body(x + module.seen)
    return found


def _ensemble(module: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.vmap(functional.linear, (None, 0))(x, module.weights)
    return found


def _functional(module: Any, x: torch.Tensor) -> torch.Tensor:
    halved = {name: 0.5 * each for name, each in module.body.named_parameters()}
    found: torch.Tensor = torch.func.functional_call(module.body, halved, (x,))
    return found


def _returns_weights(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return module.body(x), module.scale, x


def _norms_of_old() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(D, D)), mlp())


def _pruned() -> nn.Module:
    made = mlp()
    prune.l1_unstructured(made[0], "weight", 0.5)
    return made


def _integers() -> nn.Module:
    return Own(
        lambda m, x: m.body(x @ (m.packed.float() / 127)),
        body=mlp(),
        packed=nn.Parameter(torch.randint(-127, 127, (D, D), dtype=torch.int8), requires_grad=False),
        mask=nn.Buffer(torch.ones(D, dtype=torch.bool)),
        none=nn.Buffer(torch.zeros(0)),
        wave=nn.Buffer(torch.ones(2, dtype=torch.complex64)),
    )


def _transposed() -> nn.Module:
    return Own(lambda m, x: x @ m.weight, weight=nn.Parameter(torch.randn(D, 2 * D)[:, ::2]))


def _watched() -> nn.Module:
    made = mlp()
    made[0].register_full_backward_hook(lambda *given: None if given[1][0] is None else (2 * given[1][0],))
    made[2].register_forward_hook(lambda *given: given[2] + 1)
    return made


class Marked(torch.Tensor):
    """A tensor of a class of the program."""


def _marked() -> nn.Module:
    return Own(
        lambda m, x: x @ m.weight.as_subclass(torch.Tensor),
        weight=nn.Parameter(torch.randn(D, D).as_subclass(Marked)),
    )


def _distilled() -> nn.Module:
    """Learn from a frozen copy that is in evaluation mode."""
    return Own(lambda m, x: m.pupil(x) - m.teacher(x).detach(), pupil=mlp(), teacher=mlp().requires_grad_(False).eval())


_UNUSED = {"find_unused_parameters": True}
_STATIC = {"static_graph": True}

CASES: dict[str, Case] = {
    "mlp": Case(make=mlp),
    "mlp, Adam": Case(make=mlp, optimizer=torch.optim.Adam),
    "float64": Case(make=lambda: mlp().double(), batch=lambda g: rows(g).double()),
    "bfloat16": Case(make=lambda: mlp().bfloat16(), batch=lambda g: rows(g).bfloat16()),
    "float16": Case(make=lambda: mlp().half(), batch=lambda g: rows(g).half()),
    "dtypes mixed": Case(make=_mixed),
    "autocast": Case(make=mlp, train=_autocast),
    "complex": Case(make=lambda: Own(_complex, weight=nn.Parameter(torch.randn(D, D, dtype=torch.complex64)))),
    "batch norm": Case(make=lambda: convolutions(nn.BatchNorm2d), batch=IMAGES),
    "group norm": Case(make=lambda: convolutions(lambda n: nn.GroupNorm(2, n)), batch=IMAGES),
    "instance norm": Case(make=lambda: convolutions(lambda n: nn.InstanceNorm2d(n, affine=True)), batch=IMAGES),
    "SyncBatchNorm": Case(make=lambda: convolutions(nn.SyncBatchNorm), batch=IMAGES),
    "channels last": Case(
        make=_channels_last,
        batch=lambda g: IMAGES(g).to(memory_format=torch.channels_last),
    ),
    "residual": Case(make=resnet, batch=IMAGES),
    "U-Net": Case(
        make=lambda: Own(_unet, down=nn.Conv2d(3, 6, 2, 2), up=nn.ConvTranspose2d(6, 3, 2, 2), out=nn.Conv2d(6, 2, 1)),
        batch=IMAGES,
    ),
    "depthwise": Case(make=lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.PReLU(6)), batch=IMAGES),
    "convolutions in one dimension": Case(make=lambda: nn.Conv1d(D, D, 3), batch=normal(4, D, 9)),
    "convolutions in three": Case(make=lambda: nn.Conv3d(2, 3, 3), batch=normal(2, 2, 5, 5, 5)),
    "LSTM": Case(make=lambda: nn.LSTM(D, D, 2, batch_first=True), batch=normal(4, 5, D), loss=_first),
    "GRU, both ways": Case(make=lambda: nn.GRU(D, D, bidirectional=True), batch=normal(5, 4, D), loss=_first),
    "RNN by hand": Case(make=lambda: Own(_scan, inner=nn.Linear(D, D), outer=nn.Linear(D, D))),
    "LSTM with CTC": Case(
        make=lambda: Own(lambda m, x: m.out(m.body(x)[0]), body=nn.LSTM(D, D), out=nn.Linear(D, 5)),
        batch=normal(6, 4, D),
        loss=_ctc,
    ),
    "attention": Case(
        make=lambda: Own(_attention, attention=nn.MultiheadAttention(D, 2, batch_first=True)), batch=normal(2, 5, D)
    ),
    "transformer encoder": Case(
        make=lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        batch=normal(2, 5, D),
    ),
    "transformer": Case(
        make=lambda: Own(lambda m, x: m.body(x, x), body=nn.Transformer(D, 2, 1, 1, 16, dropout=0.0, batch_first=True)),
        batch=normal(2, 5, D),
    ),
    "dropout": Case(make=lambda: nn.Sequential(mlp(), nn.Dropout(0.3), mlp())),
    "embedding": Case(make=lambda: nn.Sequential(nn.Embedding(10, D), mlp()), batch=integers(10, 4, 3)),
    "embedding, sparse": Case(
        make=lambda: nn.Sequential(nn.Embedding(10, D, sparse=True), mlp()), batch=integers(10, 4, 3)
    ),
    "embedding bag, sparse": Case(
        make=lambda: nn.Sequential(nn.EmbeddingBag(10, D, sparse=True), mlp()), batch=integers(10, 4, 3)
    ),
    "tied weights": Case(make=lambda: Own(_shared, words=nn.Embedding(10, D), body=mlp()), batch=integers(10, 4, 3)),
    "weight norm": Case(make=lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(D, D)), mlp())),
    "spectral norm": Case(make=lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(D, D)), mlp())),
    "orthogonal": Case(make=lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(D, D)), mlp())),
    "checkpointed": Case(make=lambda: Own(_checkpointed(reentrant=False), body=mlp(), last=mlp())),
    "checkpointed, reentrant": Case(
        make=lambda: Own(_checkpointed(reentrant=True), body=mlp(), last=mlp()), settings=_STATIC
    ),
    "outputs of many kinds": Case(make=lambda: Own(_both, body=mlp())),
    "outputs in a class": Case(make=lambda: Own(lambda m, x: Result(m.body(x)), body=mlp()), loss=_value),
    "inputs by name": Case(
        make=lambda: Own(lambda m, inputs, scale: m.b(inputs["rows"][0]) * scale, b=mlp()), train=_named
    ),
    "unused": _unused(),
    "unused, found": _unused(**_UNUSED),
    "unused, static": _unused(**_STATIC),
    "experts": Case(
        make=lambda: Own(_experts, gate=nn.Linear(D, 3), experts=nn.ModuleList([mlp(), mlp(), mlp()])), settings=_UNUSED
    ),
    "parts left out": Case(make=lambda: Own(_sampled, middle=mlp(), last=mlp(), number=0), settings=_UNUSED),
    "frozen": Case(make=_frozen),
    "all frozen": Case(make=lambda: mlp().requires_grad_(False)),
    "low rank": Case(make=_low_rank),
    "buffers": Case(make=lambda: Own(_buffers, body=mlp(), seen=nn.Buffer(torch.zeros(D)))),
    "lists and dicts of parameters": Case(
        make=lambda: Own(
            _parameters,
            more=nn.ParameterList([torch.ones(D), torch.ones(D)]),
            named=nn.ParameterDict({"bias": torch.zeros(D)}),
        )
    ),
    "scalar": Case(make=lambda: Own(lambda m, x: x * m.scale, scale=nn.Parameter(torch.ones(())))),
    "empty parameter": Case(
        make=lambda: Own(lambda m, x: m.b(x) + m.none.sum(), b=mlp(), none=nn.Parameter(torch.zeros(0)))
    ),
    "lazy": Case(make=_lazy),
    "scripted": Case(make=lambda: torch.jit.script(mlp())),
    "compiled": Case(make=lambda: torch.compile(mlp(), backend="aot_eager")),
    "an operation of its own": Case(make=lambda: Own(lambda m, x: Doubled.apply(m.body(x)), body=mlp())),
    "a hook of a gradient": Case(make=_hooked),
    "gradient penalty": Case(make=mlp, train=_penalty),
    "twins": Case(make=lambda: Own(_twins, body=mlp())),
    "several forwards": Case(make=mlp, train=_several_forwards),
    "accumulation": Case(make=mlp, train=_parts),
    "evaluation between": Case(make=lambda: convolutions(nn.BatchNorm2d), batch=IMAGES, train=_twice),
    "autoencoder": Case(make=lambda: Own(_autoencoder, inner=nn.Linear(D, 8), outer=nn.Linear(4, D))),
    "flow": Case(make=lambda: Own(_flow, body=nn.Sequential(nn.Linear(D // 2, 16), nn.Tanh(), nn.Linear(16, D)))),
    "messages in a graph": Case(make=lambda: Own(_graph, layers=nn.ModuleList([mlp(), mlp()]))),
    "mixture": Case(
        make=lambda: Own(_mixture, weights=nn.Linear(D, 3), means=nn.ModuleList([mlp() for _ in range(3)]))
    ),
    "policy": Case(make=mlp, loss=_policy),
    "bilinear": Case(make=lambda: Own(lambda m, x: m.b(x, x), b=nn.Bilinear(D, D, 3))),
    "gradients clipped": Case(make=mlp, train=_clipped),
    "gradients elsewhere": Case(make=mlp, train=_kept),
    "two losses": Case(make=mlp, train=_two_losses),
    "losses scaled": Case(make=mlp, train=_scaled),
    "buffers renewed": Case(make=lambda: Own(_renewed, body=mlp(), seen=nn.Buffer(torch.zeros(D)))),
    "ensemble": Case(make=lambda: Own(_ensemble, weights=nn.Parameter(torch.randn(3, D, D)))),
    "functional": Case(make=lambda: Own(_functional, body=mlp())),
    "outputs that are weights": Case(make=lambda: Own(_returns_weights, body=mlp(), scale=nn.Parameter(torch.ones(D)))),
    "weight norm of old": Case(make=_norms_of_old),
    "pruned": Case(make=_pruned),
    "integers and other buffers": Case(make=_integers),
    "transposed": Case(make=_transposed),
    "hooks of modules": Case(make=_watched),
    "a class of tensors": Case(make=_marked),
    "distilled": Case(make=_distilled),
    "Adagrad": Case(make=mlp, optimizer=torch.optim.Adagrad),
    "AdamW, fused": Case(make=mlp, optimizer=partial(torch.optim.AdamW, fused=True)),
    "quantization-aware": Case(make=_qat),
    "many buckets": Case(make=lambda: nn.Sequential(*[mlp() for _ in range(6)]), settings={"bucket_cap_mb": 0.001}),
}
