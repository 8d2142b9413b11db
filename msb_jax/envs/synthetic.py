"""The synthetic setting of the paper: four reward forms on a conflict graph.

h(x) is theta'x, x'Qx, (theta'x)^3 or (theta'x)^2 + x'Qx on K-hot x, with theta uniform
on [0, .5]^L and Q uniform on [0, .5]^{L x L} (not symmetric, diagonal included); arms
have features uniform on [0, 1]^D, and the pairs of smallest NED conflict. Instances
are made on the host in float64 from an integer seed; the state of the environment is
float32 and `step` is pure.

Differs from the paper:
* the number of conflicts is given instead of the threshold, which at its printed
  value leaves no feasible set (I-6);
* a reward is (h + eps) / h_max with h_max the unconstrained maximum of h, exact for
  linear and cubic and an upper bound for quadratic and mixed unless SCIP proves it
  (I-9); eps has standard deviation `noise_std` in units of h (I-10);
* the ground truth carries an upper bound and says whether it is proven (I-34), and is
  the set of least violation where no K arms are free of conflicts (I-2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.problem import (
    Problem,
    make_problem,
    random_feasible_sets,
    violated_pairs,
)
from msb_jax.rng import host_seed
from msb_jax.solvers.bounds import quadratic_upper_bound
from msb_jax.solvers.local_search import penalise, tabu_search
from msb_jax.solvers.scip import LinearProgram, QuadraticProgram, Solution
from msb_jax.types import Env, Key, Outcome, Quadratic

FORMS = ("linear", "quadratic", "cubic", "mixed")
# Share of the pairs that conflict in the paper: 3,962 of 300 * 299 / 2.
DENSITY = 3962 / 44850

# Search for the ground truth of the quadratic forms.
_NUM_STARTS = 64
_NUM_STEPS = 2000
# SCIP sees the most promising arms; all of them if there are no more than that.
_SCIP_ARMS = 40
_SCIP_NODES = 200
_PROVEN = 1e-6  # relative gap

_tabu = jax.jit(tabu_search, static_argnames=("num_steps", "tenure"))
_random_sets = jax.jit(random_feasible_sets, static_argnames="n")


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """The setting; the defaults are the paper's."""

    form: str = "cubic"
    num_arms: int = 300
    k: int = 20
    feature_dim: int = 10
    num_constraints: int = 3962  # conflicting pairs
    noise_std: float = 0.1  # in units of h

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}: {self.form!r}.")
        if self.num_arms < 1 or self.feature_dim < 1:
            raise ValueError("num_arms and feature_dim must be at least 1.")
        if not 1 <= self.k <= self.num_arms:
            raise ValueError(f"k must be in 1..{self.num_arms}, got {self.k}.")
        most = self.num_arms * (self.num_arms - 1) // 2
        if not 0 <= self.num_constraints <= most:
            raise ValueError(
                f"num_constraints must be in 0..{most}, the pairs of {self.num_arms} "
                f"arms, got {self.num_constraints}; lower it or raise num_arms."
            )
        if not (math.isfinite(self.noise_std) and self.noise_std >= 0):
            raise ValueError(f"noise_std must be at least 0, got {self.noise_std}.")


class GroundTruth(NamedTuple):
    """The best set of an instance, in units of the reward."""

    reward: float  # h* / h_max
    upper_bound: float  # no set with as few violations is worth more
    status: str  # optimal (proven), best_found, infeasible
    action: np.ndarray  # [K] int32


class Instance(NamedTuple):
    """One draw of the setting, on the host."""

    problem: Problem
    theta: np.ndarray  # [L]
    pair: np.ndarray  # [L, L] symmetric; [0, 0] for linear and cubic
    scale: float  # h_max
    ground_truth: GroundTruth


class SyntheticState(NamedTuple):
    """What the environment needs to answer. Stack states for several seeds."""

    problem: Problem
    theta: jax.Array  # [L] float32
    pair: jax.Array  # [L, L] float32; [0, 0] for linear and cubic
    scale: jax.Array  # [] float32


