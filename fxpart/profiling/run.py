"""State of a profiling run: model, device, budget, and the candidates to measure."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import fx

from fxpart import costmodels
from fxpart.capture import CapturedModel
from fxpart.cluster.devices import Device
from fxpart.cluster.host_detection import cores
from fxpart.codegen.generated_program import GeneratedProgram, generate_program
from fxpart.compat.optimizer_choice import choose
from fxpart.costmodels import HERE
from fxpart.costmodels.profile_store import MeasurementEnvironment, Profile
from fxpart.plan.model import Plan
from fxpart.planner.prediction.descriptions import label
from fxpart.planner.prepared_model import PreparedModel, with_model_profile
from fxpart.planner.search import find_best_plan
from fxpart.pricing.partition import price
from fxpart.profiling.candidates import BenchmarkStages
from fxpart.profiling.contention import MOST
from fxpart.profiling.stage_benchmark import StageBenchmarkInput
from fxpart.profiling.trial_selection import is_named_optimizer
from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import PartitionChoice, PartitionProblem

if TYPE_CHECKING:
    from fxpart.costs import CostModel

# Arguments: what is measured ("ops", "stages", "CPU contention", "trial runs"), number done, number
# in all.
Progress = Callable[[str, int, int], None]

# Fractions of the budget after ops and after stages: with trial runs, and without.
_OPS, _STAGES = (0.3, 0.4), (0.6, 0.8)
_SOLVING = 5.0  # Seconds for each plan search.
_NEAR = 0.1  # Relative difference of quotas.


@dataclass
class ProfilingRun:
    """State shared by all phases; each stops when its share of the budget is used.

    front: model prepared for devices of this kind. whole: for the whole cluster. plans: given
    plans whose stages are measured. start: on the monotonic clock. trial_runs: whether to run
    plans. programs: cache, by the first block of each stage.
    """

    front: PreparedModel
    whole: PreparedModel
    profile: Profile
    device: torch.device
    setting: MeasurementEnvironment
    microbatches: int | None
    start: float
    budget: float
    date: str
    progress: Progress
    trial_runs: bool = True
    plans: tuple[Plan, ...] = ()
    programs: dict[tuple[int, ...], GeneratedProgram] = field(default_factory=dict)

    @property
    def request_digest(self) -> str:
        """A digest of the model, cluster and options, without given plans."""
        request = self.front.request
        content = (
            self.front.info.fingerprint, request.cluster, choose(request.optimizer).name,
            self.captured.batch_size, self.microbatches, sorted(request.constraints.items()),
            request.seed, self.trial_runs, self.planned_for.request.cluster,
        )  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:32]

    @property
    def planned_for(self) -> PreparedModel:
        """The whole cluster if the profile has all its kinds of devices, else this kind."""
        settings = self.profile.settings()
        known = all(
            any(s.threads == d.threads and s.device == d.model and _near(s, d) for s in settings)
            for d in self.whole.request.cluster.devices
        )
        return self.whole if known else self.front

    @property
    def captured(self) -> CapturedModel:
        """The captured model."""
        return self.front.captured

    @property
    def graph(self) -> fx.GraphModule:
        """The model's graph with blocks."""
        return self.front.graph

    @property
    def shares(self) -> tuple[float, float]:
        """The fractions of the budget that are used after ops, and after stages."""
        at = 0 if self.can_run_trials else 1
        return _OPS[at], _STAGES[at]

    @property
    def can_run_trials(self) -> bool:
        """Whether plans can be run here: all devices are CPUs of this host, and not too many."""
        request = self.front.request
        devices = request.cluster.devices
        here = all(d.host == HERE and d.kind == "cpu" and d.share == 1 for d in devices)
        few = len(devices) <= max(MOST, cores())
        return self.trial_runs and here and few and is_named_optimizer(request.optimizer)

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until a fraction of the budget is used."""
        return self.start + share * self.budget - time.monotonic()

    def model(self) -> CostModel:
        """Return the cost model of the current profile, for the cluster and the model."""
        found = costmodels.find(self.profile.path, self.front.request.cluster)
        return with_model_profile(
            replace(self.front.request, cost_model=found), self.front.info
        ).cost_model

    @property
    def first(self) -> Device:
        """The first device of the measured kind."""
        return self.front.request.cluster.devices[0]

    @property
    def ranks_on_host(self) -> int:
        """The number of devices of the cluster on this host."""
        devices = self.front.request.cluster.devices
        return sum(device.host == self.first.host for device in devices)

    def each(self, works: int, share: float) -> float:
        """Return the seconds for each of ``works`` within a fraction of the budget."""
        return min(1.0, max(0.1, self.left(share) / (4.0 * max(1, works))))

    def best_plan(self) -> Plan:
        """Return the best plan by the current profile. Raises FXP2xx if no plan fits."""
        found = self.planned_for
        model = costmodels.find(self.profile.path, found.request.cluster)
        request = with_model_profile(replace(found.request, cost_model=model), found.info)
        return find_best_plan(replace(found, request=request), self.microbatches).plan

    def choices(self, model: CostModel) -> tuple[PartitionProblem, list[PartitionChoice]]:
        """Return the partition problem with one rank per stage, and its best choices."""
        request = self.front.request
        problem, _ = price(
            self.graph,
            self.captured,
            request.cluster,
            cost_model=model,
            batch_size=self.captured.batch_size,
            microbatches=self.microbatches,
            optimizer=request.optimizer,
        )
        found = solve(problem, time_limit=_SOLVING, seed=request.seed)
        whole = PartitionChoice(variant=0, schedule=DEFAULT_SCHEDULE, starts=(0,))
        return problem, list(found.candidates) or [whole]

    def work(self, problem: PartitionProblem, choice: PartitionChoice) -> BenchmarkStages:
        """Return the stages of a choice as input of benchmarks."""
        if choice.starts not in self.programs:
            seed = self.front.request.seed
            made = generate_program(self.captured, self.graph, None, choice.starts, seed)
            self.programs[choice.starts] = made
        parts = self.programs[choice.starts]
        ends = (*(start - 1 for start in choice.starts[1:]), len(problem.blocks) - 1)
        blocks = tuple(zip(choice.starts, ends, strict=True))
        count = problem.variants[choice.variant].microbatches
        mark = self.front.info.fingerprint[:12]
        labels = tuple(f"{mark} {label(problem.blocks[a : b + 1])}" for a, b in blocks)
        return BenchmarkStages(
            StageBenchmarkInput(parts.spec, parts.sources, count, labels), blocks
        )


def _near(setting: MeasurementEnvironment, device: Device) -> bool:
    """Return whether measurements under a quota are valid for the device's quota."""
    return abs(setting.share / device.share - 1) < _NEAR
