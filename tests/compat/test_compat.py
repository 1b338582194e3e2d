"""torch's private names: each function in compat does what it says on this torch."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules import transformer

import fxpart
from fxpart import compat


def test_storage_identity() -> None:
    a = torch.randn(4, 4)
    assert compat.storage_identity(a) == compat.storage_identity(a.view(4, 4))
    assert compat.storage_identity(a) != compat.storage_identity(a.t())
    assert compat.storage_identity(a) != compat.storage_identity(a[1:])
    assert compat.storage_identity(a) != compat.storage_identity(a.clone())


def test_fakes() -> None:
    real = torch.ones(2)
    mode = compat.fake_mode()
    with mode:
        fake = real + torch.zeros(2)
    assert compat.is_fake(fake) and not compat.is_fake(real)
    assert compat.is_fake(torch.empty(2, device="meta"))


def test_sizes_and_unbacked_symbols() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, x.nonzero()

    exported = torch.export.export(
        Model(), (torch.ones(4, 2),), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1)}}
    )
    values = {n.name: n.meta.get("val") for n in exported.graph.nodes}
    assert not compat.has_unbacked_symbols(values["add"])
    assert compat.has_unbacked_symbols(values["nonzero"])
    assert not compat.has_unbacked_symbols(None)
    rows = values["add"].shape[0]
    assert isinstance(compat.symbol_names(rows), str) and compat.size_hint(rows) == 4
    assert compat.symbol_names(2) == 2 and compat.size_hint(2) == 2
    assert compat.unflatten_output(exported, ["a", "b"]) == ("a", "b")


def test_number_of_rows_of_fake_masks() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    real = torch.ones(3, dtype=torch.bool)
    compat.share_number_of_rows(real, real.clone())
    one, early, late = (mode.from_tensor(real.clone()) for _ in range(3))
    with mode:
        compat.share_number_of_rows(one, early)
        rows = one.nonzero().shape[0]
        compat.share_number_of_rows(one, late)
        assert str(late.nonzero().shape[0]) == str(rows) != str(early.nonzero().shape[0])


def test_mask_detection() -> None:
    original = transformer._detect_is_causal_mask
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    assert original(mask) is True
    with compat.disable_mask_detection():
        assert transformer._detect_is_causal_mask(mask, None, 3) is False
        assert transformer._detect_is_causal_mask(mask, True, 3) is True
    assert transformer._detect_is_causal_mask is original


def test_own_backward() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad

    x = torch.ones(2, requires_grad=True)
    assert compat.own_backward(Same.apply(x).grad_fn) is Same
    assert compat.own_backward((x * 2).grad_fn) is None


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def test_intercepted_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also bound methods from before; without the class that they share, none."""
    stored, x = Tripled.apply, torch.ones(2)
    with compat.intercept_functions(lambda kind, args: (kind, *args)):
        assert stored(x) == (Tripled, x)
    with compat.intercept_functions(lambda kind, args: NotImplemented):
        assert torch.equal(stored(x), 3 * x)
    assert torch.equal(stored(x), 3 * x)
    with ExitStack() as stack:
        with monkeypatch.context() as without:
            without.delattr(torch.autograd.function, "_SingleLevelFunction")
            stack.enter_context(compat.intercept_functions(lambda kind, args: None))
        assert torch.equal(stored(x), 3 * x)


def test_storage_references() -> None:
    tensor = torch.ones(4)
    reference = compat.StorageReference(tensor.untyped_storage())
    assert reference.is_of(tensor[2:].untyped_storage())
    assert not reference.is_of(torch.ones(4).untyped_storage())
    del tensor
    assert not reference.is_of(torch.ones(4).untyped_storage())


@pytest.mark.slow
def test_unwrapped() -> None:
    module = nn.Linear(2, 2)
    assert compat.unwrapped(torch.compile(module)) is module
    assert compat.unwrapped(module) is module


def test_tensor_slots() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    names = [name for _, name in compat.tensor_slots(model)]
    assert names == [
        "weight",
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]


