"""A K-of-L problem with conflicts: violations, feasible sets, repair.

An action is a set of exactly K of L arms; a conflict graph on the arms says which
pairs should not stand together. With n(S) the number of conflicting pairs inside S
and M the number of edges, the violation rate is c(S) = n(S) / M (paper, problem
statement). A problem is built once on the host in float64 NumPy; everything that
is called inside a run is JAX, works on int32[K] index sets and never forms an
L x L product.

Differs from the paper:
* two arms conflict iff their distance is strictly below the threshold; the text
  has it both ways (I-29);
* the threshold may be replaced by the wanted number of conflicts, because the
  printed threshold 0.5 leaves no feasible set in the synthetic setting (I-6);
* c is n / M with every pair counted once (I-5), so that a uniform random set has
  E[c] = K(K-1) / (L(L-1)) whatever the graph (I-4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from msb_jax.conflicts import (
    adjacency,
    check_features,
    clique_partition_size,
    distances,
    largest_independent,
)

# What an action of K arms has to be, beside free of conflicts; see `spaces`.
SUBSETS, ORDERED, PATHS = "subsets", "ordered", "paths"

# Cost of an arm that is already taken; above any 2 * (number of conflicts) + 1.
_TAKEN = 1 << 30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """All that a policy may know in advance.

    A pytree: stack several along a leading axis (`stack_problems`) and `vmap`. No
    value is checked here, because the fields may be tracers; `make_problem` and
    `problem_from_conflicts` check.
    """

    features: jax.Array  # [L, D] float32
    conflicts: jax.Array  # [L, L] bool, symmetric, empty diagonal
    num_conflicts: jax.Array  # [] int32, M
    k: int = field(metadata={"static": True})  # arms in an action
    # Which K arms make an action: any, or what `spaces` says of this name.
    space: str = field(default=SUBSETS, metadata={"static": True})
    structure: Any = ()  # arrays that the space needs

    @property
    def num_arms(self) -> int:
        """Return L."""
        return self.conflicts.shape[-1]

    @property
    def num_exchanges(self) -> int:
        """Return in how many ways one arm, or one item of a list, may be exchanged.

        Paths have fewer: not every exchange of an edge makes one.
        """
        # The arms of a list are its placements, K for each item.
        kinds = self.num_arms // self.k if self.space == ORDERED else self.num_arms
        return self.k * (kinds - self.k)


def make_problem(
    features: ArrayLike,
    k: int,
    *,
    metric: str = "ned_abs",
    threshold: float | None = None,
    num_conflicts: int | None = None,
) -> Problem:
    """Build a problem whose conflicts are the pairs of nearest arms.

    Args:
        features: [L, D], finite.
        k: arms in an action, 1..L.
        metric: one of `conflicts.METRICS`.
        threshold: two arms conflict iff their distance is strictly below it.
        num_conflicts: alternatively, exactly this many pairs conflict: those with
            the smallest distances, equal distances in the order of (i, j), i < j.
            Without either argument nothing conflicts.
    """
    x = np.asarray(features, dtype=np.float64)  # [L, D]
    check_features(x, metric)
    num_arms = x.shape[0]
    _check_k(k, num_arms)
    if threshold is not None and num_conflicts is not None:
        raise ValueError("Give either threshold or num_conflicts, not both.")
    if metric != "euclidean" and (zero := np.flatnonzero(~x.any(axis=1))).size:
        raise ValueError(
            f"Arm {zero[0]} has an all-zero feature vector, for which {metric} is "
            "undefined; drop the arm or use metric='euclidean'."
        )
    conflicts = np.zeros((num_arms, num_arms), dtype=bool)
    if threshold is not None:
        if not 0 <= threshold < np.inf:
            raise ValueError(f"threshold must be finite and >= 0, got {threshold}.")
        conflicts = distances(x, metric) < threshold
        np.fill_diagonal(conflicts, False)
    elif num_conflicts is not None:
        most = num_arms * (num_arms - 1) // 2
        count = int(num_conflicts)
        if num_conflicts != count or not 0 <= count <= most:
            raise ValueError(
                f"num_conflicts must be an integer in 0..{most} for {num_arms} arms, "
                f"got {num_conflicts}."
            )
        first, second = np.triu_indices(num_arms, 1)
        gaps = distances(x, metric)[first, second]  # [most]
        cut = np.partition(gaps, count - 1)[count - 1] if count else -1.0
        close = np.flatnonzero(gaps <= cut)  # sorting these alone is much faster
        near = close[np.argsort(gaps[close], kind="stable")[:count]]
        conflicts[first[near], second[near]] = True
        conflicts |= conflicts.T
    return _build(x, conflicts, k)


def problem_from_conflicts(
    conflicts: ArrayLike,
    k: int,
    features: ArrayLike | None = None,
    *,
    num_arms: int | None = None,
) -> Problem:
    """Build a problem from a given conflict graph.

    Args:
        conflicts: bool[L, L], symmetric with an empty diagonal, or an edge list
            int[M, 2] of arm pairs (an edge given twice counts once).
        k: arms in an action, 1..L.
        features: [L, D]; none means D = 0.
        num_arms: L, needed for an edge list that comes without features.
    """
    graph = np.asarray(conflicts)
    x = None if features is None else np.asarray(features, dtype=np.float64)
    if x is not None:
        check_features(x, "euclidean")
        num_arms = x.shape[0] if num_arms is None else num_arms
    if graph.dtype != np.bool_:
        graph = adjacency(graph, num_arms)
    if graph.ndim != 2 or graph.shape[0] != graph.shape[1] or graph.shape[0] < 1:
        raise ValueError(f"conflicts must be a square [L, L], got {graph.shape}.")
    x = np.zeros((graph.shape[0], 0)) if x is None else x
    if len({graph.shape[0], x.shape[0], num_arms or graph.shape[0]}) > 1:
        raise ValueError("conflicts, features and num_arms disagree about L.")
    if graph.diagonal().any() or (graph != graph.T).any():
        raise ValueError(
            "conflicts must be symmetric with an empty diagonal; use "
            "conflicts | conflicts.T and clear the diagonal."
        )
    _check_k(k, graph.shape[0])
    return _build(x, graph, k)


def stack_problems(problems: Sequence[Problem]) -> Problem:
    """Stack problems of equal L, D and K along a new leading axis, for `vmap`."""
    if not problems:
        raise ValueError("stack_problems needs at least one problem.")
    shapes = {(p.features.shape, p.conflicts.shape, p.k) for p in problems}
    if len(shapes) > 1:
        raise ValueError("Only problems of equal L, D and K can be stacked.")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)


def violated_pairs(problem: Problem, actions: jax.Array) -> jax.Array:
    """Count the conflicting pairs n(S) of every set, with K x K work a set.

    int32[..., K] -> int32[...].
    """
    pairs = problem.conflicts[actions[..., :, None], actions[..., None, :]]
    return pairs.sum(axis=(-2, -1), dtype=jnp.int32) // 2  # from [..., K, K]


def violation_rate(problem: Problem, actions: jax.Array) -> jax.Array:
    """Compute c(S) = n(S) / M of every set; 0 without conflicts.

    int32[..., K] -> float32[...].
    """
    edges = jnp.maximum(problem.num_conflicts, 1).astype(jnp.float32)
    return violated_pairs(problem, actions).astype(jnp.float32) / edges


def to_multi_hot(actions: jax.Array, num_arms: int) -> jax.Array:
    """Turn index sets int32[..., K] into indicators float32[..., L]."""
    zeros = jnp.zeros((*actions.shape[:-1], num_arms), jnp.float32)
    return jnp.put_along_axis(zeros, actions, 1.0, axis=-1, inplace=False)


def check_action(problem: Problem, action: ArrayLike) -> np.ndarray:
    """Check on the host that `action` is K distinct arms; return it as int32[K]."""
    a = np.asarray(action)
    if a.ndim != 1 or a.shape[0] != problem.k:
        raise ValueError(
            f"An action is {problem.k} arm indices, got an array of shape {a.shape}."
        )
    if not np.issubdtype(a.dtype, np.integer):
        raise ValueError(f"An action holds integer arm indices, got dtype {a.dtype}.")
    if a.min() < 0 or a.max() >= problem.num_arms:
        raise ValueError(f"Arms are 0..{problem.num_arms - 1}, got {a.tolist()}.")
    if np.unique(a).size != a.size:
        raise ValueError(f"An action must not name an arm twice, got {a.tolist()}.")
    return a.astype(np.int32)


def random_sets(key: jax.Array, problem: Problem, n: int) -> jax.Array:
    """Draw n uniform K-sets, int32[n, K], whatever they violate."""
    noise = jax.random.uniform(key, (n, problem.num_arms))
    return jax.lax.top_k(noise, problem.k)[1]


def random_feasible_sets(key: jax.Array, problem: Problem, n: int) -> jax.Array:
    """Draw n sets by random sequential insertion, int32[n, K].

    Arms enter in random order unless they conflict with one that is in. Where no
    such arm is left, the one that adds the fewest conflicts enters, so that there
    are always K distinct arms; the set is feasible whenever the insertion succeeds.
    """
    priority = jax.random.uniform(key, (n, problem.num_arms))
    preferred = jnp.zeros((problem.num_arms,), bool)
    fill = jax.vmap(_greedy, in_axes=(None, 0, None, None))
    return fill(problem.conflicts, priority, preferred, problem.k)


def repair(problem: Problem, action: jax.Array, priority: jax.Array) -> jax.Array:
    """Turn any set into one with few conflicts, none where the greedy succeeds.

    Keep the arms of the action in order of priority unless they conflict with one
    already kept; give free places to the non-conflicting arms of highest priority,
    and when there is none, to the arm that adds the fewest conflicts.

    Args:
        action: int32[K].
        priority: float32[L], higher first.

    Returns:
        int32[K], K distinct arms.
    """
    preferred = jnp.zeros((problem.num_arms,), bool).at[action].set(True)
    return _greedy(problem.conflicts, priority, preferred, problem.k)


def _greedy(
    conflicts: jax.Array, priority: jax.Array, preferred: jax.Array, k: int
) -> jax.Array:
    """Insert K arms one by one: fewest new conflicts, then preferred, then priority.

    bool[L, L] (or int32, where some conflicts count more), float32[L], bool[L] ->
    int32[K] in the order of insertion.
    """
    # -inf marks the arms that are out of question below, so none may start there.
    lowest = jnp.finfo(priority.dtype).min
    priority = jnp.nan_to_num(priority, nan=lowest, neginf=lowest)
    arms = jnp.arange(priority.shape[0], dtype=jnp.int32)

    def insert(
        place: int, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        cost, action = carry  # [L], [K]
        best = jnp.where(cost == cost.min(), priority, -jnp.inf)
        # The first argmax, by two reductions that vectorise where argmax does not.
        arm = jnp.where(best == best.max(), arms, arms.shape[0]).min()
        cost = cost + 2 * conflicts[arm].astype(jnp.int32)
        return jnp.where(arms == arm, _TAKEN, cost), action.at[place].set(arm)

    cost = 1 - preferred.astype(jnp.int32)
    start = (cost, jnp.zeros((k,), jnp.int32))
    return jax.lax.fori_loop(0, k, insert, start)[1]


def find_feasible(
    problem: Problem, tries: int = 256, seed: int = 0
) -> np.ndarray | None:
    """Look for K arms without a conflict, int32[K] (host); None if none was found."""
    graph = np.asarray(problem.conflicts)
    best = largest_independent(graph, problem.k, tries, seed)
    return best if best.size == problem.k else None


def independence_check(problem: Problem) -> str | None:
    """Say in a sentence why there seem to be no K arms without a conflict (host).

    Returns:
        None when such a set is known. Otherwise a sentence: a proof, when the arms
        fall into fewer than K cliques (each gives at most one arm), or the size
        that the search reached.
    """
    graph = np.asarray(problem.conflicts)
    reached = largest_independent(graph, problem.k, tries=256, seed=0).size
    if reached >= problem.k:
        return None
    bound = clique_partition_size(graph)
    verdict = (
        f"exists (at most {bound} are possible)"
        if bound < problem.k
        else f"was found (greedy reaches {reached})"
    )
    return (
        f"K={problem.k}: no conflict-free set of {problem.k} arms {verdict}; lower K "
        "or the number of conflicts, or expect violations."
    )


def _check_k(k: int, num_arms: int) -> None:
    if k != int(k) or not 1 <= k <= num_arms:
        raise ValueError(f"K must be an integer in 1..{num_arms} (L), got {k}.")


def _build(x: np.ndarray, conflicts: np.ndarray, k: int) -> Problem:
    return Problem(
        features=jnp.asarray(x, jnp.float32),
        conflicts=jnp.asarray(conflicts),
        num_conflicts=jnp.asarray(int(conflicts.sum()) // 2, jnp.int32),
        k=int(k),
    )
