"""Train tiny models with accelerate, Lightning, Hugging Face's Trainer and DeepSpeed, over Gloo and asyncpar; compare.

    python scripts/torch_conformance/trainers.py
    python scripts/torch_conformance/trainers.py --only fabric hf_trainer --ranks 4

Needs torch, accelerate, lightning, transformers and deepspeed in the environment of the Python that runs it
(``pip install -c <(echo torch==2.13.0) accelerate lightning transformers deepspeed ninja``, beside what
``scripts/test-backends`` has).  What a user does: Lightning takes the backend's name
(``DDPStrategy(process_group_backend="asyncpar")``); accelerate, Hugging Face's Trainer over it, and DeepSpeed know no
names but their own, and take the process group that is there: call
``torch.distributed.init_process_group("asyncpar")`` before them.  On a CPU DeepSpeed compiles C++ when it first starts.

Nothing is downloaded: models are built from configurations, data are random numbers.  Each library runs its own ranks,
once per backend; losses and norms of parameters of every rank must be equal to ``TOLERANCE``.  Exit status: 0 if so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

TOLERANCE = 1e-5
LIMIT_SECONDS = 600.0
_MARK = "NUMBERS "
_STEPS = 4

Numbers = dict[str, float]


def _layers() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def _batches() -> Any:
    """Return a data set of rows and targets, equal on all ranks."""
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 8, generator=generator)
    return TensorDataset(rows, rows.sum(1, keepdim=True).sin())


def _norms(model: Any) -> Numbers:
    return {f"norm of {name}": value.detach().double().norm().item() for name, value in model.named_parameters()}


def accelerate(backend: str) -> Numbers:
    """Accelerator: prepare, backward, gather, reduce, clipping."""
    import torch
    from accelerate import Accelerator
    from torch import distributed as dist
    from torch.utils.data import DataLoader

    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True)
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(_batches(), batch_size=8))
    found: Numbers = {}
    for step, (rows, targets) in enumerate(batches):
        loss = (model(rows) - targets).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = accelerator.gather(loss.detach()).mean().item()
        found[f"reduced {step}"] = accelerator.reduce(loss.detach(), reduction="mean").item()
    found |= _norms(accelerator.unwrap_model(model))
    dist.destroy_process_group()
    return found


def fabric(backend: str) -> Numbers:
    """Lightning Fabric: setup, backward, all_reduce, all_gather, broadcast."""
    import torch
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    ranks = int(os.environ["WORLD_SIZE"])
    runner = Fabric(accelerator="cpu", devices=ranks, strategy=DDPStrategy(process_group_backend=backend))
    runner.launch()
    module = _layers()
    model, optimizer = runner.setup(module, torch.optim.SGD(module.parameters(), lr=0.05))
    batches = runner.setup_dataloaders(DataLoader(_batches(), batch_size=8))
    found: Numbers = {}
    for step, (rows, targets) in enumerate(batches):
        optimizer.zero_grad()
        loss = (model(rows) - targets).square().mean()
        runner.backward(loss)
        optimizer.step()
        found[f"loss {step}"] = float(runner.all_reduce(loss.detach(), reduce_op="mean"))
        found[f"gathered {step}"] = float(runner.all_gather(loss.detach()).sum())
    found["sum of integers"] = float(runner.all_reduce(torch.tensor([3 + 2 * runner.global_rank]), reduce_op="sum"))
    found["broadcast"] = float(runner.broadcast(runner.global_rank + 5.0))
    return found | _norms(module)


def lightning_trainer(backend: str) -> Numbers:
    """Lightning Trainer: two epochs, metrics synchronized over ranks per step and per epoch."""
    import lightning
    import torch
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _layers()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = (self.layers(batch[0]) - batch[1]).square().mean()
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("wrong", (self.layers(batch[0]) - batch[1]).abs().mean(), sync_dist=True, on_epoch=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(_batches(), batch_size=8), DataLoader(_batches(), batch_size=8))
    return {name: float(value) for name, value in trainer.callback_metrics.items()} | _norms(module)


def hf_trainer(backend: str) -> Numbers:
    """Train a language model of one layer with Hugging Face's Trainer, and evaluate it."""
    import torch
    from torch import distributed as dist
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    rows = torch.randint(0, 32, (32, 12), generator=torch.Generator().manual_seed(1))
    texts = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as directory:
        settings = TrainingArguments(
            output_dir=directory,
            use_cpu=True,
            per_device_train_batch_size=2,
            max_steps=_STEPS,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=settings, train_dataset=texts, eval_dataset=texts)
        trainer.train()
        found = {f"loss {number}": entry["loss"] for number, entry in enumerate(trainer.state.log_history[:_STEPS])}
        found["evaluated"] = trainer.evaluate()["eval_loss"]
    return found | _norms(model)


