"""DistributedDataParallel of torch on asyncpar, with a hook that sends gradients in a quarter of their bytes.

asyncpar launch --nproc-per-node 2 scripts/examples/torch_hook.py
torchrun --nproc-per-node 2 scripts/examples/torch_hook.py
"""

import os
import sys

try:
    import asyncpar.torch
except ModuleNotFoundError as error:
    sys.exit(f"torch_hook: {error}")
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FEATURES, STEPS = 64, 60


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("torch_hook: start it with: asyncpar launch --nproc-per-node 2 torch_hook.py")
    if int(os.environ["WORLD_SIZE"]) < 2:
        sys.exit("torch_hook: expected at least 2 ranks, which have gradients to exchange: --nproc-per-node 2")
    torch.set_num_threads(1)  # ranks share the cores
    torch.manual_seed(0)
    dist.init_process_group("asyncpar")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.Linear(64, 1)))
    hook = asyncpar.torch.GradientHook(codec="int8")
    model.register_comm_hook(hook, asyncpar.torch.gradient_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = torch.Generator().manual_seed(dist.get_rank())  # each rank has its own
    truth = torch.linspace(-1, 1, FEATURES)[:, None]
    for step in range(STEPS):
        x = torch.randn(32, FEATURES, generator=samples)
        loss = torch.nn.functional.mse_loss(model(x), x @ truth)
        optimizer.zero_grad()
        loss.backward()  # buckets are encoded, exchanged and decoded while it computes others
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