def make_instance(config: SyntheticConfig, seed: int) -> Instance:
    """Draw the instance of a seed and find its ground truth (host).

    Features, theta and Q have a stream of their own each, so that the forms share
    what they have in common, whatever the number of seeds.

    Args:
        seed: at least 0.
    """
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}.")
    streams = [np.random.default_rng([seed, i]) for i in range(2)]
    features = streams[0].uniform(size=(config.num_arms, config.feature_dim))
    problem = make_problem(
        features, config.k, metric="ned", num_conflicts=config.num_constraints
    )
    theta = streams[1].uniform(0.0, 0.5, config.num_arms)
    return instance_on(problem, theta, config.form, seed)


def instance_on(problem: Problem, theta: np.ndarray, form: str, seed: int) -> Instance:
    """Put a reward on given arms, and find its ground truth (host).

    Args:
        problem: features and conflicts, of a log for example.
        theta: [L], in [0, 0.5].
        form: one of `FORMS`.
        seed: of Q, where the form has one.
    """
    size = problem.num_arms
    pair = np.zeros((0, 0))
    if form in ("linear", "cubic"):
        scale, truth = _linear_truth(problem, theta, 3 if form == "cubic" else 1)
    else:
        stream = np.random.default_rng([seed, 2])
        pair = stream.uniform(0.0, 0.5, (size, size))
        pair = (pair + pair.T) / 2.0
        whole = pair + np.outer(theta, theta) if form == "mixed" else pair
        scale, truth = _quadratic_truth(problem, whole, seed)
    return Instance(problem, theta, pair, scale, truth)


def env_state(instance: Instance) -> SyntheticState:
    """Turn an instance into the state of the environment."""
    return SyntheticState(
        problem=instance.problem,
        theta=jnp.asarray(instance.theta, jnp.float32),
        pair=jnp.asarray(instance.pair, jnp.float32),
        scale=jnp.asarray(instance.scale, jnp.float32),
    )


def synthetic(config: SyntheticConfig) -> Env:
    """Make the environment of a setting.

    `reset` runs on the host, because instances come with a ground truth; it takes
    the bits of the key as the seed of `make_instance`. An experiment that wants
    numbered seeds calls `env_state(make_instance(config, seed))` instead.
    """
    form, noise_std = config.form, config.noise_std

    def reset(key: Key) -> SyntheticState:
        return env_state(make_instance(config, host_seed(key)))

    def step(
        key: Key, state: SyntheticState, action: jax.Array
    ) -> tuple[SyntheticState, Outcome]:
        mean = _mean_reward(form, state, action)
        noise = noise_std * jax.random.normal(key, ()) / state.scale
        return state, Outcome(reward=mean + noise, mean_reward=mean)

    return Env(reset=reset, step=step, problem=lambda state: state.problem)


def _mean_reward(form: str, state: SyntheticState, action: jax.Array) -> jax.Array:
    """Compute h / h_max from K and K x K gathers; action int32[K]."""
    if form == "quadratic":
        return state.pair[action[:, None], action[None, :]].sum() / state.scale
    total = state.theta[action].sum()
    if form == "linear":
        return total / state.scale
    if form == "cubic":
        return total * total * total / state.scale
    inside = state.pair[action[:, None], action[None, :]].sum()
    return (total * total + inside) / state.scale


def _linear_truth(
    problem: Problem, theta: np.ndarray, power: int
) -> tuple[float, GroundTruth]:
    """Solve the forms that grow with theta'x."""
    top = float(np.sort(theta)[-problem.k :].sum())
    program = LinearProgram(np.asarray(problem.conflicts), problem.k)
    found = program.solve(theta, arm_limit=problem.num_arms)
    status = {"optimal": "optimal", "least_violation": "infeasible"}
    return top**power, GroundTruth(
        reward=(found.value / top) ** power,
        upper_bound=(min(found.bound, top) / top) ** power,
        status=status.get(found.status, "best_found"),
        action=found.action,
    )


