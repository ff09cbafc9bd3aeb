"""Train the model of ``model_rules.py`` with torch's pipelining: Schedule1F1B over Gloo, a stage per rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch_model
from model_rules import from_arguments
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main() -> None:
    """Be one rank; rank 0 prints."""
    arguments = torch_model.parse_arguments()
    rules, rank, ranks = from_arguments(arguments), dist.get_rank(), dist.get_world_size()
    layers = range(rank * rules.layers // ranks, (rank + 1) * rules.layers // ranks)
    module = torch_model.Stage(rules, layers, torch_model.read_values(arguments))
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, arguments.micro_batches, loss_fn=torch_model.loss_of)
    optimizer = torch_model.make_optimizer(module.parameters())

    def step(number: int) -> float:
        tokens, targets = map(torch.from_numpy, rules.batch(number))
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0 and ranks > 1:
            schedule.step(tokens, return_outputs=False)
        elif rank == 0:
            schedule.step(tokens, target=targets, losses=losses, return_outputs=False)
        elif rank == ranks - 1:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        optimizer.step()
        return sum(loss.item() for loss in losses) / arguments.micro_batches

    torch_model.report(f"pp{ranks}", rules, step)


if __name__ == "__main__":
    main()
