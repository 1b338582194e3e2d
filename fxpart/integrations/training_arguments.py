"""TrainingArguments that a plan cannot honor; they are refused together, none is ignored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fxpart.environment import read_launch
from fxpart.errors import FxpartError, Problem

# Names of optim= that make optimizers of torch, or others whose step fxpart tests.
_OPTIMIZERS = frozenset(
    ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd", "stable_adamw")
)
# By name: the values that are honored, why others are not, and what to use instead.
_REFUSED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "fp16": ((False,), "float16 needs loss scaling, which fxpart does not implement", "use bf16"),
    **dict.fromkeys(
        ("fp16_full_eval", "bf16_full_eval"),
        (
            (False,),
            "evaluation runs the program of the plan, in the precision of training",
            "use bf16=True, or leave it out",
        ),
    ),
    **dict.fromkeys(
        ("fsdp", "deepspeed", "parallelism_config"),
        (
            (None, False, "", []),
            "the plan decides how the model is divided",
            "pass constraints=, such as {'zero': 3} or {'tp': 2}, instead",
        ),
    ),
    **dict.fromkeys(
        (
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
        ),
        ((None,), "the plan's ranks do not use DistributedDataParallel", "leave it out"),
    ),
    "torch_compile_mode": (
        (None,),
        "stages are compiled without a mode",
        "use torch_compile_backend= alone",
    ),
    "use_liger_kernel": (
        (False,),
        "it replaces layers of the model when training starts",
        "apply it to the model before the Trainer is created, if its kernels can be captured",
    ),
    "neftune_noise_alpha": (
        (None,),
        "a forward hook adds the noise, and a captured program runs no hooks",
        "add the noise in the model's forward",
    ),
    "auto_find_batch_size": (
        (False,),
        "the plan is made for a batch size, whose memory it predicts",
        "set per_device_train_batch_size",
    ),
    "debug": (
        ("", [], None),
        "its hooks on modules do not run in a captured program",
        "use trainer.engine.record(), or leave it out",
    ),
    "torch_empty_cache_steps": (
        (None,),
        "the memory of a step follows the plan's schedule",
        "leave it out",
    ),
}


def check_training_arguments(args: Any) -> None:
    """Raise FXP109 and FXP115 with every argument that a plan cannot honor."""
    problems = list(_find_problems(args))
    if problems:
        raise FxpartError(problems)


def get_recompute(args: Any) -> bool:
    """Return whether activations are recomputed (``gradient_checkpointing`` before 5.20)."""
    new = getattr(args, "activation_checkpointing", None)
    return bool(new) or bool(getattr(args, "gradient_checkpointing", None))


@contextmanager
def disable_checkpointing(args: Any) -> Iterator[None]:
    """Keep transformers from checkpointing layers; the plan's stages recompute instead."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    kept = {name: getattr(args, name) for name in names if getattr(args, name, None)}
    for name in kept:
        setattr(args, name, False)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(args, name, value)


def _find_problems(args: Any) -> Iterator[Problem]:
    for name, (honored, why, fix) in _REFUSED.items():
        value = getattr(args, name, None)
        if value is not None and value not in honored:
            yield _problem(f"{name}={value!r}", why, fix)
    if str(getattr(args.optim, "value", args.optim)) not in _OPTIMIZERS:
        name = str(getattr(args.optim, "value", args.optim))
        yield Problem(
            "FXP115", f"TrainingArguments(optim={name!r})",
            "it makes no optimizer of torch that ranks can copy for their parts of the parameters",
            f"use one of {', '.join(sorted(_OPTIMIZERS))}, or pass optimizers=",
        )  # fmt: skip
    yield from _find_data_problems(args)
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        given = getattr(args, name, None) or {}
        for key in given if isinstance(given, dict) else ():
            if key != "use_reentrant":
                yield _problem(
                    f"{name}[{key!r}]",
                    "activation checkpointing becomes full recomputation of the plan's stages",
                    "leave it out, or pass a plan that recomputes some stages",
                )


def _find_data_problems(args: Any) -> Iterator[Problem]:
    config, alone = args.accelerator_config, args.world_size == 1
    launch = read_launch()
    if launch is not None and launch.world != args.world_size:
        yield _problem(
            f"world_size {args.world_size}",
            f"the launcher has started {launch.world} processes, which transformers does not use "
            "on this device",
            "pass use_cpu=True to train on CPUs",
        )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name, None):
            yield _problem(
                f"accelerator_config[{name!r}]",
                "every rank reads the global batch: per_device_train_batch_size times the ranks",
                "leave it out",
            )
    if not alone and not getattr(args, "average_tokens_across_devices", True):
        yield _problem(
            "average_tokens_across_devices=False",
            "the loss is the mean over all tokens of the global batch on any plan",
            "leave it out",
        )
    if not alone and getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        yield _problem(
            "train_sampling_strategy='batch_rebalance'",
            "it forms the batches of data-parallel ranks, and every rank reads the global batch",
            "use 'group_by_length'",
        )


def _problem(what: str, why: str, fix: str) -> Problem:
    return Problem("FXP109", f"TrainingArguments({what})", why, fix)
