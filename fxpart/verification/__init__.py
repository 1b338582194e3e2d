"""Verification of the captured program against the user's module and a single process."""

from fxpart.verification.constant_guard import ConstantGuard
from fxpart.verification.gradient_hooks import refuse_gradient_hooks
from fxpart.verification.module_check import check_module, check_option

__all__ = ["ConstantGuard", "check_module", "check_option", "refuse_gradient_hooks"]
