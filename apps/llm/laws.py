"""A scaling law of the loss: how it falls with parameters N and tokens D, fitted to runs that ended.

    loss(N, D) = E + A / N^alpha + B / D^beta

1. The constants are those of the least sum of Huber losses (delta 1e-3) of log loss(N, D) - log loss observed: Hoffmann
   et al. 2022, arXiv:2203.15556, section 3.3 (approach 3). Powers are of N and D over their geometric means, without
   which A and alpha could hardly be told apart, and the least is sought by Levenberg and Marquardt's steps with Huber's
   weights from a grid of starts.
2. Intervals are percentiles of fits to the fitted losses times residuals drawn anew, which are first made longer by
   sqrt(n / (n - 5)), what n residuals of a fit of five constants lack (Efron and Tibshirani 1993, section 9.4). The
   percentiles are those by which a normal variable leaves Student's interval of n - 5 degrees of freedom (Hesterberg
   2014, arXiv:1411.5279, section 3.3), so that few runs give wide intervals.
3. FLOPs are 6 N D. For C of them the best N is G (C / 6)^(beta / (alpha + beta)), with
   G = (alpha A / (beta B))^(1 / (alpha + beta)) (equation 4 there).
"""

import math
from dataclasses import dataclass

import numpy as np

DELTA = 1e-3
NUM_CONSTANTS = 5
LEAST_RUNS = NUM_CONSTANTS + 1
LEAST_SIZES = 3
"""Of N, and of D: two sizes leave E and a power undecided."""
FLOPS_PER_TOKEN_AND_PARAMETER = 6
_MOST_STEPS = 400
_POWERS = (0.1, 0.3, 0.6, 1.0, 2.0)
_SHARES = (0.1, 0.5, 0.9)
_LEAST_POWER, _MOST_POWER = 1e-3, 5.0


@dataclass(frozen=True)
class Best:
    """What a budget should train."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Law:
    """The constants, of loss(N, D) in nats a token."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __call__(self, parameters: float, tokens: float) -> float:
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    def best(self, flops: float) -> Best:
        """The least loss for `flops` = 6 N D, with at least one of each."""
        whole = math.log(flops / FLOPS_PER_TOKEN_AND_PARAMETER)
        both = self.alpha + self.beta
        log_n = (math.log(self.alpha * self.A / (self.beta * self.B)) + self.beta * whole) / both
        log_n = min(max(log_n, 0.0), max(whole, 0.0))
        n, d = math.exp(log_n), math.exp(whole - log_n)
        return Best(n, d, self(n, d))


@dataclass(frozen=True)
class Fit:
    """law: of the runs, so many; samples: of losses drawn anew, from which intervals are"""

    law: Law
    samples: tuple[Law, ...]
    runs: int

    def interval(self, name: str, flops: float | None = None) -> tuple[float, float]:
        """The 95 % interval of a constant, or with `flops` of a field of `Best`."""
        told = [getattr(law if flops is None else law.best(flops), name) for law in self.samples]
        outside = 50 * math.erfc(_student(self.runs - NUM_CONSTANTS) / math.sqrt(2))
        low, high = np.percentile(told, (outside, 100 - outside))
        return float(low), float(high)


