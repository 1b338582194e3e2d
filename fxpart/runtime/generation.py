"""Generation of tokens by pipelined forwards: options, inputs, and the choice of the next token."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpart.errors import error
from fxpart.program.spec import InputSpec
from fxpart.runtime.batch.outputs import OutputSpec
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.trainer_options import is_count

Prompts = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The keyword arguments of :meth:`~fxpart.runtime.inference.Inference.generate`."""

    max_new_tokens: int = 20
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    eos_token_id: int | None = None
    logits: str | None = None
    make_batch: Callable[[torch.Tensor], Any] | None = None

    def check(self) -> GenerationOptions:
        """Raise FXP109 for invalid values."""
        wrong = ""
        if not is_count(self.max_new_tokens, 1):
            wrong = "max_new_tokens must be an integer of at least 1"
        elif not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            wrong = "temperature must be 0 (the most likely token) or a number above it"
        elif self.top_k is not None and not is_count(self.top_k, 1):
            wrong = "top_k must be an integer of at least 1"
        elif not isinstance(self.seed, int):
            wrong = "seed must be an integer"
        elif self.top_p is not None and not _is_number(self.top_p):
            wrong = "top_p must be a number"
        elif self.top_p is not None and not 0 < self.top_p <= 1:
            wrong = "top_p must be more than 0 and at most 1"
        elif not self.temperature and (self.top_k, self.top_p) != (None, None):
            wrong = "top_k and top_p need a temperature"
        if wrong:
            raise error("FXP109", where="generate", why=wrong, fix="correct the argument")
        return self

    def describe(self) -> str:
        """Return the options that must be equal on all ranks, as text."""
        return (
            f"{self.max_new_tokens} tokens at {self.temperature} of {self.top_k} {self.top_p} "
            f"seed {self.seed} end {self.eos_token_id} logits {self.logits}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


class TokenSequences:
    """The prompts with the tokens that were added so far; equal on every rank.

    Rows may have different lengths. A row has ended when it has ``eos_token_id``.
    """

    def __init__(self, prompts: Prompts, eos_token_id: int | None) -> None:
        """prompts: [rows, length], or one tensor for each row. FXP105 for other values."""
        self._eos, self._is_tensor = eos_token_id, isinstance(prompts, torch.Tensor)
        rows = [row.tolist() for row in prompts] if _are_tokens(prompts) else []
        if not rows or not all(rows):
            raise error(
                "FXP105", where="the prompts of generate",
                why="they are not integer tokens with at least one row and one token in each row",
                fix="pass a tensor of shape [rows, length], or one tensor for each row",
            )  # fmt: skip
        self.rows: list[list[int]] = rows
        self._ended = [False] * len(rows)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each row."""
        return [len(row) for row in self.rows]

    @property
    def positions(self) -> list[int]:
        """The position of the last token of each row; of ended rows that of a row that has not."""
        going = [
            length - 1 for length, end in zip(self.lengths, self._ended, strict=True) if not end
        ]
        return [
            going[0] if end else length - 1
            for length, end in zip(self.lengths, self._ended, strict=True)
        ]

    @property
    def ended(self) -> bool:
        """Whether every row has ended."""
        return all(self._ended)

    def pad(self, length: int) -> torch.Tensor:
        """Return all rows as [rows, length], with zeros after their tokens."""
        return torch.tensor([row + [0] * (length - len(row)) for row in self.rows])

    def append(self, tokens: Sequence[int]) -> None:
        """Add a token to each row that has not ended."""
        for index, token in enumerate(tokens):
            if not self._ended[index]:
                self.rows[index].append(token)
                self._ended[index] = token == self._eos

    def build(self) -> torch.Tensor | list[torch.Tensor]:
        """Return the rows in the form of the prompts; shorter rows end in ``eos_token_id``."""
        if not self._is_tensor:
            return [torch.tensor(row) for row in self.rows]
        longest = max(self.lengths)
        end = [0 if self._eos is None else self._eos]
        return torch.tensor([row + end * (longest - len(row)) for row in self.rows])


class TokenInputs:
    """Builds the batch of a model of tokens: its tokens, and ones as its attention mask."""

    def __init__(
        self,
        inputs: Sequence[InputSpec],
        read: Collection[str],
        options: GenerationOptions,
        multiple: int = 1,
    ) -> None:
        """inputs: of the program. read: those that the outputs depend on. FXP109 without tokens.

        multiple: the divisor of the number of tokens in a row.
        """
        self._multiple = multiple
        self._make = options.make_batch
        tokens = [spec for spec in inputs if _has_tokens(spec) and spec.name in read]
        # Sizes may be read from labels, whose values do not matter.
        self._labels = [spec for spec in inputs if _has_tokens(spec) and spec.name not in read]
        named = [spec for spec in tokens if spec.path[-1] == "input_ids"]
        if not tokens:
            raise error(
                "FXP109", where="generate",
                why=f"no input of {', '.join(spec.name for spec in inputs)} has integer tokens of "
                "shape [rows, length]", fix="generate with a causal language model",
            )  # fmt: skip
        self._tokens = (named or tokens)[0]
        self._masks = [spec for spec in inputs if spec.path[-1] == "attention_mask"]
        length = self._tokens.shape[1]
        self._length = length if isinstance(length, int) else None

    def check(self, longest: int) -> None:
        """Raise FXP109 if the program takes a fixed length, and it is less than ``longest``."""
        if self._length is not None and longest > self._length:
            raise error(
                "FXP109", where="generate",
                why=f"prompts and new tokens have {longest} tokens, and the program takes "
                f"{self._length}", fix="use shorter prompts or fewer tokens, or compile with "
                "longer example inputs",
            )  # fmt: skip

    def build(self, sequences: TokenSequences) -> Any:
        """Return the batch with all tokens so far; a causal model ignores the padding."""
        longest = -(-max(sequences.lengths) // self._multiple) * self._multiple
        tokens = sequences.pad(longest if self._length is None else self._length)
        if self._make is not None:
            return self._make(tokens)
        found = {
            spec.path: tokens.to(torch_dtype(spec.dtype)) for spec in (self._tokens, *self._labels)
        }
        for spec in self._masks:
            found[spec.path] = torch.ones(tokens.shape, dtype=torch_dtype(spec.dtype))
        return _nest(found)


def select_logits(
    specs: Sequence[OutputSpec], dims: Mapping[str, int], wanted: str | None
) -> OutputSpec:
    """Return the output with the logits: the given one, "logits", or the only one.

    dims: the number of dims of each value of the program. FXP109 if there is no such output, or it
    has no shape [rows, length, vocabulary].
    """
    names = [spec.name for spec in specs]
    name = wanted or ("logits" if "logits" in names else names[0] if len(names) == 1 else None)
    for spec in specs:
        if spec.name == name and dims.get(spec.value, 3) == 3:
            return spec
    known = f"{name} is not one of them with" if name else "it is not known which of them has"
    raise error(
        "FXP109", where="generate", why=f"the model returns {', '.join(names)}, and {known} logits "
        "of shape [rows, length, vocabulary]",
        fix="pass the name of the logits: generate(..., logits=)",
    )  # fmt: skip


def choose_tokens(
    logits: torch.Tensor, options: GenerationOptions, draw: torch.Generator
) -> list[int]:
    """Return a token for each row of [rows, vocabulary], as ``generate`` of transformers does.

    The most likely one without a temperature; otherwise a draw from the probabilities after
    temperature, top_k and top_p, in this order.
    """
    scores = logits.detach().float().cpu()
    if not options.temperature:
        return scores.argmax(-1).tolist()
    scores = scores / options.temperature
    if options.top_k is not None:
        least = torch.topk(scores, min(options.top_k, scores.shape[-1]))[0][:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if options.top_p is not None and options.top_p < 1:
        ordered, indices = torch.sort(scores, descending=False)
        unlikely = ordered.softmax(-1).cumsum(-1) <= 1 - options.top_p
        unlikely[:, -1:] = False
        scores = scores.masked_fill(unlikely.scatter(1, indices, unlikely), -torch.inf)
    return torch.multinomial(scores.softmax(-1), 1, generator=draw).squeeze(1).tolist()


def _are_tokens(prompts: Any) -> bool:
    """Return whether the prompts are integer tensors of the right number of dims."""
    if isinstance(prompts, torch.Tensor):
        return prompts.dim() == 2 and _is_integer(prompts)
    return all(isinstance(r, torch.Tensor) and r.dim() == 1 and _is_integer(r) for r in prompts)


def _is_integer(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64)


def _has_tokens(spec: InputSpec) -> bool:
    """Return whether an input has integers of shape [rows, length] and is no mask."""
    whole = spec.dtype in ("int32", "int64") and len(spec.shape) == 2 and spec.batch_dim == 0
    return whole and spec.path[-1] != "attention_mask"


def _nest(found: Mapping[tuple[str | int, ...], torch.Tensor]) -> Any:
    """Return nested dicts and tuples with the tensors at their paths, None at other places."""
    if () in found:
        return found[()]
    inner: dict[str | int, dict[tuple[str | int, ...], torch.Tensor]] = {}
    for (key, *rest), tensor in found.items():
        inner.setdefault(key, {})[tuple(rest)] = tensor
    if all(isinstance(key, int) for key in inner):
        last = max(int(key) for key in inner)
        return tuple(_nest(inner[at]) if at in inner else None for at in range(last + 1))
    return {key: _nest(values) for key, values in inner.items()}