def test_recorded_operations() -> None:
    graph = compat.record_operations(lambda x: nn.functional.dropout(x, 0.5), torch.ones(3))
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert targets == [torch.ops.aten.dropout.default]


def test_operation_schema() -> None:
    schema = compat.operation_schema(torch.ops.aten.add_.Tensor)
    assert (schema.name, schema.overload_name) == ("aten::add_", "Tensor")
    assert [a.name for a in schema.arguments] == ["self", "other", "alpha"]
    assert schema.arguments[0].alias_info.is_write
    assert compat.operation_schema(torch.add) is None
    assert compat.operation_schema(torch.ops.aten.add) is None


def test_ops_that_the_dispatcher_runs() -> None:
    assert compat.has_kernel(torch.ops.aten.linear.default)
    assert compat.has_kernel(torch.ops.aten.add_.Tensor)
    assert not compat.has_kernel(torch.ops.aten.save.default)


def test_conversions_are_seen() -> None:
    x = torch.ones(2, 2)
    with compat.watch_casts() as seen:
        y = x.to(torch.bfloat16)
        y + y
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x @ x
    assert [(t is x, dtype) for t, dtype in seen] == [(True, torch.bfloat16)] * 3


def test_symbolic_inputs_and_the_python_dispatcher() -> None:
    mode = compat.fake_mode(symbolic=True)
    x = compat.symbolic_input(mode, torch.ones(5, 3), [True, False])
    assert isinstance(x.shape[0], torch.SymInt) and x.shape[1] == 3
    again = compat.symbolic_input(mode, torch.ones(5, 7), [True, False])
    assert str(again.shape[0]) == str(x.shape[0])
    lstm = nn.LSTM(3, 4)
    with mode, compat.python_dispatcher():
        w = [torch.empty(p.shape) for p in lstm.parameters()]
        h = torch.empty(1, x.shape[0], 4)
        y = torch.ops.aten.lstm.input(x[None], [h, h], w, True, 1, 0.0, True, False, False)[0]
    assert str(y.shape[1]) == str(x.shape[0])


