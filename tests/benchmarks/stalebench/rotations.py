"""Golden traces of basis rotation in pipelines without flushes, in plain Python doubles.

    python tests/benchmarks/stalebench/rotations.py       (writes rotations.json beside this file)

As traces.py, of stages with matrices: it imports neither torch nor fxpart.

* Stage k of K computes h_k = tanh(W_k h_(k-1)), from W_k[i][j] = cos(1 + k + 2 i + 3 j) / 2.
* Sample t = 1, 2, ... is h_(-1) = (sin t, cos 2 t), its target y = (cos(t) / 2, sin(3 t) / 2), and
  its loss |h_(K-1) - y|^2 / 2.
* G is the mean gradient of a minibatch, M <- b1 M + (1 - b1) G. Source "2nd": L <- b2 L + (1 - b2)
  G G^T and R <- b2 R + (1 - b2) G^T G; U and V are their eigenvectors at the first update, later
  U <- Q(L U) of U ordered by diag(U^T L U), S with it, and V alike. Source "1st": U and V are the
  singular vectors of M at the first update, later U <- Q(M V), then V <- Q(M^T U).
* A stage refreshes U and V at its first update and at update n if floor(n p) > floor((n - 1) p),
  with p = 1 / f; or, with the staleness d_k of each stage, p = (1 + d_k) K / (f sum_j (1 + d_j)).
* S <- b2 S + (1 - b2) (U^T G V)^2, W <- (1 - lr d) W - lr sqrt(1 - b2^n) / (1 - b1^n) U D V^T with
  D = U^T M V / (sqrt(S) + eps).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from benchmarks.stalebench.traces import read

FILE = Path(__file__).with_name("rotations.json")
UPDATES, EVERY = 16, 3
RATE, BETA1, BETA2, EPSILON, DECAY = 0.05, 0.9, 0.95, 1e-3, 0.01
Matrix = tuple[tuple[float, float], tuple[float, float]]
Vector = tuple[float, float]


def times(a: Matrix, b: Matrix) -> Matrix:
    """Return a b."""
    (p, q), (r, s) = a
    (e, f), (g, h) = b
    return (p * e + q * g, p * f + q * h), (r * e + s * g, r * f + s * h)


def turned(a: Matrix) -> Matrix:
    """Return the transposed matrix."""
    return (a[0][0], a[1][0]), (a[0][1], a[1][1])


def mixed(x: float, a: Matrix, y: float, b: Matrix) -> Matrix:
    """Return x a + y b."""
    rows = [
        tuple(x * p + y * q for p, q in zip(r, s, strict=True)) for r, s in zip(a, b, strict=True)
    ]
    return (rows[0][0], rows[0][1]), (rows[1][0], rows[1][1])


def columns(a: Vector, b: Vector) -> Matrix:
    """Return the matrix with these columns."""
    return (a[0], b[0]), (a[1], b[1])


def eigenvectors(a: Matrix) -> Matrix:
    """Return those of a symmetric matrix, the larger eigenvalue first, by one Jacobi rotation."""
    angle = math.atan2(2 * a[0][1], a[0][0] - a[1][1]) / 2
    return columns((math.cos(angle), math.sin(angle)), (-math.sin(angle), math.cos(angle)))


def basis_of(a: Matrix) -> Matrix:
    """Return Q of the QR decomposition: the first column's direction, and its perpendicular."""
    size = math.hypot(a[0][0], a[1][0])
    x, y = a[0][0] / size, a[1][0] / size
    return columns((x, y), (-y, x))


class Version(NamedTuple):
    """A stage's weights after some updates, and the optimizer's state. share: of refreshes, p f."""

    weights: Matrix
    share: Fraction
    count: int = 0
    mean: Matrix = ((0.0, 0.0), (0.0, 0.0))
    squares: Matrix = ((0.0, 0.0), (0.0, 0.0))
    moments: tuple[Matrix, Matrix] = (((0.0, 0.0), (0.0, 0.0)), ((0.0, 0.0), (0.0, 0.0)))
    bases: tuple[Matrix, Matrix] = (((1.0, 0.0), (0.0, 1.0)), ((1.0, 0.0), (0.0, 1.0)))


def update(was: Version, g: Matrix, source: str) -> Version:
    """Return the stage after an update."""
    n = was.count + 1
    mean = mixed(BETA1, was.mean, 1 - BETA1, g)
    outer = times(g, turned(g)), times(turned(g), g)
    left, right = (mixed(BETA2, m, 1 - BETA2, o) for m, o in zip(was.moments, outer, strict=True))
    (u, v), squares = was.bases, was.squares
    rate = was.share / EVERY
    if n == 1 and source == "2nd":
        u, v = eigenvectors(left), eigenvectors(right)
    elif n == 1:
        v = eigenvectors(times(turned(mean), mean))
        u = basis_of(times(mean, v))
    elif math.floor(n * rate) > math.floor((n - 1) * rate) and source == "2nd":
        u, squares = refresh(left, u, squares)
        v, sideways = refresh(right, v, turned(squares))
        squares = turned(sideways)
    elif math.floor(n * rate) > math.floor((n - 1) * rate):
        u = basis_of(times(mean, v))
        v = basis_of(times(turned(mean), u))
    rotated = times(times(turned(u), g), v)
    squares = mixed(BETA2, squares, 1 - BETA2, product(rotated, rotated))
    roots = tuple(tuple(1 / (math.sqrt(x) + EPSILON) for x in row) for row in squares)
    step = product(times(times(turned(u), mean), v), ((*roots[0],), (*roots[1],)))  # type: ignore[arg-type]
    scale = RATE * math.sqrt(1 - BETA2**n) / (1 - BETA1**n)
    weights = mixed(1 - RATE * DECAY, was.weights, -scale, times(times(u, step), turned(v)))
    return Version(weights, was.share, n, mean, squares, (left, right), (u, v))


