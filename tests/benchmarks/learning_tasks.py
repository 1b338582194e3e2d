"""Tasks on real data that comes with a package: what `learning.py` learns.

Imported by the benchmarks beside it, not run. scikit-learn's digits, and the source text of the
standard library; fixed splits, the same for every seed. A seed draws the initial weights and the
order of the batches.
"""

from __future__ import annotations

import hashlib
import importlib.util
import string
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from learning_jobs import CUT
from learning_models import CharacterGPT, ResidualCNN, ResidualMLP
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

State = Mapping[str, Tensor]
Batch = tuple[Tensor, Tensor]

# Plain text of some length, by many hands; the last ones are for validation.
TRAIN_MODULES = (
    "argparse", "ast", "bisect", "calendar", "cmd", "code", "configparser", "copy", "csv",
    "datetime", "difflib", "doctest", "enum", "fractions", "functools", "heapq", "inspect",
    "ipaddress", "locale", "mailbox", "optparse", "pdb", "pickle", "platform", "plistlib",
    "random", "shutil", "smtplib", "socket", "statistics", "subprocess", "tarfile", "textwrap",
    "threading", "traceback", "turtle", "typing", "uuid", "zipfile",
)  # fmt: skip
VALIDATION_MODULES = ("contextlib", "dataclasses", "queue", "sched", "shelve", "string", "weakref")
CHARACTERS = "\n" + "".join(c for c in string.printable if c.isprintable())
_DIGITS_TRAIN = 1200
_LENGTH = 32
_ROWS = 8
_WINDOWS = 512  # of the validation text, evenly spaced


@dataclass(frozen=True)
class Task:
    """Something to learn.

    model: a fresh one with weights of a seed. loss: of outputs and targets, their mean. batches:
    the global batches of a seed, as many as asked for. validation: inputs and targets, all at once.
    rows: of a batch. steps: updates of a run. rates: per optimizer the grid of learning rates.
    digest: of the data, so that results on other data are not mixed with these. data: in words.
    """

    name: str
    model: Callable[[int], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batches: Callable[[int, int], list[Batch]]
    validation: Batch
    rows: int
    steps: int
    rates: Mapping[str, tuple[float, ...]]
    digest: str
    data: str

    def scores(self, model: nn.Module, state: State) -> tuple[float, float]:
        """Loss and accuracy (0 to 1) of these weights on the validation data."""
        inputs, targets = self.validation
        with torch.no_grad():
            outputs = functional_call(model, dict(state), (inputs,))
            right = (outputs.argmax(-1) == targets).double().mean()
            return float(self.loss(outputs, targets)), float(right)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over all places, whatever their dims."""
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """A model with the initial weights of a seed; the caller's random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


# -- digits ---------------------------------------------------------------------------------------


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8) of mean 0 and deviation 1, and classes, in one fixed random order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("the digits are scikit-learn's: pip install -e '.[bench]'")
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)
    images = (images - images.mean()) / images.std()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(found.target)[order]


def digit_batches(rows: int) -> Callable[[int, int], list[Batch]]:
    """Batches that go through the training images in a new order each time."""

    def drawn(seed: int, steps: int) -> list[Batch]:
        images, classes = digits()
        generator = torch.Generator().manual_seed(1000 + seed)
        each = _DIGITS_TRAIN // rows  # a remainder waits for the next order
        picks: list[Tensor] = []
        while len(picks) < steps:
            order = torch.randperm(_DIGITS_TRAIN, generator=generator)
            picks += order[: each * rows].split(rows)
        return [(images[pick], classes[pick]) for pick in picks[:steps]]

    return drawn


def of_digits(name: str, make: Callable[[], nn.Module], **fields: object) -> Task:
    """A task on the digits."""
    images, classes = digits()
    rows = 32
    return Task(
        name=name,
        model=lambda seed: seeded(seed, make),
        loss=cross_entropy,
        batches=digit_batches(rows),
        validation=(images[_DIGITS_TRAIN:], classes[_DIGITS_TRAIN:]),
        rows=rows,
        digest=digest(images, classes),
        data=f"digits of scikit-learn, {_DIGITS_TRAIN} to train on,"
        f" {len(images) - _DIGITS_TRAIN} to validate",
        **fields,  # type: ignore[arg-type]
    )


# -- text -----------------------------------------------------------------------------------------


@cache
def text(modules: tuple[str, ...]) -> Tensor:
    """The source of these modules as numbers of CHARACTERS, one after another."""
    numbers = torch.full((256,), -1)
    numbers[list(CHARACTERS.encode())] = torch.arange(len(CHARACTERS))
    found = bytearray()
    for name in modules:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, name
        found += Path(spec.origin).read_bytes()
    every = numbers[torch.frombuffer(found, dtype=torch.uint8).long()]
    return every[every >= 0]


def windows(of: Tensor, starts: Tensor) -> Batch:
    """Characters from each start, and those that follow them."""
    places = starts[:, None] + torch.arange(_LENGTH + 1)
    taken = of[places]
    return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()


def text_batches(seed: int, steps: int) -> list[Batch]:
    """Windows from anywhere in the training text."""
    of = text(TRAIN_MODULES)
    generator = torch.Generator().manual_seed(1000 + seed)
    starts = torch.randint(0, len(of) - _LENGTH - 1, (steps, _ROWS), generator=generator)
    return [windows(of, row) for row in starts]


def of_text(**fields: object) -> Task:
    """The next character of Python source."""
    train, held = text(TRAIN_MODULES), text(VALIDATION_MODULES)
    starts = torch.linspace(0, len(held) - _LENGTH - 2, _WINDOWS).long()
    return Task(
        name="gpt",
        model=lambda seed: seeded(seed, lambda: CharacterGPT(len(CHARACTERS), _LENGTH)),
        loss=cross_entropy,
        batches=text_batches,
        validation=windows(held, starts),
        rows=_ROWS,
        digest=digest(train, held),
        data=f"source of {len(TRAIN_MODULES)} modules of the standard library"
        f" ({len(train):,} characters) to train on, {_WINDOWS} windows of {_LENGTH} characters of"
        f" {len(VALIDATION_MODULES)} others to validate",
        **fields,  # type: ignore[arg-type]
    )


def digest(*tensors: Tensor) -> str:
    """The first digits of SHA-256 over the tensors' bytes."""
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.numpy().tobytes())
    return made.hexdigest()[:16]


_ADAM = (0.0005, 0.002, 0.008)
_DIGIT_RATES = {"sgd": (0.003, 0.01, 0.03), "adamw": _ADAM, "nadam": _ADAM}
_TEXT_RATES = {
    "sgd": (0.02, 0.08, 0.32),
    "adamw": (0.001, 0.004, 0.016),
    "nadam": (0.001, 0.004, 0.016),
}

TASKS: Mapping[str, Callable[[], Task]] = {
    "mlp": lambda: of_digits("mlp", ResidualMLP, steps=600, rates=_DIGIT_RATES),
    "cnn": lambda: of_digits("cnn", ResidualCNN, steps=300, rates=_DIGIT_RATES),
    "gpt": lambda: of_text(steps=240, rates=_TEXT_RATES),
    f"gpt{CUT}": lambda: replace(task("gpt"), name=f"gpt{CUT}"),
}


@cache
def task(name: str) -> Task:
    """One of TASKS."""
    return TASKS[name]()