def fit(parameters: np.ndarray, tokens: np.ndarray, losses: np.ndarray, samples: int, seed: int) -> Fit:
    """The law of runs; each array has an element a run, at least LEAST_RUNS, and no two are of one N and D alone."""
    logs = np.log(np.stack((parameters, tokens)).astype(np.float64))
    centre, log_losses = logs.mean(1, keepdims=True), np.log(losses.astype(np.float64))
    x = logs - centre
    starts = _starts(losses)
    found, objective = _minimise(starts, x, np.broadcast_to(log_losses, (len(starts), len(losses))))
    best = found[np.argmin(objective)]
    fitted = _predict(best[None], x)[0][0]
    residuals = (log_losses - fitted) * math.sqrt(len(losses) / (len(losses) - NUM_CONSTANTS))
    residuals -= residuals.mean()
    drawn = np.random.default_rng(seed).integers(0, len(losses), (samples, len(losses)))
    again, _ = _minimise(np.broadcast_to(best, (samples, NUM_CONSTANTS)), x, fitted + residuals[drawn])
    return Fit(_law(best, centre), tuple(_law(theta, centre) for theta in again), len(losses))


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by Cornish and Fisher's expansion: 3 % off at freedom 2, 24 % at 1."""
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _law(theta: np.ndarray, centre: np.ndarray) -> Law:
    """From (log A', alpha, log B', beta, log E), of N and D over their centre."""
    log_a, alpha, log_b, beta, log_e = map(float, theta)
    n, d = map(float, centre[:, 0])
    return Law(math.exp(log_e), math.exp(log_a + alpha * n), math.exp(log_b + beta * d), alpha, beta)


def _starts(losses: np.ndarray) -> np.ndarray:
    """[K, 5]: of the least loss a share is E, and what the mean has beside is half A' and half B'."""
    rows = []
    for share in _SHARES:
        floor = share * float(losses.min())
        rest = math.log((float(losses.mean()) - floor) / 2)
        rows += [(rest, alpha, rest, beta, math.log(floor)) for alpha in _POWERS for beta in _POWERS]
    return np.array(rows)


def _predict(theta: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log loss [K, n], and its derivatives by theta [K, n, 5].  x[2, n]: logarithms of N and D over their centre."""
    n, d = x
    terms = np.stack(
        (
            theta[:, 0, None] - theta[:, 1, None] * n,
            theta[:, 2, None] - theta[:, 3, None] * d,
            np.broadcast_to(theta[:, 4, None], (len(theta), len(n))),
        )
    )
    highest = terms.max(0)
    log_loss = highest + np.log(np.exp(terms - highest).sum(0))
    of_n, of_d, of_e = np.exp(terms - log_loss)
    return log_loss, np.stack((of_n, -of_n * n, of_d, -of_d * d, of_e), -1)


def _huber(residuals: np.ndarray) -> np.ndarray:
    """[K, n] -> [K]"""
    size = np.abs(residuals)
    return np.where(size <= DELTA, 0.5 * size**2, DELTA * (size - 0.5 * DELTA)).sum(1)


def _minimise(theta: np.ndarray, x: np.ndarray, log_losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From each of K starts the constants of a least sum of Huber losses [K, 5], and that sum [K]."""
    theta = theta.copy()
    predicted, slopes = _predict(theta, x)
    objective = _huber(predicted - log_losses)
    damping = np.full(len(theta), 1e-3)
    for _ in range(_MOST_STEPS):
        residuals = predicted - log_losses
        weighted = slopes * np.minimum(1.0, DELTA / np.maximum(np.abs(residuals), 1e-300))[..., None]
        curvature = np.einsum("kni,knj->kij", weighted, slopes)
        downhill = -np.einsum("kni,kn->ki", weighted, residuals)
        diagonal = np.einsum("kii->ki", curvature)
        damped = curvature + np.eye(NUM_CONSTANTS) * (damping[:, None] * diagonal + 1e-12)[:, None, :]
        moved = theta + np.clip(np.linalg.solve(damped, downhill[..., None])[..., 0], -2.0, 2.0)
        moved[:, [1, 3]] = np.clip(moved[:, [1, 3]], _LEAST_POWER, _MOST_POWER)
        moved[:, [0, 2, 4]] = np.maximum(moved[:, [0, 2, 4]], -30.0)
        there, there_slopes = _predict(moved, x)
        reached = _huber(there - log_losses)
        better = reached < objective
        small = np.abs(moved - theta).max(1) < 1e-9
        theta[better], objective[better] = moved[better], reached[better]
        predicted[better], slopes[better] = there[better], there_slopes[better]
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e12)
        if np.all(small | (damping >= 1e12)):
            break
    return theta, objective