def product(a: Matrix, b: Matrix) -> Matrix:
    """Return the product by elements."""
    (p, q), (r, s) = a
    (e, f), (g, h) = b
    return (p * e, q * f), (r * g, s * h)


def refresh(moment: Matrix, basis: Matrix, squares: Matrix) -> tuple[Matrix, Matrix]:
    """Return the basis after a power step, and the squares with rows in the basis' order."""
    turned_moment = times(times(turned(basis), moment), basis)
    if turned_moment[1][1] > turned_moment[0][0]:
        basis, squares = columns(*reversed(turned(basis))), (squares[1], squares[0])
    return basis_of(times(moment, basis)), squares


def apply(a: Matrix, x: Vector) -> Vector:
    """Return a x."""
    return a[0][0] * x[0] + a[0][1] * x[1], a[1][0] * x[0] + a[1][1] * x[1]


def sample(t: int) -> tuple[Vector, Vector]:
    """Return input and target of a sample, numbered from 1."""
    return (math.sin(t), math.cos(2 * t)), (math.cos(t) / 2, math.sin(3 * t) / 2)


def start(k: int) -> Matrix:
    """Return the first weights of a stage."""
    rows = [[math.cos(1 + k + 2 * i + 3 * j) / 2 for j in range(2)] for i in range(2)]
    return (rows[0][0], rows[0][1]), (rows[1][0], rows[1][1])


def list_delays(mode: str, stages: int, a: int) -> list[int]:
    """Return the most updates that each stage misses in a full pipeline."""
    return [1 if mode == "2bw" else -(-(stages - 1 - k) // a) for k in range(stages)]


def trace(mode: str, stages: int, a: int, source: str, aware: bool) -> dict[str, object]:
    """Return the loss of each minibatch, and the weights after all updates."""
    late = [1 + delay for delay in list_delays(mode, stages, a)]
    shares = [Fraction(x * stages, sum(late)) if aware else Fraction(1) for x in late]
    kept = [[Version(start(k), shares[k])] for k in range(stages)]
    losses = []
    for number in range(UPDATES):
        sums, loss = [((0.0, 0.0), (0.0, 0.0))] * stages, 0.0
        for t in range(number * a + 1, number * a + a + 1):
            rows = [read(mode, k, stages, a, t) for k in range(stages)]
            x, y = sample(t)
            hidden = [x]
            forward = [kept[k][row.version].weights for k, row in enumerate(rows)]
            for weights in forward:
                p, q = apply(weights, hidden[-1])
                hidden.append((math.tanh(p), math.tanh(q)))
            slope = hidden[-1][0] - y[0], hidden[-1][1] - y[1]
            loss += (slope[0] ** 2 + slope[1] ** 2) / 2 / a
            for k in reversed(range(stages)):
                out = hidden[k + 1]
                p, q = slope[0] * (1 - out[0] ** 2) / a, slope[1] * (1 - out[1] ** 2) / a
                before = hidden[k]
                outer = (p * before[0], p * before[1]), (q * before[0], q * before[1])
                sums[k] = mixed(1.0, sums[k], 1.0, outer)
                now = kept[k][-1].weights if rows[k].after == "now" else forward[k]
                slope = apply(turned(now), (p * a, q * a))
        losses.append(loss)
        for k in range(stages):
            kept[k].append(update(kept[k][-1], sums[k], source))
    return {"losses": losses, "weights": [mine[-1].weights for mine in kept]}


def list_settings() -> Iterator[tuple[str, int, int, str, bool]]:
    """Yield (mode, stages, microbatches of a minibatch, source, stage-aware) of every trace."""
    for mode, stages, a in (("stash", 4, 1), ("stash", 4, 2), ("naive", 3, 1), ("2bw", 2, 2)):
        for source in ("2nd", "1st"):
            for aware in (False, True):
                yield mode, stages, a, source, aware


def name_of(setting: tuple[str, int, int, str, bool]) -> str:
    """Return the name of a trace in the file."""
    *shown, aware = setting
    return "/".join(map(str, [*shown, "aware" if aware else "even"]))


def main() -> None:
    """Write all traces."""
    found = {name_of(each): trace(*each) for each in list_settings()}
    FILE.write_text(json.dumps(found, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    main()
