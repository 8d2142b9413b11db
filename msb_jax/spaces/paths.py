"""Paths from a source to a target in a directed graph without cycles.

The arms are the edges. Paths may differ in length, actions may not: an action is a
path and as many fillers as it is shorter than the longest one, the first of them, so
that there is one action for every path. Fillers are the last K arms and cost nothing;
where all paths have the same length no action holds one.

The linear optimum is a dynamic program over the number of edges, exact for any worth,
also of the fillers; it is the shortest path when worth is minus the delay. Searches
linearise: the model's slope at a path is a worth for every edge, and the best path
under it is tried next.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from msb_jax.problem import PATHS, Problem, problem_from_conflicts, to_multi_hot
from msb_jax.solvers import local_search
from msb_jax.solvers.bound_search import Terrain
from msb_jax.spaces.base import Scene, Space
from msb_jax.types import Key, Quadratic

# Linearisations from every start of a search.
NUM_LINES = 6
UNREACHED = -1e30


class PathGraph(NamedTuple):
    """The graph, in the form that the dynamic program wants."""

    tails: jax.Array  # [E] int32, the node an edge leaves
    incoming: jax.Array  # [V, D] int32, edges that reach a node; E where there is none
    log_counts: jax.Array  # [V] logarithm of the number of paths from the source
    source: jax.Array  # [] int32
    target: jax.Array  # [] int32


def path_problem(edges: ArrayLike, source: int, target: int) -> Problem:
    """Build the problem of choosing a path (host).

    Args:
        edges: int[E, 2], from and to; no cycles. Nodes are 0..V-1.
        source: where a path begins.
        target: where it ends.
    """
    pairs = np.asarray(edges)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.shape[0] < 1:
        raise ValueError(f"edges must have shape [E, 2], got {pairs.shape}.")
    if not np.issubdtype(pairs.dtype, np.integer) or pairs.min() < 0:
        raise ValueError("edges must hold node numbers, integers from 0.")
    num_nodes = int(max(pairs.max(), source, target)) + 1
    if min(source, target) < 0 or source == target:
        raise ValueError(
            f"source and target must be two nodes, got {source} and {target}."
        )
    counts, longest = _count_paths(pairs, num_nodes, source)
    if not np.isfinite(counts[target]):
        raise ValueError(f"There is no path from node {source} to node {target}.")
    k, num_edges = int(longest[target]), pairs.shape[0]
    into = [np.flatnonzero(pairs[:, 1] == v) for v in range(num_nodes)]
    incoming = np.full((num_nodes, max(map(len, into))), num_edges, np.int32)
    for node, own in enumerate(into):
        incoming[node, : own.size] = own
    num_arms = num_edges + k
    plain = problem_from_conflicts(np.zeros((num_arms, num_arms), bool), k)
    return Problem(
        features=plain.features,
        conflicts=plain.conflicts,
        num_conflicts=plain.num_conflicts,
        k=k,
        space=PATHS,
        structure=PathGraph(
            tails=jnp.asarray(pairs[:, 0], jnp.int32),
            incoming=jnp.asarray(incoming),
            log_counts=jnp.asarray(counts, jnp.float32),
            source=jnp.asarray(source, jnp.int32),
            target=jnp.asarray(target, jnp.int32),
        ),
    )


def grid_edges(rows: int, columns: int) -> np.ndarray:
    """Edges to the right and down of a grid whose node (r, c) is r columns + c."""
    if rows < 1 or columns < 1 or rows * columns < 2:
        raise ValueError(f"A grid needs two nodes, got {rows} x {columns}.")
    node = np.arange(rows * columns).reshape(rows, columns)
    right = np.stack([node[:, :-1].ravel(), node[:, 1:].ravel()], axis=1)
    down = np.stack([node[:-1].ravel(), node[1:].ravel()], axis=1)
    return np.concatenate([right, down])


def is_path(problem: Problem, action: ArrayLike) -> bool:
    """Say whether arms are a path and its fillers (host)."""
    graph = problem.structure
    num_edges = graph.tails.shape[0]
    arms = np.sort(np.asarray(action))
    edges, fillers = arms[arms < num_edges], arms[arms >= num_edges]
    heads = np.full(num_edges + 1, -1)
    for node, own in enumerate(np.asarray(graph.incoming)):
        heads[own] = node
    if arms.shape != (problem.k,) or np.unique(arms).size != problem.k:
        return False
    if not np.array_equal(fillers, num_edges + np.arange(fillers.size)):
        return False
    by_tail = {int(graph.tails[e]): int(heads[e]) for e in edges}
    node = int(graph.source)
    for _ in edges:
        node = by_tail.pop(node, -1)
    return node == int(graph.target) and not by_tail


def maximise(problem: Problem, worth: jax.Array) -> jax.Array:
    """Find the path of most worth, its fillers included: [L] -> int32[K]."""
    graph: PathGraph = problem.structure
    k, num_edges = problem.k, graph.tails.shape[0]
    gain = jnp.append(worth[:num_edges], UNREACHED)
    tails = jnp.append(graph.tails, 0)
    start = jnp.full((graph.incoming.shape[0],), UNREACHED)
    start = start.at[graph.source].set(0.0)

    def step(best: jax.Array, nothing: None) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """One more edge: the best walks [V] of that many edges, and their last."""
        del nothing
        tried = best[tails[graph.incoming]] + gain[graph.incoming]  # [V, D]
        last = jnp.argmax(tried, axis=1)
        rows = jnp.arange(tried.shape[0])
        best = jnp.maximum(tried[rows, last], UNREACHED)
        return best, (best[graph.target], graph.incoming[rows, last])

    _, (totals, lasts) = jax.lax.scan(step, start, None, length=k)  # [K], [K, V]
    filled = jnp.append(jnp.cumsum(worth[num_edges:])[::-1][1:], 0.0)
    length = jnp.argmax(totals + filled)  # less one

    def back(node: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        edge = lasts[place, node]
        is_edge = place <= length
        filler = num_edges + place - length - 1
        return (
            jnp.where(is_edge, tails[edge], node),
            jnp.where(is_edge, edge, filler).astype(jnp.int32),
        )

    _, arms = jax.lax.scan(back, graph.target, jnp.arange(k - 1, -1, -1))
    return arms[::-1]


def random(key: Key, problem: Problem, n: int) -> jax.Array:
    """Draw n paths, every path as likely as any other: int32[n, K]."""
    graph: PathGraph = problem.structure
    num_edges = graph.tails.shape[0]
    log_counts = jnp.append(graph.log_counts[graph.tails], -jnp.inf)
    tails = jnp.append(graph.tails, 0)

    def one(noise: jax.Array) -> jax.Array:
        def back(
            carry: tuple[jax.Array, jax.Array], noise: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            node, fillers = carry
            edges = graph.incoming[node]
            edge = edges[jnp.argmax(log_counts[edges] + noise)]
            is_there = node == graph.source
            arm = jnp.where(is_there, num_edges + fillers, edge).astype(jnp.int32)
            node = jnp.where(is_there, node, tails[edge])
            return (node, fillers + is_there.astype(jnp.int32)), arm

        start = (graph.target, jnp.zeros((), jnp.int32))
        return jax.lax.scan(back, start, noise)[1]

    shape = (n, problem.k, graph.incoming.shape[1])
    return jax.vmap(one)(jax.random.gumbel(key, shape))


def repair(problem: Problem, action: jax.Array, priority: jax.Array) -> jax.Array:
    """The path with most of the arms, and among these of highest priority."""
    priority = jnp.nan_to_num(priority)
    low, high = jnp.min(priority), jnp.max(priority)
    unit = (priority - low) / jnp.maximum(high - low, 1e-30)
    hot = to_multi_hot(action, problem.num_arms)
    return maximise(problem, hot + 0.5 / problem.k * unit)


def search(
    scene: Scene, model: Quadratic, starts: jax.Array, num_steps: int
) -> tuple[jax.Array, jax.Array]:
    """Go to the best path under the slope at this one, while that is better."""
    model = local_search.hollow(model)

    def step(action: jax.Array, nothing: None) -> tuple[jax.Array, None]:
        del nothing
        tried = maximise(scene.problem, _slope(model, action))
        is_up = local_search.evaluate(model, tried) > local_search.evaluate(
            model, action
        )
        return jnp.where(is_up, tried, action), None

    def one(start: jax.Array) -> jax.Array:
        length = min(num_steps, NUM_LINES)
        return jax.lax.scan(step, start.astype(jnp.int32), None, length=length)[0]

    found = jax.vmap(one)(starts)
    return found, jax.vmap(local_search.evaluate, (None, 0))(model, found)


def neighbours(
    key: Key, scene: Scene, terrain: Terrain, action: jax.Array, n: int
) -> jax.Array:
    """Detours: half where the model and what is unknown of it promise most."""
    hope_key, share_key, detour_key = jax.random.split(key, 3)
    number = n - n // 2
    hope = jax.random.uniform(hope_key, (number, terrain.reach.shape[0]))
    share = jax.random.uniform(share_key, (number, 1), maxval=5.0)
    slope = _slope(terrain.model, action)
    worth = slope[None, :] + share * hope * terrain.reach[None, :]
    bold = jax.vmap(maximise, (None, 0))(scene.problem, worth)
    return jnp.concatenate([bold, _detours(detour_key, scene.problem, action, n // 2)])


def best_neighbours(
    key: Key, scene: Scene, model: Quadratic, action: jax.Array, n: int
) -> jax.Array:
    """Random detours, the best first."""
    tried = _detours(key, scene.problem, action, n)
    values = jax.vmap(local_search.evaluate, (None, 0))(model, tried)
    return tried[jnp.argsort(-values)]


def _slope(model: Quadratic, action: jax.Array) -> jax.Array:
    """What an arm is worth beside the others: [L]."""
    return model.linear + 2.0 * jnp.sum(model.pair[action], axis=0)


def _detours(key: Key, problem: Problem, action: jax.Array, n: int) -> jax.Array:
    """Paths that leave the given one here and there: int32[n, K]."""
    noise_key, level_key = jax.random.split(key)
    noise = jax.random.uniform(noise_key, (n, problem.num_arms))
    # From next to none of the path left behind to most of it.
    level = jnp.exp(jax.random.uniform(level_key, (n, 1), minval=0.5, maxval=3.0))
    worth = to_multi_hot(action, problem.num_arms)[None, :] + level * noise
    return jax.vmap(maximise, (None, 0))(problem, worth)


def _count_paths(
    pairs: np.ndarray, num_nodes: int, source: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logarithm of the number of paths from the source, and edges of the longest."""
    degree = np.bincount(pairs[:, 1], minlength=num_nodes)
    counts = np.full(num_nodes, -np.inf)
    counts[source] = 0.0
    longest = np.zeros(num_nodes, np.int64)
    ready = list(np.flatnonzero(degree == 0))
    seen = 0
    while ready:
        node = ready.pop()
        seen += 1
        for edge in np.flatnonzero(pairs[:, 0] == node):
            head = pairs[edge, 1]
            if np.isfinite(counts[node]):
                longest[head] = max(longest[head], longest[node] + 1)
            counts[head] = np.logaddexp(counts[head], counts[node])
            degree[head] -= 1
            if degree[head] == 0:
                ready.append(head)
    if seen < num_nodes:
        raise ValueError(
            "The graph has a cycle; direct its edges so that no path returns to a node."
        )
    return counts, longest


def _everything(key: Key, problem: Problem, worth: jax.Array, size: int) -> jax.Array:
    """All arms: a path may need any edge."""
    del key, worth, size
    return jnp.arange(problem.num_arms, dtype=jnp.int32)


SPACE = Space(
    random=random,
    repair=repair,
    search=search,
    neighbours=neighbours,
    best_neighbours=best_neighbours,
    shortlist=_everything,
    restrict=lambda problem, arms: problem,
    maximise=maximise,
)
