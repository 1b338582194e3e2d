"""Check which optimizers support sparse or dense gradients, before the first step fails."""

from __future__ import annotations

import torch

from fxpart.compat.multi_optimizer import MultiOptimizer
from fxpart.errors import FxpartError, Problem
from fxpart.optim import MatrixOptimizer
from fxpart.runtime.embedding_tables.sparse_gradients import SparseGradients
from fxpart.runtime.state.model_state import ModelState

# Optimizers of torch without sparse support: https://docs.pytorch.org/docs/stable/sparse.html
_DENSE_ONLY = (
    "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "ASGD", "Rprop",
    "Adafactor", "LBFGS", "Muon",
)  # fmt: skip
_FIX = 'use optimizer={"tables.*": torch.optim.SparseAdam, "*": torch.optim.AdamW}'


def check_optimizer_support(
    optimizer: torch.optim.Optimizer, state: ModelState, rows: SparseGradients
) -> None:
    """Raise FXP109 if a parameter's optimizer does not support its gradients.

    rows: parameters with sparse gradients. Classes of others are not checked.
    """
    sparse = rows.entries
    names = {id(p): name for name, p in state.parameters()}
    problems: list[Problem] = []
    for one in optimizer.each if isinstance(optimizer, MultiOptimizer) else [optimizer]:
        kind = type(one)
        dense_only = isinstance(one, MatrixOptimizer) or any(
            kind is getattr(torch.optim, name, None) for name in _DENSE_ONLY
        )
        mine = [names[id(p)] for g in one.param_groups for p in g["params"] if id(p) in names]
        for name in mine:
            where = f"optimizer {kind.__name__}, {name}"
            if dense_only and name in sparse:
                why = "its gradient is sparse (sparse=True), which this optimizer does not support"
                problems.append(Problem("FXP109", where, why, _FIX))
            if kind is torch.optim.SparseAdam and name not in sparse:
                why = "its gradient is dense, but this optimizer supports sparse gradients only"
                problems.append(Problem("FXP109", where, why, _FIX))
    if problems:
        raise FxpartError(problems)
