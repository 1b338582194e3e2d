"""Weights of a stage under an asynchronous schedule: each computation reads the right version."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxpart.compat import is_compiled
from fxpart.runtime.weight_prediction import ErrorFeedback, PipeMareCorrection
from fxpart.runtime.weights.counters import (
    MicrobatchWeightUse,
    StageCounters,
    make_compiled_stage_error,
    make_recent_log,
    make_schedule_mismatch_error,
)
from fxpart.runtime.weights.weight_stash import (
    Tensors,
    WeightSource,
    storage_bytes,
    swap_parameter_data,
)
from fxpart.runtime.weights.weight_store import StatefulRule, WeightStore
from fxpart.runtime.weights.weight_update import (
    ANNEALING_PER_STALENESS,
    MicrobatchInFlight,
    PredictionErrorProbe,
    discount_learning_rates,
    has_finite_gradients,
)
from fxpart.schedule.versions import WeightRead, WeightVersionCounters
from fxpart.schedule.weight_modes import WeightMode


class StageWeights(WeightStore):
    """Weight versions of one stage's forwards and backwards, and its updates.

    skipped: updates skipped by the guard. total: ``total_updates``, can be set later. listeners:
    called after each update with their number.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        mode: WeightMode,
        versions: WeightVersionCounters,
        stage: int,
        *,
        total_updates: int | None = None,
        guard: bool = False,
    ) -> None:
        """Wrap a stage module, whose parameter objects never change.

        mode, versions, stage: define the versions to read
        (:meth:`~fxpart.schedule.versions.WeightVersionCounters.read`). guard: skip an update whose
        gradients are not all finite; it still counts. total_updates: updates after which a
        learning-rate discount ends (PipeMare); None: 100 times the largest staleness. Raises FXP109
        for impossible combinations.
        """
        mode.check()
        versions.check(mode)
        where = f"stage {stage} ({type(module).__name__})"
        super().__init__(module, optimizer, mode, where, predicts=mode.predicts)
        self.versions = versions
        self.stage = stage
        self.updates = versions.start
        self.skipped = 0
        self.total = total_updates
        stages = range(len(versions.ahead))
        self._default_total = ANNEALING_PER_STALENESS * max(map(versions.gap, stages))
        self.guard = guard
        gap = versions.gap(stage)
        self._correction = (
            PipeMareCorrection(optimizer, staleness=gap)
            if mode.backward == "corrected" and gap
            else None
        )
        self._feedback: ErrorFeedback | None = None
        if mode.feedback and max(versions.ahead) > 1:
            self._feedback = ErrorFeedback(self._parameters, mode.feedback)
        self.listeners: list[Callable[[int], object]] = []
        self._in_flight: dict[int, MicrobatchInFlight] = {}
        self._received_weights: dict[int, Mapping[torch.Tensor, torch.Tensor]] = {}
        self._next_forward = self._backwards_done = 0
        self._recent: deque[MicrobatchWeightUse] = make_recent_log()
        self._watch = 0
        self._rhos: list[tuple[int, float]] = []

    def source(self, microbatch: int) -> WeightSource:
        """Return the weights that a microbatch's forward reads; equal sources are equal weights."""
        return self._source(self.versions.read(self.mode, self.stage, microbatch))

    def lend(self, microbatch: int, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Set values of parameters for one microbatch, forward and backward.

        For parameters owned by another stage. Call it before :meth:`forward`.
        """
        self._received_weights[microbatch] = dict(values)

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Enter for the call of the stage module; FXP900 if the schedule has another action."""
        read = self.versions.read(self.mode, self.stage, microbatch)
        if microbatch != self._next_forward:
            raise make_schedule_mismatch_error(
                self.stage, microbatch, "its forward", self._next_forward, microbatch
            )
        if read.forward != self.updates:
            raise make_schedule_mismatch_error(
                self.stage, microbatch, "updates before its forward", read.forward, self.updates
            )
        if self.mode.backward != "forward" and is_compiled(self._module):
            raise make_compiled_stage_error(self.mode)
        source = self._source(read)
        flight = MicrobatchInFlight(read, source, self._received_weights.pop(microbatch, {}))
        tensors = self._find(source, microbatch)
        if tensors is not None and self._measures_error(microbatch, read):
            flight.watched = PredictionErrorProbe(self._parameters, tensors)
        saves_directly = self._can_save_directly(flight, tensors)
        with (
            self._with_weights(tensors, flight),
            # of the weights in the parameters
            nullcontext() if saves_directly else self._saved.hooks(microbatch),
        ):
            yield
        self._in_flight[microbatch] = flight
        self._next_forward += 1
        self._release()

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Enter for torch.autograd.backward; FXP900 if the schedule has another action."""
        flight = self._in_flight.get(microbatch)
        if flight is None:
            raise make_schedule_mismatch_error(
                self.stage, microbatch, "its forwards before its backward", 1, 0
            )
        read = flight.read
        if read.backward != self.updates:
            raise make_schedule_mismatch_error(
                self.stage, microbatch, "updates before its backward", read.backward, self.updates
            )
        if flight.watched is not None:
            rho = flight.watched.rho(self._parameters)
            if rho is not None:
                self._rhos.append((microbatch, rho))
        backward_source = self._backward_source(flight)
        tensors = self._find(backward_source, microbatch)
        own = tensors is None and not flight.received
        recomputing: AbstractContextManager[None] = nullcontext()
        if self._recomputation is not None:
            forward = None
            if flight.source != backward_source:
                forward = self._stash.get(flight.source) or [p.data for p in self._parameters]
            recomputing = self._recomputation.during(microbatch, forward)
        with (
            self._with_weights(tensors, flight),
            self._saved.reading(microbatch, own=own),
            recomputing,
        ):
            yield
        del self._in_flight[microbatch]
        self._backwards_done += 1
        self._recent.append(
            MicrobatchWeightUse(microbatch, flight.source.version, read.forward, self.updates)
        )
        self._release()

    def update(self) -> bool:
        """Step the optimizer on complete gradients, with the options of this update.

        Weights that a later computation reads are copied first. Return False if the guard skipped
        the update. The caller clears the gradients.
        """
        self._release(keep_recomputable=False)
        now = WeightSource(self.updates)
        if self._is_needed(now):
            self._stash.put(now, [p.detach().clone() for p in self._parameters])
        steps = not self.guard or has_finite_gradients(self._parameters)
        before = self._stash.get(now)
        if self._feedback is not None and before is None:
            before = [p.detach().clone() for p in self._parameters]
        self._step(self._take_step if steps else _skip, (self._predictor, self._correction))
        self._feed_back(before, stepped=steps)
        self.skipped += not steps
        self.updates += 1
        self._apply_options()
        self._release()
        for listener in self.listeners:
            listener(self.updates)
        return steps

    def _take_step(self) -> None:
        """Step the optimizer, with the learning rates that the mode gives the stage."""
        if not self.mode.discount:
            self._optimizer.step()
            return
        total = self._default_total if self.total is None else self.total
        gap = self.versions.gap(self.stage)
        with discount_learning_rates(self._optimizer, gap, self.updates, total):
            self._optimizer.step()

    def _feed_back(self, before: Tensors | None, *, stepped: bool) -> None:
        """Add the error of the update before, if this one was late.

        before: the weights before the update. stepped: whether it was not skipped.
        """
        if self._feedback is None or before is None:
            return
        if stepped:
            read = self.versions.read(self.mode, self.stage, self._backwards_done - 1)
            self._feedback.after_update(before, late=read.version < self.updates)
        else:
            self._feedback.skip_update()

    def restart(self, start: int) -> None:
        """Start again after a flush. start: updates so far; FXP900 if they differ."""
        if start != self.updates or self._in_flight:
            raise make_schedule_mismatch_error(
                self.stage, self._next_forward, "updates at a restart", start, self.updates
            )
        self.versions = replace(self.versions, start=start)
        self._next_forward = self._backwards_done = 0
        self._release()

    def watch(self, every: int) -> None:
        """Measure prediction errors for the first microbatch of every ``every`` updates; 0:
        never.
        """
        self._watch = every

    def rhos(self) -> list[tuple[int, float]]:
        """Return (microbatch, ρ) of the errors measured since the last call."""
        found, self._rhos = self._rhos, []
        return found

    def copies(self) -> int:
        """Return the number of weight versions in memory, including the parameters."""
        return 1 + len(self._stash)

    def bytes(self) -> int:
        """Return the bytes in memory beside the parameters: versions, received weights, rule
        state.
        """
        received = [t for received in self._all_received() for t in received.values()]
        watched = [f.watched for f in self._in_flight.values() if f.watched is not None]
        rule_state_ = [t for w in watched for t in (*w.predicted, *w.stale)]
        rules = sum(rule.state_bytes() for rule in self.rules())
        return rules + storage_bytes([*self._stash.tensors(), *received, *rule_state_])

    def counters(self) -> StageCounters:
        """Return the counters and recent weight use."""
        return StageCounters(
            self._next_forward, self._backwards_done, self.updates, tuple(self._recent)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a flushed stage, beside parameters and optimizer."""
        assert not self._in_flight, "flush before saving"
        return {
            "updates": self.updates,
            "rules": [rule.state_dict() for rule in self.rules()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, with an empty pipeline."""
        self.updates = state["updates"]
        for rule, rule_state_ in zip(self.rules(), state["rules"], strict=True):
            rule.load_state_dict(rule_state_)
        self.restart(self.updates)

    def rules(self) -> list[StatefulRule]:
        """Return the rules that keep state between updates."""
        rules = self._predictor, self._correction, self._feedback
        return [rule for rule in rules if rule is not None]

    def _source(self, read: WeightRead) -> WeightSource:
        return WeightSource(read.version, read.look_forward)

    def _backward_source(self, flight: MicrobatchInFlight) -> WeightSource:
        """Return the weights that a microbatch's backward reads."""
        read = flight.read
        if self.mode.backward == "forward":
            return flight.source
        if self.mode.backward == "corrected":
            return WeightSource(read.backward, -read.staleness)
        return WeightSource(read.backward, read.look_backward)

    def _find(self, source: WeightSource, microbatch: int) -> Tensors | None:
        """Return the weights of a source, or None if the parameters contain them."""
        found = self._stash.get(source)
        if found is not None:
            return found
        if source.version != self.updates:
            raise make_schedule_mismatch_error(
                self.stage, microbatch, "the version that it reads", source.version, self.updates
            )
        if source.look == 0:
            return None
        self._release(keep_recomputable=False)
        if source.look > 0:
            assert self._predictor is not None, "a mode that looks ahead has a predictor"
            computed = self._predictor.predict(source.look)
        else:
            assert self._correction is not None, "a mode that corrects has a correction"
            computed = self._correction.corrected(-source.look)
        return self._stash.put(source, [computed[at] for at in self._trainable])

    def _can_save_directly(self, flight: MicrobatchInFlight, tensors: Tensors | None) -> bool:
        """Return whether autograd may save weights directly, as they do not change until the
        backward.

        This avoids a call for every saved tensor. The first microbatch is always checked, for
        tensors that are modified after their use.
        """
        read = flight.read
        moves = read.staleness or read.look_backward or flight.received
        return self._backwards_done > 0 and tensors is None and not moves

    def _with_weights(
        self, tensors: Tensors | None, flight: MicrobatchInFlight
    ) -> AbstractContextManager[None]:
        """Put these weights, and received ones, into the parameters."""
        if tensors is None and not flight.received:
            return nullcontext()
        return self._swap_both(tensors, flight)

    @contextmanager
    def _swap_both(self, tensors: Tensors | None, flight: MicrobatchInFlight) -> Iterator[None]:
        with swap_parameter_data(self._parameters, tensors):
            with swap_parameter_data(list(flight.received), list(flight.received.values())):
                yield

    def _release(self, *, keep_recomputable: bool = True) -> None:
        """Drop weights that nothing reads any more. keep_recomputable: keep those that could be
        recomputed.
        """
        for source in self._stash.sources():
            if not self._is_needed(source, keep_recomputable=keep_recomputable):
                self._stash.drop(source)

    def _is_needed(self, source: WeightSource, *, keep_recomputable: bool = True) -> bool:
        """Return whether a future computation reads these weights, possibly after an update.

        keep_recomputable: include the next forward and the next backward, before an update.
        """
        base = self.mode.base
        if self._reads_forward_weights:
            if any(flight.source == source for flight in self._in_flight.values()):
                return True
        next_read = self.versions.read(self.mode, self.stage, self._next_forward)
        if base == "first microbatch" and self._next_forward % self.versions.every:
            # later microbatches of a minibatch read the weights of its first
            if self._source(next_read) == source:
                return True
        elif base in ("first stage", "delayed") and next_read.version <= source.version:
            return True
        if not keep_recomputable or not source.look or source.version != self.updates:
            return False
        if next_read.forward == self.updates and self._source(next_read) == source:
            return True
        first = next(iter(self._in_flight.values()), None)
        return (
            first is not None
            and first.read.backward == self.updates
            and self._backward_source(first) == source
        )

    def _measures_error(self, microbatch: int, read: WeightRead) -> bool:
        return (
            self._watch > 0
            and read.look_forward > 0
            and read.version == self.updates
            and read.staleness > 0
            and microbatch % self.versions.every == 0
            and read.backward % self._watch == 0
        )

    def _all_received(self) -> Iterator[Mapping[Any, torch.Tensor]]:
        yield from self._received_weights.values()
        yield from (flight.received for flight in self._in_flight.values())


def _skip() -> None:
    """Do nothing: the gradients are not all finite."""
