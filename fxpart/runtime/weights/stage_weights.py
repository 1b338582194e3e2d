"""A stage's weights under an asynchronous schedule: each computation reads the right version.

The parameters hold the newest weights, which the optimizer updates in place. A computation that is
to read others finds them in the parameters' ``data`` while it runs, and nothing that autograd saves
of a forward is a weight (:mod:`fxpart.runtime.weights.saved_tensor_hooks`): the backward reads the
parameters as they are then. So does what is gathered again, while pieces that run again read what
their forward did. A copy is made only of weights that something else will still read: an old
version just before an update, a prediction when the first to read it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxpart.compat import is_compiled
from fxpart.errors import FxpartError, error
from fxpart.runtime.executor.recompute import StageRecomputation
from fxpart.runtime.optimizer.update_options import StageUpdateOptions, UpdateOptions
from fxpart.runtime.weight_prediction import PipeMareCorrection, Predictor, make_predictor
from fxpart.runtime.weights.counters import (
    MicrobatchWeightUse,
    StageCounters,
    make_recent_log,
    make_schedule_mismatch_error,
)
from fxpart.runtime.weights.forward_recomputation import ForwardRecomputation
from fxpart.runtime.weights.parameter_swap import swap_parameter_data
from fxpart.runtime.weights.prediction_error import PredictionErrorProbe
from fxpart.runtime.weights.saved_tensor_hooks import SavedWeightHooks
from fxpart.runtime.weights.weight_stash import Tensors, WeightSource, WeightStash, storage_bytes
from fxpart.runtime.weights.weight_update import (
    PredictionCheck,
    discount_learning_rates,
    has_finite_gradients,
)
from fxpart.schedule.versions import WeightRead, WeightVersionCounters
from fxpart.schedule.weight_modes import MODES, WeightMode, list_stream_modes


class _MicrobatchInFlight:
    """A microbatch between its forward and its backward."""

    __slots__ = ("lent", "read", "source", "version", "watched")

    def __init__(
        self, read: WeightRead, source: WeightSource, lent: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        self.read = read
        self.source = source
        self.lent = lent
        self.watched: PredictionErrorProbe | None = None


class StageWeights:
    """Which weights the forwards and backwards of one stage read, and its updates.

    module: the stage; its parameter objects never change. optimizer: of its parameters; those that
    it does not hold, and those that need no gradient, have one version. mode, versions, stage: what
    is to be read (:meth:`~fxpart.schedule.versions.WeightVersionCounters.read`). guard: whether an
    update whose gradients are not all finite leaves the weights as they are; it counts.
    total_updates: after how many a discount of the learning rate has gone (PipeMare); None: it
    stays. Raises FXP109 for what the mode cannot do.

    updates: of the weights, since the start. skipped: how many of them the guard left out.
    total: ``total_updates``, which may be set later. options: what :meth:`follow` was given, for
    this stage.
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
        """Nothing is copied yet."""
        _check(mode)
        versions.check(mode)
        self.mode = mode
        self.versions = versions
        self.stage = stage
        self.updates = versions.start
        self.skipped = 0
        self._module = module
        self._optimizer = optimizer
        self.total = total_updates
        self._guard = guard
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        self._places = [at for at, p in enumerate(listed) if p.requires_grad]
        self._parameters: list[torch.Tensor] = [listed[at] for at in self._places]
        every = list({id(p): p for p in (*self._parameters, *module.parameters())}.values())
        self._predictor: Predictor | None = (
            make_predictor(mode.rule, optimizer) if mode.predicts else None
        )
        gap = versions.gap(stage)
        self._correction = (
            PipeMareCorrection(optimizer, staleness=gap)
            if mode.backward == "corrected" and gap
            else None
        )
        where = f"stage {stage} ({type(module).__name__})"
        self._check: PredictionCheck | None = None
        if self._predictor is not None:
            self._check = PredictionCheck(self._predictor, optimizer, where)
        self.options: StageUpdateOptions | None = None
        self._saved = SavedWeightHooks(every, mode.backward != "forward", where)
        self._again: ForwardRecomputation | None = None
        self._held = WeightStash()
        self._flying: dict[int, _MicrobatchInFlight] = {}
        self._lent: dict[int, Mapping[torch.Tensor, torch.Tensor]] = {}
        self._next = self._behind = 0
        self._recent: deque[MicrobatchWeightUse] = make_recent_log()
        self._watch = 0
        self._rhos: list[tuple[int, float]] = []

    def source(self, microbatch: int) -> WeightSource:
        """Of the microbatch's forward; forwards of equal sources read equal weights."""
        return self._source(self.versions.read(self.mode, self.stage, microbatch))

    def lend(self, microbatch: int, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Parameters of the module that hold these values in one microbatch, forward and backward.

        For parameters whose owner is another stage. Call it before :meth:`forward`.
        """
        self._lent[microbatch] = dict(values)

    def recompute(self, recompute: StageRecomputation) -> None:
        """The stage's forwards run again in their backwards: with the weights that they read.

        Those are kept until the backward, where it reads others.
        """
        if self.mode.backward != "forward":
            self._again = recompute.weights = ForwardRecomputation(self._saved, self._parameters)

    def follow(self, options: UpdateOptions) -> None:
        """Have each update use the options that are recorded for it."""
        self.options = StageUpdateOptions(self._optimizer, options, lambda: self.updates)
        if self._predictor is not None:
            self._predictor.coming = self.options

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Around the call of the stage module. FXP900 if the schedule has something else here."""
        read = self.versions.read(self.mode, self.stage, microbatch)
        if microbatch != self._next:
            raise make_schedule_mismatch_error(
                self.stage, microbatch, "its forward", self._next, microbatch
            )
        if read.forward != self.updates:
            raise make_schedule_mismatch_error(
                self.stage, microbatch, "updates before its forward", read.forward, self.updates
            )
        if self.mode.backward != "forward" and is_compiled(self._module):
            raise _compiled(self.mode)
        source = self._source(read)
        flight = _MicrobatchInFlight(read, source, self._lent.pop(microbatch, {}))
        tensors = self._find(source, microbatch)
        if tensors is not None and self._samples(microbatch, read):
            flight.watched = PredictionErrorProbe(self._parameters, tensors)
        stays = self._stays(flight, tensors)
        with (
            self._holding(tensors, flight),
            nullcontext() if stays else self._saved.hooks(microbatch),  # of what is held
        ):
            yield
        self._flying[microbatch] = flight
        self._next += 1
        self._release()

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Around torch.autograd.backward. FXP900 if the schedule has something else here."""
        flight = self._flying.get(microbatch)
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
        seen = self._seen(flight)
        tensors = self._find(seen, microbatch)
        own = tensors is None and not flight.lent
        again: AbstractContextManager[None] = nullcontext()
        if self._again is not None:
            forward = None
            if flight.source != seen:
                forward = self._held.get(flight.source) or [p.data for p in self._parameters]
            again = self._again.during(microbatch, forward)
        with self._holding(tensors, flight), self._saved.reading(microbatch, own=own), again:
            yield
        del self._flying[microbatch]
        self._behind += 1
        self._recent.append(
            MicrobatchWeightUse(microbatch, flight.source.version, read.forward, self.updates)
        )
        self._release()

    def update(self) -> bool:
        """The optimizer's step on gradients that are complete, with the options of this update.

        Weights that a computation will still read are copied first. Returns whether the weights
        were updated: False where the guard left them alone. Gradients stay for the caller to clear.
        """
        self._release(spare=False)
        now = WeightSource(self.updates)
        if self._wanted(now):
            self._held.put(now, [p.detach().clone() for p in self._parameters])
        steps = not self._guard or has_finite_gradients(self._parameters)
        if self.options is not None:
            self.options.apply()
        observers: list[Predictor | PipeMareCorrection | PredictionCheck] = [*self.rules()]
        if self._check is not None and not self._check.done:
            observers.append(self._check)
        for observer in observers:
            observer.before_update()
        if steps:
            with (
                discount_learning_rates(
                    self._optimizer, self.versions.gap(self.stage), self.updates, self.total
                )
                if self.mode.discount
                else nullcontext()
            ):
                self._optimizer.step()
        for observer in observers:
            observer.after_update()
        self.skipped += not steps
        self.updates += 1
        if self.options is not None:
            self.options.apply()
        self._release()
        return steps

    def restart(self, start: int) -> None:
        """A new stream, after a drain. start: the updates so far; FXP900 if they are others."""
        if start != self.updates or self._flying:
            raise make_schedule_mismatch_error(
                self.stage, self._next, "updates at a restart", start, self.updates
            )
        self.versions = replace(self.versions, start=start)
        self._next = self._behind = 0
        self._release()

    def watch(self, every: int) -> None:
        """Measure predictions for the first microbatch of every so many updates; 0: none."""
        self._watch = every

    def rhos(self) -> list[tuple[int, float]]:
        """(microbatch, ρ) of those measured since the last call."""
        found, self._rhos = self._rhos, []
        return found

    def copies(self) -> int:
        """Copies of the weights there are now, the weights themselves among them."""
        return 1 + len(self._held)

    @property
    def most(self) -> int:
        """The most copies there ever were at once, the weights themselves among them."""
        return 1 + self._held.most

    def bytes(self) -> int:
        """Bytes held now beside the parameters: copies, what was lent, what rules keep."""
        lent = [t for lent in self._borrowed() for t in lent.values()]
        watched = [f.watched for f in self._flying.values() if f.watched is not None]
        kept = [t for w in watched for t in (*w.predicted, *w.stale)]
        rules = sum(rule.held() for rule in self.rules())
        return rules + storage_bytes([*self._held.tensors(), *lent, *kept])

    def counters(self) -> StageCounters:
        """What has run, and what it read."""
        return StageCounters(self._next, self._behind, self.updates, tuple(self._recent))

    def state_dict(self) -> dict[str, Any]:
        """What a drained stage's next computations depend on beside parameters and optimizer."""
        assert not self._flying, "drain before saving"
        return {
            "updates": self.updates,
            "rules": [rule.state_dict() for rule in self.rules()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave, with a new stream."""
        self.updates = state["updates"]
        for rule, kept in zip(self.rules(), state["rules"], strict=True):
            rule.load_state_dict(kept)
        self.restart(self.updates)

    def rules(self) -> list[Predictor | PipeMareCorrection]:
        """What predicts or corrects, and keeps something between updates for it."""
        return [rule for rule in (self._predictor, self._correction) if rule is not None]

    def _source(self, read: WeightRead) -> WeightSource:
        return WeightSource(read.version, read.look_forward)

    def _seen(self, flight: _MicrobatchInFlight) -> WeightSource:
        """What a microbatch's backward reads."""
        read = flight.read
        if self.mode.backward == "forward":
            return flight.source
        if self.mode.backward == "corrected":
            return WeightSource(read.backward, -read.staleness)
        return WeightSource(read.backward, read.look_backward)

    def _find(self, source: WeightSource, microbatch: int) -> Tensors | None:
        """These weights; None where they are those that the parameters hold."""
        found = self._held.get(source)
        if found is not None:
            return found
        if source.version != self.updates:
            raise make_schedule_mismatch_error(
                self.stage, microbatch, "the version that it reads", source.version, self.updates
            )
        if source.look == 0:
            return None
        self._release(spare=False)
        if source.look > 0:
            assert self._predictor is not None, "a mode that looks ahead has a predictor"
            made = self._predictor.predict(source.look)
        else:
            assert self._correction is not None, "a mode that corrects has a correction"
            made = self._correction.corrected(-source.look)
        return self._held.put(source, [made[at] for at in self._places])

    def _stays(self, flight: _MicrobatchInFlight, tensors: Tensors | None) -> bool:
        """Whether the backward finds the weights themselves, as the forward does, unchanged.

        Then autograd may keep them as it likes, without a call for every tensor that it saves. The
        first microbatch of a stream is looked at in any case, for tensors written after their use.
        """
        read = flight.read
        moves = read.staleness or read.look_backward or flight.lent
        return self._behind > 0 and tensors is None and not moves

    def _holding(
        self, tensors: Tensors | None, flight: _MicrobatchInFlight
    ) -> AbstractContextManager[None]:
        """The parameters hold these, and what was lent."""
        if tensors is None and not flight.lent:
            return nullcontext()
        return self._swapped(tensors, flight)

    @contextmanager
    def _swapped(self, tensors: Tensors | None, flight: _MicrobatchInFlight) -> Iterator[None]:
        with swap_parameter_data(self._parameters, tensors):
            with swap_parameter_data(list(flight.lent), list(flight.lent.values())):
                yield

    def _release(self, *, spare: bool = True) -> None:
        """Drop what nothing reads any more. spare: what could be made again may stay."""
        for source in self._held.sources():
            if not self._wanted(source, spare=spare):
                self._held.drop(source)

    def _wanted(self, source: WeightSource, *, spare: bool = True) -> bool:
        """Whether a computation that is still to come reads these weights, after an update too.

        spare: or before it, the next forward or the next backward.
        """
        base = self.mode.base
        if self.mode.backward == "forward" or self._again is not None:
            if any(flight.source == source for flight in self._flying.values()):
                return True
        coming = self.versions.read(self.mode, self.stage, self._next)
        if base == "first microbatch" and self._next % self.versions.every:
            if self._source(coming) == source:  # the rest of a minibatch reads what its first did
                return True
        elif base in ("first stage", "delayed") and coming.version <= source.version:
            return True
        if not spare or not source.look or source.version != self.updates:
            return False
        if coming.forward == self.updates and self._source(coming) == source:
            return True
        first = next(iter(self._flying.values()), None)
        return (
            first is not None
            and first.read.backward == self.updates
            and self._seen(first) == source
        )

    def _samples(self, microbatch: int, read: WeightRead) -> bool:
        return (
            self._watch > 0
            and read.look_forward > 0
            and read.version == self.updates
            and read.staleness > 0
            and microbatch % self.versions.every == 0
            and read.backward % self._watch == 0
        )

    def _borrowed(self) -> Iterator[Mapping[Any, torch.Tensor]]:
        yield from self._lent.values()
        yield from (flight.lent for flight in self._flying.values())


def _check(mode: WeightMode) -> None:
    """FXP109 for choices that do not go together."""
    if mode.look_forward != "none" and mode.base in ("first stage", "delayed"):
        raise error(
            "FXP109",
            where=f"weights={mode.name!r}",
            why="it looks ahead from an old version, whose optimizer state is gone",
            fix="base='applied', or look_forward='none'",
        )


def _compiled(mode: WeightMode) -> FxpartError:
    return error(
        "FXP109",
        where=f"weights={mode.name!r} of a stage made by torch.compile",
        why="its backward makes activations again from the weights that it finds, which in this "
        "mode are not those of its forward",
        fix="leave the stage uncompiled, or a mode whose backward reads its forward's weights: "
        + ", ".join(n for n in list_stream_modes() if MODES[n].backward == "forward"),
    )
