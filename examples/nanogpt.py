"""A small GPT in plain PyTorch, trained by a loop of its own, in the style of nanoGPT.

Sums of two numbers, one character a token. The loop has parameter groups, a cosine schedule with
warmup, gradient accumulation, clipping, evaluation, and checkpoints from which it resumes.
``examples/nanogpt_planned.py`` is the same script on several ranks; a test compares both.

    python examples/nanogpt.py --steps 200
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

CHARACTERS = "0123456789+=;"
BLOCK, WIDTH, LAYERS, HEADS, DROPOUT = 32, 64, 4, 4, 0.0
BATCH, ACCUMULATE = 16, 4  # An update has 64 rows.
PEAK, LOWEST, WARMUP, DECAY, CLIP = 2e-3, 2e-4, 20, 0.1, 1.0
EVERY, EVALUATED = 50, 4  # Steps between evaluations; batches of one.
MASTER = int(os.environ.get("RANK", "0")) == 0  # Prints and saves.


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to earlier positions; x: [rows, positions, width]."""
        rows, positions, _ = x.shape
        q, k, v = (
            part.view(rows, positions, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.c_attn(x).split(WIDTH, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(rows, positions, WIDTH)
        return self.dropout(self.c_proj(y))


class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(DROPOUT)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next hidden state."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A decoder whose output layer is its token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(len(CHARACTERS), WIDTH)
        self.wpe = nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, len(CHARACTERS), bias=False)
        self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                scale = math.sqrt(2 * LAYERS) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and loss; tokens and targets: [rows, positions]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text(rows: int = 4000, seed: int = 0) -> torch.Tensor:
    """Return sums such as ``27+58=85;`` as numbers of characters."""
    draw = torch.Generator().manual_seed(seed)
    pairs = torch.randint(100, (rows, 2), generator=draw).tolist()
    text = "".join(f"{one}+{other}={one + other};" for one, other in pairs)
    return torch.tensor([CHARACTERS.index(character) for character in text])


TEXT = {"train": read_text(), "held out": read_text(400, seed=1)}


def get_batch(split: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and targets of a batch, the same for the same number."""
    text, draw = TEXT[split], torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - BLOCK - 1, (BATCH,), generator=draw).tolist()
    rows = torch.stack([text[start : start + BLOCK + 1] for start in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make_optimizer(model: GPT) -> torch.optim.AdamW:
    """Decay matrices, and not biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))


def get_lr(step: int, steps: int) -> float:
    """Return the learning rate: linear warmup, then a cosine."""
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    share = (step - WARMUP) / max(1, steps - WARMUP)
    return LOWEST + 0.5 * (1.0 + math.cos(math.pi * min(share, 1.0))) * (PEAK - LOWEST)


def main(steps: int, out: Path, stop: int | None = None) -> list[tuple[int, float, float]]:
    """Train; return step, loss and evaluated loss of each evaluation. stop: an earlier end."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = make_optimizer(model)
    start, history = 0, []
    if (out / "state.pt").exists():
        state = torch.load(out / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    for step in range(start, stop or steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, steps)
        total = 0.0
        for part in range(ACCUMULATE):
            tokens, targets = get_batch("train", ACCUMULATE * step + part)
            _, loss = model(tokens, targets)
            (loss / ACCUMULATE).backward()
            total += loss.item() / ACCUMULATE
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            model.eval()
            with torch.no_grad():
                batches = [get_batch("held out", number) for number in range(EVALUATED)]
                evaluated = sum(model(*batch)[1].item() for batch in batches) / EVALUATED
            model.train()
            history.append((step + 1, total, evaluated))
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            if MASTER:
                print(f"step {step + 1:4}  loss {total:.4f}  held out {evaluated:.4f}")
                out.mkdir(parents=True, exist_ok=True)
                torch.save(state, out / "state.pt")
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("nanogpt-out"))
    given = parser.parse_args()
    main(given.steps, given.out)
