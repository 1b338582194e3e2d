"""FLOPs by formula against torch's own counter, op by op, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import sympy
import torch
import torch.nn.functional as F
from fxpart.costmodels.op_work import flops
from fxpart.costmodels.roofline import Roofline
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from fxpart.cluster.model import Cluster
from fxpart.collectives.experts import experts
from fxpart.compiler import KEY, NodeAnnotation
from fxpart.compiler.tensor_sizes import tensors as tensors_of
from fxpart.costs import OpSpec, TensorSpec
from fxpart.pricing.specs import Specs


class Call(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> object:
        return self.function(*args)


def ops_of(function: Callable[..., object], *tensors: torch.Tensor) -> list[OpSpec]:
    """The op specs of a function, gradients wanted as autograd would want them."""
    module = function if isinstance(function, nn.Module) else Call(function)
    exported = torch.export.export(module, tensors, strict=False)
    inputs = exported.graph_signature.user_inputs
    wanted = dict(zip(inputs, (t.requires_grad for t in tensors), strict=True))
    graph: fx.Graph = exported.graph
    for node in graph.nodes:
        grad = wanted.get(node.name, node.op == "placeholder")
        if node.op == "call_function":
            grad = any(n.meta[KEY].requires_grad for n in node.all_input_nodes)
        values = list(tensors_of(node.meta.get("val")))
        grad = grad and any(t.is_floating_point() for t in values)
        node.meta[KEY] = NodeAnnotation(requires_grad=grad, block=0)
    specs = Specs(())
    return [op for node in graph.nodes if (op := specs.op(node)) is not None]


def oracle(function: Callable[..., object], *tensors: torch.Tensor) -> tuple[int, int]:
    """FLOPs of the forward, and of forward and backward together, counted while they run."""
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math, torch.backends.mkldnn.flags(enabled=False):
        with FlopCounterMode(display=False) as forward:
            results = list(tensors_of(function(*tensors)))
        with FlopCounterMode(display=False) as backward:
            sum(r.float().sum() for r in results if r.requires_grad).backward()
    return forward.get_total_flops(), backward.get_total_flops()


def t(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=grad)


def einsum(equation: str) -> Callable[..., torch.Tensor]:
    return lambda *tensors: torch.einsum(equation, *tensors)


CASES: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "mm": (torch.mm, (t(3, 5), t(5, 7))),
    "mm, one gradient": (torch.mm, (t(3, 5, grad=False), t(5, 7))),
    "addmm": (torch.addmm, (t(7), t(3, 5), t(5, 7))),
    "addmm, bias alone": (torch.addmm, (t(7), t(3, 5, grad=False), t(5, 7, grad=False))),
    "bmm": (torch.bmm, (t(2, 3, 5), t(2, 5, 7))),
    "baddbmm": (torch.baddbmm, (t(2, 3, 7), t(2, 3, 5), t(2, 5, 7))),
    "linear": (F.linear, (t(2, 3, 5), t(7, 5), t(7))),
    "linear, frozen weight": (F.linear, (t(2, 3, 5), t(7, 5, grad=False), t(7))),
    "linear, first layer": (F.linear, (t(2, 3, 5, grad=False), t(7, 5), t(7))),
    "matmul, one batch": (torch.matmul, (t(4, 3, 5), t(5, 7))),
    "matmul, same batch": (torch.matmul, (t(2, 4, 3, 5), t(2, 4, 5, 7))),
    "matmul, broadcast": (torch.matmul, (t(2, 1, 3, 5), t(1, 4, 5, 7))),
    "einsum, attention": (
        lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b),
        (t(2, 3, 4, 5), t(2, 3, 6, 5)),
    ),
    "einsum, dots": (einsum("...ij,jk->...ik"), (t(2, 3, 4, 5), t(5, 6))),
    "einsum, implicit": (einsum("ij,jk"), (t(4, 5), t(5, 6))),
    "einsum, summed alone": (einsum("ijx,jk->ik"), (t(4, 5, 3), t(5, 6))),
    "einsum, three": (
        lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c),
        (t(4, 5), t(5, 6), t(6, 7)),
    ),
    "conv1d": (F.conv1d, (t(2, 3, 9), t(4, 3, 3), t(4))),
    "conv2d": (
        partial(F.conv2d, stride=2, padding=1),
        (t(2, 3, 9, 8), t(4, 3, 3, 3), t(4)),
    ),
    "conv2d, one image": (F.conv2d, (t(3, 9, 8), t(4, 3, 3, 3), t(4))),
    "conv2d, dilated": (partial(F.conv2d, dilation=2), (t(2, 3, 9, 8), t(4, 3, 3, 3))),
    "conv2d, first layer": (F.conv2d, (t(2, 3, 9, 8, grad=False), t(4, 3, 3, 3), t(4))),
    "conv3d": (F.conv3d, (t(1, 2, 5, 6, 7), t(3, 2, 2, 2, 2))),
    "conv_transpose2d": (
        partial(F.conv_transpose2d, stride=2),
        (t(2, 3, 5, 6), t(3, 4, 2, 2)),
    ),
    "conv_transpose1d": (partial(F.conv_transpose1d, stride=2), (t(2, 3, 5), t(3, 4, 2))),
    "pointwise": (lambda x: torch.nn.functional.gelu(x).softmax(-1).sum(0), (t(4, 5),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_torchs_counter(name: str) -> None:
    function, tensors = CASES[name]
    forward, backward = oracle(function, *tensors)
    ops = ops_of(function, *tensors)
    assert sum(flops(op) for op in ops) == forward
    assert sum(flops(op, backward=True) for op in ops) == backward


def test_grouped_convolution() -> None:
    """torch's counter forgets the groups in the weight's gradient; the rest must agree with it."""
    x, w = t(2, 4, 9, 8), t(6, 2, 3, 3)
    call = lambda x, w: F.conv2d(x, w, groups=2)  # noqa: E731
    forward, _ = oracle(call, x, w)
    (op,) = ops_of(call, x, w)
    assert flops(op) == forward
    _, only_input = oracle(call, x.detach().requires_grad_(), w.detach())
    assert flops(op, backward=True) == 2 * only_input == 2 * forward


@pytest.mark.slow
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_recurrent(cell: type[nn.Module], both: bool, wanted: bool) -> None:
    model = cell(5, 6, num_layers=2, bidirectional=both, batch_first=True)
    x = torch.randn(3, 7, 5, requires_grad=wanted)
    forward, backward = oracle(model, x)
    ops = ops_of(model, x)
    assert sum(flops(op) for op in ops) == forward
    # the first step's state is zeros that want no gradient; the formula does not tell steps apart
    steps = sum(flops(op, backward=True) for op in ops)
    assert backward <= steps <= backward * 1.15


def test_fused_attention_forward_and_backward() -> None:
    """The fused kernels recompute the scores: torch's formula for them is the oracle."""
    q, k, v = (torch.randn(2, 3, s, 8, device="meta", requires_grad=True) for s in (5, 9, 9))
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    with FlopCounterMode(display=False) as forward:
        result = fused(q, k, v, None, True)[0]
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    real = [torch.randn(t.shape, requires_grad=True) for t in (q, k, v)]
    (op,) = ops_of(F.scaled_dot_product_attention, *real)
    assert flops(op) == forward.get_total_flops()
    assert flops(op, backward=True) == backward.get_total_flops()


