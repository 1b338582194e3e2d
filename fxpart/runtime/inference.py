"""Evaluation and prediction: pipelined forwards in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
import torch
from torch import nn

from fxpart.errors import error
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.batch.batch_agreement import BatchAgreement, BatchSource
from fxpart.runtime.batch.batch_iterator import call_user_function, iterate_batches
from fxpart.runtime.batch.batch_reader import MicrobatchSplit
from fxpart.runtime.batch.mesh_rank_batch import get_dim_multiple, get_global_inputs
from fxpart.runtime.batch.outputs import Outputs, gather_outputs
from fxpart.runtime.batch.row_repetition import drop_repeated_rows
from fxpart.runtime.engine import PipelineEngine, PipelineResult
from fxpart.runtime.generation import (
    GenerationOptions,
    Prompts,
    TokenInputs,
    TokenSequences,
    choose_tokens,
    select_logits,
)
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.runtime.metrics import Metric, MetricTally
from fxpart.runtime.monitor.tensor_statistics import TensorStatistics, join_rows
from fxpart.runtime.trainer_base import TrainerBase
from fxpart.runtime.transport.agreement import agree, convert_transport_errors

Prediction = Callable[[bool], tuple[Sequence[MeshRank], Outputs]]
Evaluation = Callable[[], tuple[ProgramSpec, Mapping[int, nn.Module]] | Sequence[MeshRank]]


@dataclass(frozen=True)
class ForwardProgram:
    """A program that runs forwards only, with the outputs that it returns."""

    source: BatchSource
    engine: PipelineEngine
    outputs: Outputs


class Inference(TrainerBase):
    """Calls without gradients; every rank must make each call.

    activation_stages: returns the mesh ranks and outputs of ``activation_statistics``.
    """

    activation_stages: Callable[[], tuple[Sequence[MeshRank], Outputs]] | None = None

    def __init__(
        self,
        *args: Any,
        evaluation: Evaluation | None = None,
        prediction: Prediction | None = None,
        **kwargs: Any,
    ) -> None:
        """evaluation: returns the program and modules (or mesh ranks) of ``eval_step``.

        It is called by the first ``eval_step``; the program shares the state of the trainer's
        stages. prediction: returns the mesh ranks and outputs of ``predict``; its argument is
        whether to compute the loss, too. Others: see
        :class:`~fxpart.runtime.trainer_base.TrainerBase`.
        """
        super().__init__(*args, **kwargs)
        self._evaluation, self._prediction = evaluation, prediction
        self._programs: dict[str, ForwardProgram] = {}
        self._program_ranks = self.parts.ranks

    def eval_step(self, batch: Any, *, local: bool = False) -> torch.Tensor:
        """Return the loss of a batch in evaluation mode, equal on every rank."""
        self.pipeline.settle()
        return self._eval_loss(batch, local)[0]

    def predict(self, batch: Any, *, first_only: bool = False, local: bool = False) -> Any:
        """Return the model's outputs for a batch in evaluation mode, in the model's own structure.

        Microbatches run through the stages as in training; outputs are concatenated along the batch
        dim (a scalar is the mean weighted by rows). The batch needs only the inputs of the outputs:
        no labels if only a loss reads them. If the model returns its loss, None replaces it.
        first_only: only rank 0 receives outputs, others None. local: as for ``step``. FXP104 for an
        output without a batch dim that differs between microbatches.
        """
        self.pipeline.settle()
        reading, result, outputs = self._outputs(batch, local, loss=False)
        return self._build_outputs(reading, result, outputs, first_only=first_only)

    def predict_with_loss(
        self, batch: Any, *, first_only: bool = False, local: bool = False
    ) -> tuple[torch.Tensor | None, Any]:
        """Return loss and outputs of a batch with one pipelined forward in evaluation mode.

        The loss is equal on every rank, None if the program has none. Outputs and arguments are
        those of :meth:`predict`.
        """
        self.pipeline.settle()
        reading, result, outputs = self._outputs(batch, local, loss=True)
        found = self._build_outputs(reading, result, outputs, first_only=first_only)
        return result.loss, found

    def evaluate(
        self,
        batches: Iterable[Any],
        metrics: Mapping[str, Metric] | None = None,
        *,
        local: bool = False,
    ) -> dict[str, float]:
        """Return loss and metrics over batches in evaluation mode, equal on every rank.

        The loss is the mean over all rows. metrics: by name a function (outputs, batch) -> number
        of one batch, averaged weighted by rows; an object with ``update(outputs, batch)`` and
        ``compute()`` (and ``reset()``, which is called first); or a metric of torchmetrics
        (:mod:`fxpart.runtime.metrics`). They run only on rank 0, with whole outputs and rank 0's
        batch; other ranks receive the results. A program without a loss
        returns only metrics. Raises FXP507 on every rank if a metric or the data raises, FXP501 if
        a rank has more batches than another, FXP109 if there are no batches.
        """
        self.pipeline.settle()
        tally = MetricTally(dict(metrics or {}))
        first = 0 in self.transport.local
        if first:
            call_user_function(self.transport, "a metric", tally.reset)
        for batch in iterate_batches(self.transport, batches):
            if not metrics:
                loss, rows = self._eval_loss(batch, local)
                tally.add_loss(loss, rows)
                continue
            reading, result, outputs = self._outputs(batch, local, loss=True)
            found = self._build_outputs(reading, result, outputs, first_only=True)
            rows = sum(reading.cut.rows)
            if result.loss is not None:
                tally.add_loss(result.loss, rows)
            tally.rows += 0 if result.loss is not None else rows
            if first:
                call_user_function(
                    self.transport, "a metric", partial(tally.add, found, batch, rows)
                )
        return self._share_values(tally, first)

    def generate(self, /, prompts: Prompts, **options: Any) -> torch.Tensor | list[torch.Tensor]:
        """Return the prompts continued by a causal language model, equal on every rank.

        prompts: token ids [rows, length], or a list of one tensor for each row. Each token takes
        one pipelined forward of all tokens in evaluation mode, without a cache of keys and values:
        made for samples during training, not for serving. Keywords
        (:class:`~fxpart.runtime.generation.GenerationOptions`): max_new_tokens. temperature: 0
        takes the most likely token; otherwise tokens are drawn with ``seed``, from the ``top_k``
        most likely ones and the fraction ``top_p`` of the probability. Draws do not depend on the
        plan. eos_token_id: ends a row, and fills shorter rows. logits: the name of the output, if
        it is not "logits" and not the only one. make_batch: a function of token ids [rows, length]
        that returns the batch; by default they are the input ``input_ids`` or the first integer
        input, and ``attention_mask`` is ones. FXP109 for a model without such inputs.
        """

        self.pipeline.settle()

        def begin() -> tuple[tuple[GenerationOptions, TokenSequences], str]:
            try:
                run = GenerationOptions(**options).check()
            except TypeError as cause:
                fix = "see help(trainer.generate)"
                raise error("FXP109", where="generate", why=str(cause), fix=fix) from cause
            made = TokenSequences(prompts, run.eos_token_id)
            return (run, made), f"{run.describe()} {sha256(str(made.rows).encode()).hexdigest()}"

        run, sequences = agree(self.transport, "the arguments of generate", begin)
        program = self._get_program("predict")
        spec = program.engine.spec
        names = {value.name for stage in spec.stages for value in stage.inputs}
        inputs = TokenInputs(get_global_inputs(spec), names, run, get_dim_multiple(spec, 1))
        inputs.check(max(sequences.lengths) + run.max_new_tokens)
        dims = {v.name: len(v.shape) for stage in spec.stages for v in stage.outputs}
        wanted = Outputs((select_logits(program.outputs.specs, dims, run.logits),))
        draw = torch.Generator().manual_seed(run.seed)
        for _ in range(run.max_new_tokens):
            batch = inputs.build(sequences)
            read, result = self._run_forward(program, batch, "generation")
            positions = sequences.positions
            first, count = min(positions), max(positions) - min(positions) + 1
            found = self._gather_whole_outputs(
                read.cut, result, wanted, first_only=True,
                reduce=partial(torch.narrow, dim=1, start=first, length=count),
            )  # fmt: skip
            logits = None if found is None else found[wanted.specs[0].name]
            sequences.append(self._share_tokens(logits, positions, run, draw))
            if sequences.ended:
                break
        return sequences.build()

    def activation_statistics(
        self, batch: Any, *, local: bool = False
    ) -> dict[str, TensorStatistics]:
        """Return statistics of each module's output in evaluation mode, equal on every rank.

        By module path; several outputs of one module are ``.0``, ``.1`` in the order of
        computation. Modules that compute nothing, such as nn.Identity, are missing. Each rank sends
        sums over each row of the batch, not the activations. local: as for ``step``. FXP109 for a
        model that takes one batch size only.
        """
        self.pipeline.settle()
        program = self._get_program("activation_statistics")
        read, result = self._run_forward(program, batch, "activation statistics", local)
        found = self._gather_whole_outputs(read.cut, result, program.outputs, first_only=False)
        assert found is not None
        return {name: join_rows(rows.cpu()) for name, rows in found.items()}

    # -- internals --------------------------------------------------------------------------------

    def _share_tokens(
        self,
        logits: torch.Tensor | None,
        positions: list[int],
        run: GenerationOptions,
        draw: torch.Generator,
    ) -> list[int]:
        """Return the tokens that rank 0 chooses from its logits, on every rank."""

        def choose() -> tuple[list[int], str]:
            if logits is None:
                return [], ""
            rows = torch.arange(len(positions))
            at = torch.tensor(positions) - min(positions)
            return choose_tokens(logits.cpu()[rows, at], run, draw), ""

        chosen = agree(self.transport, "the next tokens", choose)
        with convert_transport_errors(self.transport, "sharing tokens"):
            raws = self.transport.exchange_bytes(msgspec.json.encode(chosen))
        return msgspec.json.decode(raws[0], type=list[int])

    def _get_program(self, call: str) -> ForwardProgram:
        """Return the program of a call, built for the first one; FXP109 if there is none."""
        if self._program_ranks is not self.parts.ranks:  # Other ranks have replaced lost ones.
            self._programs, self._program_ranks = {}, self.parts.ranks
        if call not in self._programs:
            mesh_ranks, outputs = self._build_program(call)
            if self.parts.meshes is not None:
                for mesh_rank in mesh_ranks:
                    self.parts.meshes.attach(mesh_rank.index, mesh_rank.modules)
            source = self.parts.make_source(mesh_ranks)
            engine = PipelineEngine(self.parts, mesh_ranks, "forward")
            self._programs[call] = ForwardProgram(source, engine, outputs)
        return self._programs[call]

    def _build_program(self, call: str) -> tuple[Sequence[MeshRank], Outputs]:
        if call == "eval_step" and self._evaluation is not None:
            made = self._evaluation()
            return [MeshRank(0, *made)] if isinstance(made, tuple) else made, Outputs(())
        if call == "activation_statistics" and self.activation_stages is not None:
            return self.activation_stages()
        if call in ("predict", "predict_with_loss") and self._prediction is not None:
            return self._prediction(call == "predict_with_loss")
        raise error(
            "FXP109", where=call, why="the trainer has no evaluation program",
            fix="use a trainer of the model itself; one of an exported program cannot evaluate",
        )  # fmt: skip

    def _eval_loss(self, batch: Any, local: bool) -> tuple[torch.Tensor, int]:
        program = self._get_program("eval_step")
        read, result = self._run_forward(program, batch, "evaluation", local, keep_outputs=False)
        if result.loss is None:
            fix = "pass loss= to compile()"
            raise error("FXP106", where="eval_step", why="the program has no loss", fix=fix)
        return result.loss, sum(read.cut.rows)

    def _outputs(
        self, batch: Any, local: bool, *, loss: bool
    ) -> tuple[BatchAgreement, PipelineResult, Outputs]:
        program = self._get_program("predict_with_loss" if loss else "predict")
        mode = "evaluation" if loss else "prediction"
        return *self._run_forward(program, batch, mode, local), program.outputs

    def _run_forward(
        self,
        program: ForwardProgram,
        batch: Any,
        mode: str,
        local: bool = False,
        *,
        keep_outputs: bool = True,
    ) -> tuple[BatchAgreement, PipelineResult]:
        """Run a forward; mode: describes it to the other ranks."""
        read = self.agreement.read_checked(
            program.source, batch, mode, local,
            adapt=lambda seen: (self.pipeline.look_up_ids(seen), ""),
        )  # fmt: skip
        result = program.engine.run(
            program.source.feed.parts(read.cut), self.parts.keys(read.cut), train=False,
            gate=read.confirm, keep_outputs=keep_outputs,
        )  # fmt: skip
        return read, result

    def _gather_whole_outputs(
        self,
        cut: MicrobatchSplit,
        result: PipelineResult,
        outputs: Outputs,
        *,
        first_only: bool,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor] | None:
        """Return whole outputs by name, without repeated rows.

        reduce: called on what each process has of an output, before it is sent.
        """
        device = self.parts.first_device
        dims = {spec.value: spec.dim for spec in outputs.specs}
        parts = {
            name: {
                m: drop_repeated_rows(
                    tensor if reduce is None else reduce(tensor), cut.repeats[m], dims[name]
                )
                for m, tensor in found.items()
            }
            for name, found in result.outputs.items()
            if name in dims
        }
        return gather_outputs(
            self.transport, outputs, parts, cut.rows, device, first_only=first_only
        )

    def _build_outputs(
        self, reading: BatchAgreement, result: PipelineResult, outputs: Outputs, *, first_only: bool
    ) -> Any:
        found = self._gather_whole_outputs(reading.cut, result, outputs, first_only=first_only)
        return None if found is None else outputs.build(found)

    def _share_values(self, tally: MetricTally, first: bool) -> dict[str, float]:
        """Return rank 0's values on every rank."""
        if not tally.rows:
            fix = "pass at least one batch"
            raise error("FXP109", where="evaluate", why="there are no batches", fix=fix)
        found = {"loss": tally.loss / tally.rows} if tally.has_loss else {}
        if not tally.metrics:
            return found
        numbers: dict[str, float] = {}
        if first:
            numbers = call_user_function(self.transport, "a metric", tally.numbers)
        self.agreement.agree("metrics")
        with convert_transport_errors(self.transport, "sharing metrics"):
            texts = {name: number.hex() for name, number in numbers.items()}  # JSON has no NaN.
            raws = self.transport.exchange_bytes(msgspec.json.encode(texts))
        shared = msgspec.json.decode(raws[0], type=dict[str, str])
        return {**found, **{name: float.fromhex(text) for name, text in shared.items()}}
