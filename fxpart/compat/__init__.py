"""The one place that touches torch's private names: each function says what it needs."""

from torch.utils._python_dispatch import TorchDispatchMode

from fxpart.compat.autocasts import grad_modes_kept, may_convert
from fxpart.compat.compiling import compile_counters, compiler_fault
from fxpart.compat.modules import (
    has_module_hooks,
    mask_detection_off,
    operation_schema,
    own_backward,
    registering_module,
    tensor_slots,
    unwrapped,
    watched_calls,
)
from fxpart.compat.saved import release_saved, saved_slots
from fxpart.compat.symbols import (
    floor_division,
    guards_off,
    has_unbacked_symbols,
    size_hint,
    symbol_names,
    symbolic_input,
    unflatten_output,
)
from fxpart.compat.tensors import (
    fake_mode,
    is_fake,
    is_plain_fake,
    like_fake,
    quiet_fakes,
    storage_address,
    storage_identity,
    view_base,
    writes,
)
from fxpart.compat.tracing import (
    active_tracer,
    deferred_code,
    python_dispatcher,
    record_operations,
    trace_as,
    traced_node,
    untraced,
    watch_casts,
)

__all__ = [
    "TorchDispatchMode",
    "active_tracer",
    "compile_counters",
    "compiler_fault",
    "deferred_code",
    "fake_mode",
    "floor_division",
    "grad_modes_kept",
    "guards_off",
    "has_module_hooks",
    "has_unbacked_symbols",
    "is_fake",
    "is_plain_fake",
    "like_fake",
    "mask_detection_off",
    "may_convert",
    "operation_schema",
    "own_backward",
    "python_dispatcher",
    "quiet_fakes",
    "record_operations",
    "registering_module",
    "release_saved",
    "saved_slots",
    "size_hint",
    "storage_address",
    "storage_identity",
    "symbol_names",
    "symbolic_input",
    "tensor_slots",
    "trace_as",
    "traced_node",
    "unflatten_output",
    "untraced",
    "unwrapped",
    "view_base",
    "watch_casts",
    "watched_calls",
    "writes",
]