def _quadratic_truth(
    problem: Problem, pair: np.ndarray, seed: int
) -> tuple[float, GroundTruth]:
    """Search the forms that are x'Qx, and bound them."""
    conflicts, size, k = np.asarray(problem.conflicts), problem.num_arms, problem.k
    scale = _unconstrained_bound(pair, k)

    def rank(chosen: np.ndarray) -> tuple[int, float]:
        clashes = int(conflicts[np.ix_(chosen, chosen)].sum()) // 2
        return -clashes, float(pair[np.ix_(chosen, chosen)].sum())

    calm = LinearProgram(conflicts, k).solve(np.zeros(size))
    starts = _search_starts(problem, calm.action, seed)
    model = Quadratic(
        pair=jnp.asarray(pair, jnp.float32),
        linear=jnp.zeros((size,)),
        offset=jnp.zeros(()),
    )
    walls = problem.conflicts
    if calm.violated:
        # Violations may be traded for one another; each costs more than any set.
        model = penalise(model, walls, jnp.float32(2.0 * scale))
        walls = jnp.zeros_like(walls)
    steps = max(1, min(_NUM_STEPS, _NUM_STEPS * 300 // size))
    actions, _ = _tabu(model, walls, starts, num_steps=steps)
    best = max(np.asarray(actions), key=rank)
    solved = _refine(conflicts, pair, best)
    best = max(best, solved.action, key=rank)
    value = rank(best)[1]
    bound = scale
    if not calm.violated:
        bound = min(bound, quadratic_upper_bound(conflicts, k, pair, np.zeros(size)))
    if size <= _SCIP_ARMS:
        bound = min(bound, solved.bound)
    status = "optimal" if bound - value <= _PROVEN * value else "best_found"
    return scale, GroundTruth(
        reward=value / scale,
        upper_bound=max(bound, value) / scale,
        status="infeasible" if calm.violated else status,
        action=np.sort(best).astype(np.int32),
    )


def _search_starts(problem: Problem, calm: np.ndarray, seed: int) -> jax.Array:
    """Draw starts int32[N, K]; those with more violations than `calm` become it."""
    key = jax.random.key(seed % 2**31)
    starts = _random_sets(key, problem, n=_NUM_STARTS)
    fallback = jnp.asarray(calm)
    is_worse = violated_pairs(problem, starts) > violated_pairs(problem, fallback)
    return jnp.where(is_worse[:, None], fallback[None, :], starts)


def _refine(conflicts: np.ndarray, pair: np.ndarray, best: np.ndarray) -> Solution:
    """Let SCIP improve a set, over the arms that are worth most beside it."""
    worth = pair[best].sum(axis=0)  # [L]
    worth[best] = np.inf
    count = max(_SCIP_ARMS, best.size)
    arms = np.sort(np.argsort(-worth, kind="stable")[:count])
    inner = np.ix_(arms, arms)
    found = QuadraticProgram(conflicts[inner], best.size).solve(
        pair[inner],
        np.zeros(arms.size),
        start=np.searchsorted(arms, best),
        node_limit=_SCIP_NODES,
    )
    return found._replace(action=arms[found.action])


def _unconstrained_bound(pair: np.ndarray, k: int) -> float:
    """Return the maximum of x'Qx without conflicts, or a bound on it."""
    size = pair.shape[0]
    free = np.zeros((size, size), dtype=bool)
    zeros = np.zeros(size)
    bound = quadratic_upper_bound(free, k, pair, zeros)
    if size <= _SCIP_ARMS:
        found = QuadraticProgram(free, k).solve(pair, zeros, node_limit=_SCIP_NODES)
        if found.status == "optimal":
            return found.value
        bound = min(bound, found.bound)
    # A round number, so that the last bits of an eigenvalue do not enter rewards.
    digit = 10.0 ** (math.floor(math.log10(bound)) - 4)
    return math.ceil(bound / digit) * digit
