"""The loop of an accelerate script, with the plain Accelerator or by a plan."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.state import AcceleratorState
from integration_programs import Tokens, make_model
from torch.utils.data import DataLoader

Numbers = tuple[list[float], list[float], list[float], list[list[float]]]


def train(
    folder: str, options: dict[str, Any] | None = None, resume: str = "", processes: int = 1
) -> Numbers:
    """Train two epochs; losses, norms, evaluations, weights. The first epoch's state is saved.

    options: of a plan, None for the plain Accelerator. resume: a folder of the first epoch's state.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    if options is None:
        from accelerate import Accelerator as kind
    else:
        from fxpart.integrations.accelerate import PlannedAccelerator as kind
    accelerator = kind(cpu=True, gradient_accumulation_steps=2, **(options or {}))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    draw = torch.Generator().manual_seed(3)
    loader = DataLoader(EvenTokens(20), batch_size=4 // processes, shuffle=True, generator=draw)
    held_out = DataLoader(EvenTokens(8, seed=1), batch_size=4 // processes)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    losses, norms, evaluations = [], [], []
    for epoch in range(2):
        if resume and epoch == 0:
            for _ in loader:  # The order of the second epoch follows from the first.
                pass
            accelerator.load_state(resume)
            schedule.load_state_dict(torch.load(os.path.join(resume, "schedule.pt")))
            continue
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = None
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                norms += [] if norm is None else [norm.item()]
        evaluations.append(evaluate(accelerator, model, held_out))
        if epoch == 0:
            accelerator.save_state(folder)
            if accelerator.is_main_process:
                torch.save(schedule.state_dict(), os.path.join(folder, "schedule.pt"))
    trained = accelerator.unwrap_model(model)
    weights = [p.detach().flatten().tolist() for p in trained.parameters()]
    return losses, norms, evaluations, weights


class EvenTokens(Tokens):
    """Rows with equally many labels, so that means of ranks are those of all rows."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        super().__init__(rows, seed)
        self.ends = [10] * rows


def evaluate(accelerator: Any, model: Any, held_out: Any) -> float:
    """The sum of the logits at the labels and of the loss."""
    model.eval()
    found = 0.0
    with torch.no_grad():
        for batch in held_out:
            outputs = model(**batch)
            logits, labels = accelerator.gather_for_metrics((outputs.logits, batch["input_ids"]))
            found += logits.gather(2, labels[..., None]).double().mean().item()
            found += accelerator.reduce(outputs.loss, "mean").item()
    return found
