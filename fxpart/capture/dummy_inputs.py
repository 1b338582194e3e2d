"""Create a batch for a transformers model: its main inputs, and labels that give a loss.

``dummy_inputs`` itself has few tokens, and is often wrong for image and speech models; only its
keys are used. The labels that a head takes are found by running it on fake tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fxpart.capture.call_arguments import split_batch_arguments
from fxpart.capture.context_managers import prepare_capture
from fxpart.capture.failure_causes import find_source_line, summarize_exception
from fxpart.capture.fake_tensors import has_no_data, replace_with_fakes
from fxpart.capture.flat_batch import flatten_batch
from fxpart.capture.model_with_loss import LOSS_KEYS, ModelWithLoss
from fxpart.capture.shape_probe import ShapeProbe
from fxpart.errors import error

LENGTH = 128
_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_target_positions")


def transformers_batch(model: Any, rows: int) -> dict[str, Any]:
    """Return the first batch that gives a loss, else the first that runs; else raise FXP102.

    For a model without data, failures on fake tensors are ignored and the first batch is returned.
    """
    runs: dict[str, Any] | None = None
    failures: list[Exception] = []
    candidates = list(_candidates(model, rows))
    for batch in candidates:
        kind = _loss_kind(model, batch)
        if kind == "output":
            return batch
        if isinstance(kind, Exception):
            failures.append(kind)
        else:
            runs = runs or batch
    if runs is not None:
        return runs
    if has_no_data(model):
        return candidates[0]
    raise error(
        "FXP102",
        where=type(model).__name__,
        why=f"the inputs inferred from its configuration fail: {summarize_exception(failures[-1])} "
        f"({find_source_line(failures[-1])})",
        fix="pass example_inputs: a dict of keyword arguments, including labels",
    )


def _loss_kind(model: nn.Module, batch: dict[str, Any]) -> str | Exception:
    """Return the kind of loss of a run on this batch, or its exception."""
    parts = flatten_batch(batch)
    whole = ModelWithLoss(model, None, split_batch_arguments(model, None, parts, has_kwargs=False))
    with prepare_capture(model, model.training), replace_with_fakes(model) as mode:
        trial = ShapeProbe(whole, mode)
        failure = trial.choose(parts.tensors)
        if failure is not None:
            return failure
        shapes = trial.run(parts.tensors)
    return next(kind for kind, key in LOSS_KEYS.items() if key in shapes)


def _candidates(model: Any, rows: int) -> Iterator[dict[str, Any]]:
    """Yield batches to try: with each kind of label first, then without labels."""
    maker = _DummyBatchFactory(model, rows)
    for inputs in maker.inputs():
        for labels in maker.labels(inputs):
            bare = {k: v for k, v in inputs.items() if not k.startswith("decoder_")}
            if bare != inputs:
                yield {**bare, **labels}
            yield {**inputs, **labels}
    yield from maker.inputs()


class _DummyBatchFactory:
    """Creates inputs and labels for one model from its configuration, with a fixed seed."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model = model
        self.rows = rows
        self.takes = set(inspect.signature(model.forward).parameters)
        self.generator = torch.Generator().manual_seed(0)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if self.device.type == "meta":
            self.device = torch.device("cpu")
        config = model.config
        self.configs = [config]
        for name in ("text_config", "vision_config", "encoder", "decoder"):
            if hasattr(getattr(config, name, None), "to_dict"):
                self.configs.append(getattr(config, name))
        limits = [self.setting(name, LENGTH) for name in _LENGTH_NAMES]
        self.length = max(2, min(LENGTH, *limits))

    def setting(self, name: str, default: int) -> int:
        """Return the first configuration's positive integer value of ``name``."""
        for config in self.configs:
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                return value
        return default

    def ids(self, shape: Sequence[int], limit: int) -> torch.Tensor:
        """Return random ids below ``limit``, avoiding 0, which is often padding, if possible."""
        low = 1 if limit > 1 else 0
        values = torch.randint(low, max(limit, low + 1), tuple(shape), generator=self.generator)
        return values.to(self.device)

    def inputs(self) -> Iterator[dict[str, Any]]:
        """Yield inputs of the model's main kind; with and without images for two-tower models."""
        extra = {"return_loss": True} if "return_loss" in self.takes else {}
        main = getattr(self.model, "main_input_name", "input_ids")
        if main == "pixel_values":
            yield {main: self.image(), **extra}
        elif main == "input_features":
            bins = self.setting("num_mel_bins", 80)
            shape = (self.rows, bins, 2 * self.setting("max_source_positions", 1500))
            yield {main: self.noise(shape)}
        elif main == "input_values":
            yield {main: self.noise((self.rows, 16000))}
        else:
            tokens = self.tokens()
            if "pixel_values" in self.takes and hasattr(self.model.config, "vision_config"):
                yield {**tokens, "pixel_values": self.image(), **extra}
            yield tokens

    def tokens(self) -> dict[str, Any]:
        """Return the integer tensors that ``dummy_inputs`` names, as [rows, length]."""
        vocabulary = self.setting("vocab_size", 8)
        batch: dict[str, Any] = {}
        for name, value in self.model.dummy_inputs.items():
            if not isinstance(value, torch.Tensor) or value.dim() != 2:
                continue
            shape: tuple[int, ...] = (self.rows, self.length)
            if "MultipleChoice" in type(self.model).__name__:
                shape = (self.rows, 2, self.length)
            if "mask" in name:
                batch[name] = torch.ones(shape, dtype=torch.int64, device=self.device)
            else:
                batch[name] = self.ids(shape, vocabulary)
        return batch or {"input_ids": self.ids((self.rows, self.length), vocabulary)}

    def image(self) -> torch.Tensor:
        """Return noise of the configured image size: [rows, channels, height, width]."""
        size: Any = 224
        for config in reversed(self.configs):
            size = getattr(config, "image_size", None) or size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return self.noise((self.rows, self.setting("num_channels", 3), int(height), int(width)))

    def noise(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self.generator).to(self.device)

    def labels(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield labels of every kind that forward accepts, the likely kind first."""
        if {"start_positions", "end_positions"} <= self.takes and "labels" not in self.takes:
            spans = {n: self.ids((self.rows,), self.length) for n in ("start_positions",)}
            yield {**spans, "end_positions": spans["start_positions"].clone()}
            return
        if "labels" not in self.takes:
            return
        classes = int(getattr(self.model.config, "num_labels", 2) or 2)
        ids = inputs.get("input_ids")
        shape = tuple(ids.shape) if ids is not None else (self.rows, min(self.length, 32))
        kinds = {
            "ids": lambda: self.ids(shape, self.setting("vocab_size", 8)),
            "class": lambda: self.ids((self.rows,), classes),
            "token": lambda: self.ids(shape, classes),
            "many": lambda: (
                torch.rand((self.rows, classes), generator=self.generator).round().to(self.device)
            ),
            "pixel": lambda: self.ids((self.rows, *self.image().shape[2:]), classes),
        }
        for kind in self._order(kinds):
            labels = {"labels": kinds[kind]()}
            if "next_sentence_label" in self.takes:
                labels["next_sentence_label"] = self.ids((self.rows,), 2)
            yield labels

    def _order(self, kinds: dict[str, Any]) -> list[str]:
        name = type(self.model).__name__
        first = next(
            (
                kind
                for word, kind in (
                    ("TokenClassification", "token"),
                    ("Segmentation", "pixel"),
                    ("Classification", "class"),
                    ("NextSentence", "class"),
                    ("MultipleChoice", "class"),
                )
                if word in name
            ),
            "ids",
        )
        wanted = getattr(self.model.config, "problem_type", None)
        if wanted in ("regression", "multi_label_classification"):
            first = "many"
        return sorted(kinds, key=lambda kind: kind != first)
