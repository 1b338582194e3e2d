"""Classes of ops, each with its own calibration factor.

Ops of one class are bound by the same resource (arithmetic, memory, a fixed cost) in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from .contractions import PRODUCTS, SPECIAL
from .memory_traffic import FILLS, VIEWS

if TYPE_CHECKING:
    from fxpart.costs import OpSpec

OpClass = Literal[
    "matmul",
    "convolution",
    "attention",
    "normalisation",
    "pointwise",
    "random",
    "reduction",
    "embedding",
    "copy",
    "loss",
    "other",
]
CLASSES: tuple[OpClass, ...] = get_args(OpClass)
# Besides the classes: the overhead of a call within a stage, independent of its computation
# (autograd's records, the interpreter). Counted as CALL seconds before calibration.
CALLS = "calls"
CALL = 3e-6

_NAMES: dict[OpClass, str] = {
    "normalisation": """batch_norm layer_norm group_norm instance_norm rms_norm native_batch_norm
        native_layer_norm native_group_norm _native_batch_norm_legit _batch_norm_impl_index
        cudnn_batch_norm local_response_norm _fused_rms_norm _native_batch_norm_legit_functional
        softmax _softmax _safe_softmax log_softmax _log_softmax normalize renorm weight_norm
        _weight_norm batch_norm_rows""",
    "pointwise": """abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh
        bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
        ceil celu clamp clamp_max clamp_min clip complex conj_physical copysign cos cosh deg2rad
        digamma div divide elu eq erf erfc erfinv exp exp2 expm1 fix float_power floor
        floor_divide fmax fmin fmod frac ge gelu glu greater greater_equal gt hardshrink
        hardsigmoid hardswish hardtanh heaviside hypot i0 isclose isfinite isinf isnan ldexp le
        leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp
        logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum
        minimum mish mul multiply nan_to_num ne neg negative not_equal polar positive pow prelu
        rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit
        silu sin sinc sinh softplus softshrink sqrt square sub subtract tan tanh threshold
        true_divide trunc where xlogy __and__ __or__ __xor__ __invert__ special_erf
        special_expit fill zero special_xlog1py special_log1p softmin tanhshrink softsign
        __rsub__ __rpow__""",
    "random": """dropout native_dropout alpha_dropout feature_dropout feature_alpha_dropout
        bernoulli rand randn randint rand_like randn_like randint_like randperm normal uniform
        multinomial random_shard rrelu""",
    "reduction": """adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
        adaptive_max_pool2d adaptive_max_pool3d all amax amin aminmax any argmax argmin argsort
        avg_pool1d avg_pool2d avg_pool3d bincount count_nonzero cummax cummin cumprod cumsum dist
        frobenius_norm kthvalue linalg_vector_norm linalg_norm logcumsumexp logsumexp max
        max_pool1d max_pool2d max_pool2d_with_indices max_pool3d max_pool1d_with_indices
        max_pool3d_with_indices mean median min mode msort nanmean nansum norm prod quantile
        segment_reduce sort std std_mean sum sum_to_size topk trace unique_consecutive unique_dim
        _unique2 var var_mean searchsorted bucketize _adaptive_avg_pool2d linalg_vecdot
        fractional_max_pool2d cosine_similarity pairwise_distance""",
    "embedding": """embedding embedding_bag _embedding_bag embedding_renorm gather index
        index_select take take_along_dim scatter scatter_add scatter_reduce index_put index_add
        index_copy index_fill _index_put_impl masked_scatter masked_select index_reduce put nonzero
        one_hot _unsafe_index _unsafe_index_put grid_sampler grid_sampler_2d grid_sampler_3d
        isin""",
    "copy": """cat concat concatenate stack hstack vstack dstack column_stack row_stack clone copy
        to type_as _to_copy float half bfloat16 double int long bool repeat tile repeat_interleave
        flip fliplr flipud roll rot90 pad constant_pad_nd reflection_pad1d reflection_pad2d
        reflection_pad3d replication_pad1d replication_pad2d replication_pad3d pixel_shuffle
        pixel_unshuffle channel_shuffle native_channel_shuffle tril triu diag diag_embed diagflat
        block_diag lift_fresh_copy im2col col2im slice_scatter select_scatter diagonal_scatter
        as_strided_scatter broadcast_tensors meshgrid unflatten_dense_tensors ravel atleast_1d
        atleast_2d atleast_3d upsample_nearest1d upsample_nearest2d upsample_nearest3d
        upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d detach_copy
        contiguous alias_copy expand_copy permute_copy view_copy slice_copy squeeze_copy
        unsqueeze_copy transpose_copy t_copy select_copy split_copy unbind_copy empty empty_like
        new_empty empty_strided new_empty_strided empty_permuted full full_like scalar_tensor
        assert_shape size sym_size sym_numel sym_stride item _local_scalar_dense data
        _assert_tensor_metadata _assert_async _assert_scalar hann_window hamming_window
        cartesian_prod combinations vander as_tensor tensor""",
    "loss": """cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward mse_loss l1_loss
        smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits
        ctc_loss _ctc_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss
        multi_margin_loss multilabel_margin_loss poisson_nll_loss soft_margin_loss
        triplet_margin_loss gaussian_nll_loss cross_entropy_vocab nll_loss2d_forward""",
    "attention": """_scaled_dot_product_attention_math scaled_dot_product_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu
        _native_multi_head_attention _scaled_dot_product_fused_attention_overrideable
        flex_attention attention_rows""",
    "matmul": """addr outer ger kron cdist chain_matmul linalg_matmul linalg_multi_dot cross
        trilinear _trilinear matrix_power""",
}  # fmt: skip


def _table() -> dict[str, OpClass]:
    """Return op -> class: by name, else by the rule that counts its FLOPs, views last."""
    found: dict[str, OpClass] = {}
    for key in (*VIEWS, *FILLS):
        found[key] = "copy"
    for key in (*PRODUCTS, *SPECIAL):
        convolves = "conv" in key
        found[key] = "convolution" if convolves else "attention" if "attention" in key else "matmul"
    for kind, names in _NAMES.items():
        found.update(dict.fromkeys(names.split(), kind))
    return found


_CLASS = _table()


def op_class(spec: OpSpec) -> OpClass:
    """Return the class of an op by its name; "other" for an unknown name.

    Recurrent layers and mixtures of experts are matrix products. Views count as copies.
    """
    key = spec.key
    found = _CLASS.get(key) or _CLASS.get(key.rpartition(".")[2])
    if found is None and "." in key:
        # An op of another package: its class is part of its name.
        for part, kind in _NAME_PARTS:
            if part in key:
                return kind
    return found or "other"


_NAME_PARTS: tuple[tuple[str, OpClass], ...] = (
    ("attention", "attention"),
    ("norm", "normalisation"),
    ("cross_entropy", "loss"),
    ("conv", "convolution"),
    ("embedding", "embedding"),
    ("mm", "matmul"),
)