def _deepspeed(backend: str, stage: int) -> Numbers:
    """Train with DeepSpeed's ZeRO ``stage``."""
    import deepspeed
    from deepspeed import zero
    from torch import distributed as dist

    dist.init_process_group(backend)
    module = _layers()
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, _, batches, _ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), training_data=_batches(), config=settings
    )
    found: Numbers = {}
    for step, (rows, targets) in enumerate(batches):
        loss = (engine(rows) - targets).square().mean()
        engine.backward(loss)
        engine.step()
        found[f"loss {step}"] = loss.item()
    with zero.GatheredParameters([*module.parameters()], enabled=stage == 3):
        found |= _norms(module)
    dist.destroy_process_group()
    return found


def deepspeed_1(backend: str) -> Numbers:
    """DeepSpeed, ZeRO stage 1."""
    return _deepspeed(backend, 1)


def deepspeed_2(backend: str) -> Numbers:
    """DeepSpeed, ZeRO stage 2."""
    return _deepspeed(backend, 2)


def deepspeed_3(backend: str) -> Numbers:
    """DeepSpeed, ZeRO stage 3: parameters are gathered for each layer."""
    return _deepspeed(backend, 3)


PROGRAMS: dict[str, Callable[[str], Numbers]] = {
    "accelerate": accelerate,
    "fabric": fabric,
    "lightning_trainer": lightning_trainer,
    "hf_trainer": hf_trainer,
    "deepspeed_1": deepspeed_1,
    "deepspeed_2": deepspeed_2,
    "deepspeed_3": deepspeed_3,
}


def run(program: str, backend: str, ranks: int) -> list[Numbers]:
    """Return what ``program`` finds on each rank.  Raises ``RuntimeError`` with what a rank printed if it fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": "trainers",
        "GROUP_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
    }
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--program", program, "--backend", backend],
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            for process in processes:
                process.wait(LIMIT_SECONDS)
        finally:
            for process in processes:
                process.kill()
        printed = []
        for log in logs:
            log.seek(0)
            printed.append(log.read())
    found = []
    for rank, text in enumerate(printed):
        lines = [line for line in text.splitlines() if line.startswith(_MARK)]
        if not lines:
            raise RuntimeError(f"{program} over {backend}: rank {rank} failed:\n{text[-4000:]}")
        found.append(json.loads(lines[0].removeprefix(_MARK)))
    return found


def differences(one: list[Numbers], other: list[Numbers]) -> list[str]:
    """Return where the numbers of two runs differ."""
    return [
        f"rank {rank}, {name}: {first.get(name)} and {second.get(name)}"
        for rank, (first, second) in enumerate(zip(one, other, strict=True))
        for name in {**first, **second}
        if not math.isclose(first.get(name, math.nan), second.get(name, math.nan), rel_tol=TOLERANCE)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare trainers over Gloo and asyncpar.")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="asyncpar", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        print(f"\n{_MARK}{json.dumps(PROGRAMS[options.program](options.backend))}", flush=True)
        return 0
    status = 0
    for program in options.only:
        try:
            gloo, ours = (run(program, backend, options.ranks) for backend in ("gloo", "asyncpar"))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{program}: {error}", flush=True)
            status = 1
            continue
        found = differences(gloo, ours)
        count = sum(map(len, gloo))
        print(f"{program}: {count - len(found)} of {count} numbers equal", *found, sep="\n  ", flush=True)
        status |= bool(found)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
