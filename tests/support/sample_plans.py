"""Valid plans for tests: one of any size, and a hypothesis strategy for random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.model import Cluster
from fxpart.plan.model import (
    Alternative,
    Certificate,
    HostLoad,
    PeakMemory,
    Plan,
    PlanInput,
    PlanModel,
    PlanTiedParameter,
    Prediction,
    RankPrediction,
    Stage,
)

GIB = 1 << 30


def cluster(count: int, name: str = "local:4") -> Cluster:
    """``count`` CPU devices of 4 GiB on one host."""
    return Cluster(
        name=name,
        devices=tuple(
            Device(
                name=f"host0/cpu:{i}",
                kind="cpu",
                model="cpu",
                host="host0",
                memory=4 * GIB,
                flops={"float32": 5.0e10},
                bandwidth=1.0e10,
                source="formula",
            )
            for i in range(count)
        ),
        links=(Link(source="*", target="*", latency=1e-5, bandwidth=4.0e9, kind="shm"),),
    )


def plan(stages: int = 4, microbatches: int = 8, blocks: int = 0, slow: float = 1.0) -> Plan:
    """A plan of a small GPT; the last stage takes ``slow`` times the others' time."""
    blocks = blocks or 2 * stages
    starts = [blocks * k // stages for k in range(stages + 1)]
    where = cluster(stages, f"local:{stages}")
    times = [0.010] * (stages - 1) + [0.010 * slow]
    moves = [0.0] + [0.001] * (stages - 1)
    each = [3 * t + move for t, move in zip(times, moves, strict=True)]
    once = [0.006] + [0.004] * (stages - 1)
    step = sum(each) + max((microbatches - 1) * t + b for t, b in zip(each, once, strict=True))
    busy = sum(3 * microbatches * t + b for t, b in zip(times, once, strict=True))
    return Plan(
        model=PlanModel(
            name="GPT2LMHeadModel",
            fingerprint="0" * 64,
            capture="export",
            batch="symbolic",
            nodes=40 * blocks,
            blocks=blocks,
            parameters=10_000_000,
            parameter_bytes=40_000_000,
            inputs=(PlanInput(name="input_ids", dtype="int64", shape=("s0", 64), batch_dim=0),),
        ),
        cluster=where,
        cluster_hash=where.hash,
        mesh={"pipeline": stages, "data": 1, "tensor": 1},
        stages=tuple(
            Stage(
                index=k,
                first=starts[k],
                last=starts[k + 1] - 1,
                label=f"transformer.h.{starts[k]} … transformer.h.{starts[k + 1] - 1}",
                ranks=(k,),
                parameters=10_000_000 // stages,
            )
            for k in range(stages)
        ),
        ties=(
            PlanTiedParameter(
                names=("transformer.wte.weight", "lm_head.weight"),
                owner=0,
                stages=tuple(sorted({0, stages - 1})),
            ),
        ),
        batch_size=microbatches * 2,
        microbatches=microbatches,
        schedule="1f1b",
        prediction=Prediction(
            step_seconds=step,
            simulated_seconds=step * 0.97,
            bubble=max(0.0, 1 - busy / (stages * step * 0.97)),
            ranks=tuple(_rank(k, times[k], min(microbatches, stages - k)) for k in range(stages)),
        ),
        provenance={"compute": "analytic roofline", "transfer": "links of the cluster"},
        certificate=Certificate(
            status="within gap",
            objective=step,
            lower_bound=step * 0.96,
            gap=0.04,
            solver="dp",
            over=f"contiguous stages of these {blocks} blocks",
        ),
        alternatives=(
            Alternative(stages=2, microbatches=8, step_seconds=step * 1.4, why="stage 0 is slow"),
            Alternative(stages=1, microbatches=1, step_seconds=None, why="does not fit"),
        ),
        constraints={"stages": stages},
    )


def _rank(rank: int, forward: float, in_flight: int) -> RankPrediction:
    return RankPrediction(
        ranks=(rank,),
        stage=rank,
        forward_seconds=forward,
        backward_seconds=2 * forward,
        transfer_seconds=0.0 if rank == 0 else 0.001,
        sync_seconds=0.0,
        tie_seconds=0.002 if rank == 0 else 0.0,
        optimizer_seconds=0.004,
        memory=PeakMemory(
            weights=100 << 20,
            gradients=100 << 20,
            optimizer=200 << 20,
            activations=(8 << 20) * in_flight,
            buffers=1 << 10,
            transfers=(1 << 20) * in_flight,
        ),
        memory_limit=3 * GIB,
        in_flight=in_flight,
    )


_seconds = st.floats(0, 1e6, allow_nan=False)
_words = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Random valid plans: any cut, skips, ties, awkward texts, integers where floats stand."""
    count = draw(st.integers(1, 5))
    blocks = count + draw(st.integers(0, 10))
    starts = [0, *sorted(draw(st.permutations(range(1, blocks)))[: count - 1]), blocks]
    microbatches = draw(st.integers(1, 9))
    base = plan(count, microbatches)
    prediction = base.prediction
    objective = draw(st.floats(1e-9, 1e9))
    bound = objective * draw(st.floats(0, 1))
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    tied = draw(st.sets(st.integers(0, count - 1), min_size=1))
    fields = {
        "stages": tuple(
            Stage(
                index=k,
                first=starts[k],
                last=starts[k + 1] - 1,
                label=draw(_words),
                ranks=(k,),
                recompute=draw(st.sampled_from(("none", "selective", "full"))),
                zero=draw(st.sampled_from((0, 1, 2, 3))),
                device=draw(_words),
            )
            for k in range(count)
        ),
        "ties": (
            PlanTiedParameter(
                names=(draw(_words), "b" * 30), owner=min(tied), stages=tuple(sorted(tied))
            ),
        ),
        "edges": tuple((a, b, draw(st.booleans())) for a, b in sorted(edges)),
        "batch_size": microbatches + draw(st.integers(0, 100)),
        "schedule": draw(st.sampled_from(("gpipe", "1f1b"))),
        "seed": draw(st.integers(-(2**62), 2**62)),
        "provenance": draw(st.dictionaries(_words, _words, max_size=3)),
        "constraints": draw(
            st.dictionaries(
                _words, st.one_of(st.integers(-9, 9), _seconds, _words, st.booleans()), max_size=3
            )
        ),
        "prediction": Prediction(
            step_seconds=draw(
                st.one_of(
                    _seconds.map(lambda more: prediction.step_seconds + more),
                    st.integers(9, 99),  # more than any of these plans takes
                )
            ),
            simulated_seconds=draw(_seconds),
            bubble=draw(st.floats(0, 1)),
            ranks=prediction.ranks,
            hosts=draw(
                st.one_of(
                    st.just(()),
                    st.builds(
                        HostLoad,
                        ranks=st.just(tuple(range(count))),
                        slowdown=st.lists(st.floats(0.5, 9), min_size=1, max_size=6).map(tuple),
                        transfer=st.floats(0, 2),
                        full=st.sampled_from((0, count, count + 3)),
                        shares=st.one_of(
                            st.just(()),
                            st.lists(st.floats(0.01, 1), min_size=count, max_size=count).map(tuple),
                        ),
                    ).map(lambda load: (load,)),
                )
            ),
        ),
        "certificate": Certificate(
            status="best found",
            objective=objective,
            lower_bound=bound,
            gap=(objective - bound) / objective,
            solver=draw(_words),
            over=draw(_words),
        ),
        "model": PlanModel(
            name=draw(_words),
            fingerprint="f" * 64,
            capture="export",
            batch=draw(st.sampled_from(("symbolic", "fixed"))),
            nodes=blocks * 3,
            blocks=blocks,
            parameters=5,
            parameter_bytes=20,
            inputs=(PlanInput(name=draw(_words), dtype="float32", shape=("s0", 3), batch_dim=0),),
        ),
    }
    return Plan(**{**{name: getattr(base, name) for name in base.__struct_fields__}, **fields})