def test_attention_in_parts() -> None:
    """The same without the recomputed scores is what the unfused path does."""
    tensors = t(2, 3, 5, 8), t(2, 3, 9, 8), t(2, 3, 9, 4)
    forward, backward = oracle(F.scaled_dot_product_attention, *tensors)
    (op,) = ops_of(F.scaled_dot_product_attention, *tensors)
    scores = 2 * 2 * 3 * 5 * 9 * 8
    assert flops(op) == forward
    assert flops(op, backward=True) == backward + scores


def test_gradient_count_without_positions() -> None:
    op = OpSpec(
        "aten.mm.default",
        (TensorSpec((2, 3), "float32"), TensorSpec((3, 4), "float32")),
        (TensorSpec((2, 4), "float32"),),
        gradients=2,
    )
    assert flops(op, backward=True) == 2 * flops(op) == 2 * 48
    assert flops(replace(op, gradients=0), backward=True) == 0


def test_llama_8b_block_in_symbols() -> None:
    """The closed form of one block: projections with 218,103,808 weights, and attention."""
    b, s = sympy.symbols("b s", integer=True, positive=True)

    def linear(outs: int, ins: int) -> OpSpec:
        return OpSpec(
            "aten.linear.default",
            (TensorSpec((b, s, ins), "bfloat16"), TensorSpec((outs, ins), "bfloat16")),
            (TensorSpec((b, s, outs), "bfloat16"),),
        )

    heads = TensorSpec((b, 32, s, 128), "bfloat16")
    attention = OpSpec("aten.scaled_dot_product_attention.default", (heads,) * 3, (heads,))
    mlp = [linear(14336, 4096), linear(14336, 4096), linear(4096, 14336)]
    qkvo = [linear(4096, 4096), linear(1024, 4096), linear(1024, 4096), linear(4096, 4096)]
    total = sum(flops(op) for op in (*qkvo, *mlp, attention))
    assert sympy.expand(total) == 16384 * b * s**2 + 436207616 * b * s


def test_a_mixture_costs_what_its_ops_cost() -> None:
    """As one op and as the ops that it combines: seconds, bytes and FLOPs, both directions."""
    tokens, width, inner, number, chosen = 4096, 1024, 1024, 8, 2
    shapes = [(tokens, width), (tokens, chosen), (number, 2 * inner, width), (number, width, inner)]
    hidden, weights, up, down = (
        torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes
    )
    index = torch.zeros(tokens, chosen, dtype=torch.int64)
    body = "silu.default %0; mul.Tensor %2 %1"
    call = partial(
        experts, up_bias=None, down_bias=None, body=body, parts="halves", plain=False,
        product="loop",
    )  # fmt: skip
    tensors = (hidden, index, weights, up, down)
    specs = tuple(TensorSpec(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in tensors)
    whole = OpSpec("fxpart.experts.default", specs, specs[:1], (("7", body),), 4, (0, 2, 3, 4))
    (device,) = Cluster.parse("1xh100").devices
    model = Roofline()
    for backward in (False, True):
        parts = [model.op(op, device, backward) for op in ops_of(call, *tensors)]
        cost = model.op(whole, device, backward)
        assert cost.flops == sum(part.flops for part in parts) == flops(whole, backward)
        assert cost.bytes == pytest.approx(sum(part.bytes for part in parts), rel=0.01)
        assert cost.seconds == pytest.approx(sum(part.seconds for part in parts), rel=0.02)
        apart = model.op(replace(whole, gradients=0, gradient_inputs=()), device, backward)
        assert apart.seconds == (0 if backward else cost.seconds)
