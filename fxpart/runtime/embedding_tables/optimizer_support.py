"""Check which optimizers support sparse or dense gradients, before the first step fails."""

from __future__ import annotations

import torch

from fxpart.compat import replaced_names
from fxpart.compat.multi_optimizer import MultiOptimizer
from fxpart.compat.optimizer_parameters import check_gradient_layouts
from fxpart.runtime.embedding_tables.sparse_gradients import SparseGradients
from fxpart.runtime.state.model_state import ModelState


def check_optimizer_support(
    optimizer: torch.optim.Optimizer, state: ModelState, rows: SparseGradients
) -> None:
    """Raise FXP109 if a parameter's optimizer does not support its gradients.

    rows: parameters with sparse gradients. Classes of others are not checked.
    """
    shown = replaced_names(state.aliases)
    names = {id(p): name for name, p in state.parameters()}
    for one in optimizer.each if isinstance(optimizer, MultiOptimizer) else [optimizer]:
        mine = [names[id(p)] for g in one.param_groups for p in g["params"] if id(p) in names]
        check_gradient_layouts(one, mine, rows.entries, shown)
