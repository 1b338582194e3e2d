"""Optimizers that look at more than one number: norms, ratios, estimates over all parameters."""

from __future__ import annotations

from typing import Any

import torch


class GlobalNorm(torch.optim.Optimizer):
    """Divides by the norm over all gradients."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        mine = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = sum((p.grad**2).sum() for p in mine) ** 0.5
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


class Clipped(torch.optim.Optimizer):
    """Clips to a global norm of 1 before a step, as LAMB often does, then trust ratios."""

    def __init__(self, parameters: Any, lr: float = 0.1, largest: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr, "largest": largest})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            mine = [p for p in group["params"] if p.grad is not None]
            if not mine:
                continue
            norm = torch.stack([p.grad.norm() for p in mine]).norm()
            factor = (group["largest"] / (norm + 1e-6)).clamp(max=1.0)
            for p in mine:
                update = p.grad * factor
                ratio = p.norm() / (update.norm() + 1e-8) if p.norm() > 0 else 1.0
                p.sub_(group["lr"] * ratio * update)


class TrustRatio(Clipped):
    """Trust ratios alone: each parameter by itself, and not number by number."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr, float("inf"))


class Estimated(torch.optim.Optimizer):
    """Estimates its step size from all parameters (D-adaptation); a state of each, and counters."""

    def __init__(self, parameters: Any, d0: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": 1.0, "d": d0, "k": 0, "total": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        group = self.param_groups[0]
        mine = [p for p in group["params"] if p.grad is not None]
        if not mine:
            return
        total, size = group["total"], 0.0
        for p in mine:
            state = self.state[p]
            if not state:
                state["start"], state["sum"] = p.clone(), torch.zeros_like(p)
            total += group["d"] * float((p.grad * (state["start"] - p)).sum())
            state["sum"].add_(p.grad, alpha=group["d"])
            size += float(state["sum"].abs().sum())
        group["total"], group["k"] = total, group["k"] + 1
        if size > 0:
            group["d"] = max(group["d"], total / size)
        for p in mine:
            p.sub_(p.grad, alpha=group["lr"] * group["d"])


class RowNorm(torch.optim.Optimizer):
    """Normalizes each row of a gradient."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    size = p.grad.norm(dim=-1, keepdim=True) if p.dim() else 1.0
                    p.sub_(p.grad / (size + 1e-8), alpha=group["lr"])


class SignMomentum(torch.optim.Optimizer):
    """Number by number (Lion), without saying so."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_((0.9 * kept + 0.1 * p.grad).sign(), alpha=group["lr"])
                    kept.mul_(0.99).add_(p.grad, alpha=0.01)


class WithClosure(GlobalNorm):
    """Its step needs a closure."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        """One step."""
        closure()
        super().step()