def test_registering_module_of_ops() -> None:
    from fxpart.compat import registering_module

    @torch.library.custom_op("fxpart_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert registering_module(torch.ops.fxpart_tests.twice.default) == __name__
    assert registering_module(torch.ops.aten.add.Tensor) is None


def test_failing_fakes_are_quiet(caplog: pytest.LogCaptureFixture) -> None:
    with compat.fake_mode():
        x = torch.ones(4, 3)

        def attempt() -> str:
            with pytest.raises(RuntimeError):
                torch.mm(x, x)
            return caplog.text

        with compat.silence_fake_errors():
            assert attempt() == ""
        assert "failed while attempting" in attempt()


@pytest.mark.slow
def test_planning_says_nothing_of_backwards_that_fakes_lack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """aten._trilinear's has none for a symbolic batch: its bytes are estimated, and that is all."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 6), nn.Linear(4, 6)
            self.joined = nn.Bilinear(6, 6, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.joined(self.left(x).relu(), self.right(y).relu()).relu()

    found = fxpart.compile(
        Joined(), "local:2", loss=nn.functional.mse_loss,
        example_inputs=(torch.randn(8, 4), torch.randn(8, 4), torch.ones(8, 3)),
    )  # fmt: skip
    assert found.plan.prediction.simulated_seconds > 0
    assert "failed while attempting" not in caplog.text


def test_what_autocast_may_convert() -> None:
    assert compat.may_convert(torch.ops.aten.linear.default, "cpu")
    assert compat.may_convert(torch.ops.aten.dropout.default, "cpu")  # made of other ops
    assert not compat.may_convert(torch.ops.aten.randn_like.default, "cpu")
    assert compat.may_convert(len, "cpu")  # not known


def test_compilers() -> None:
    assert compat.compiler_fault("aot_eager") is None
    assert compat.compiler_fault("inductor", "cpu") is None or compat.compiler_fault("inductor")
    assert isinstance(compat.compile_counters(), dict)


def test_saved_tensors_are_released() -> None:
    """A node's saved tensor is gone, and its backward says so; without such names nothing is."""
    x = torch.randn(64, requires_grad=True)
    y = torch.tanh(x)
    node = y.grad_fn
    slots = compat.saved_slots(node)
    assert slots == ("_raw_saved_result",)
    compat.release_saved(node, slots)
    compat.release_saved(node, slots)  # a second time there is nothing to do
    with pytest.raises(RuntimeError, match="between the halves"):
        y.sum().backward()
    assert compat.saved_slots(object()) == ()


def test_agents_tell_of_failures() -> None:
    """Whenever they have looked; an agent that cannot be asked is as it was."""
    told: list[object] = []

    class Failure:
        pid, exitcode = 17, -9

    class Result:
        failures: ClassVar = {1: Failure()}

    class Asked:
        def _monitor_workers(self, worker_group: str) -> Result:
            assert worker_group == "all"
            return Result()

    assert isinstance(
        compat.make_reporting_agent(Asked, told.append)()._monitor_workers("all"), Result
    )
    assert told == [{1: (17, -9)}]
    assert compat.make_reporting_agent(Result, told.append) is Result
    Asked._monitor_workers = lambda self, worker_group: None  # type: ignore[assignment,return-value,misc]
    compat.make_reporting_agent(Asked, told.append)()._monitor_workers("all")
    assert told[1:] == [{}]


def test_torchs_agent_can_be_asked() -> None:
    """Where this fails, a launcher knows of failures by the kernel's word only."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    kind = compat.make_reporting_agent(LocalElasticAgent, lambda failures: None)
    assert issubclass(kind, LocalElasticAgent) and kind is not LocalElasticAgent


def test_the_store_of_a_process_group(tmp_path: Path) -> None:
    """None without a group, and of a torch that does not say."""
    import torch.distributed as dist

    assert compat.default_store() is None
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        store = compat.default_store()
        store.set("word", b"yes")
        assert store is compat.default_store() and store.get("word") == b"yes"
        with pytest.MonkeyPatch.context() as patched:
            patched.delattr(dist.distributed_c10d, "_get_default_store")
            assert compat.default_store() is None
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_gloos_threads_take_no_core_from_one_that_computes(tmp_path: Path) -> None:
    """Where this fails, collectives between CPUs that a step has many of take milliseconds each."""
    import torch.distributed as dist

    assert compat.waiting_threads() == [] and compat.share_cores() == 0
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        end = time.monotonic() + 10.0
        while not compat.waiting_threads() and time.monotonic() < end:
            time.sleep(0.01)  # a thread has its name a moment after its beginning
        threads = compat.waiting_threads()
        assert threads and os.getpid() not in threads
        assert compat.share_cores() == len(threads) and compat.share_cores() == 0
        assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    finally:
        dist.destroy_process_group()


def test_modes_of_the_calling_thread() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    assert not compat.has_modes() and compat.active_modes() == []
    with Mode() as function, compat.TorchDispatchMode() as dispatch:
        assert compat.has_modes() and compat.active_modes() == [function, dispatch]
        assert compat.default_device_of(function) is None
    with torch.device("meta"):
        (mode,) = compat.active_modes()
        assert compat.default_device_of(mode) == torch.device("meta")
    assert not compat.has_saved_tensor_hooks()
    with torch.autograd.graph.save_on_cpu():
        assert compat.has_saved_tensor_hooks() and compat.has_modes()
    assert not compat.has_modes()


def test_modes_that_this_torch_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "_len_torch_function_stack", "_len_torch_dispatch_stack", "_get_function_stack_at",
        "_get_dispatch_stack_at", "_autograd",
    ):  # fmt: skip
        monkeypatch.delattr(torch._C, name)
    assert not compat.has_modes() and compat.active_modes() == []
