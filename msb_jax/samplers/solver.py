"""Integer programs on what the master knows, and their neighbourhood.

First-order program: SCIP maximises b'x, b the master's marginals (paper, problem (4)).
Second-order program: x'Qx + d'x (problem (5)). At L=300 that one cannot be solved to
optimality, so a vmapped tabu search finds the incumbent, and SCIP gets it as a start
on the arms that matter, with a node limit; the better one wins. Around the optimum:
the best single swaps, the ends of walks with a bonus for arms of which little is known,
the optima of randomised models (posterior draws, shrunk towards the mean), and the
paper's Beta perturber. The master then puts what a search on its own bound finds from
there in the place of the worse half (`agent.refine`).

Source: paper, "Solver sampler"; ALGORITHMS I-1, I-20, I-34.

Differs from the paper:
* SCIP instead of Gurobi;
* the linear term of the quadratic model is kept (I-1);
* swaps and randomised models are added: a pool that holds only the results of one
  greedy search makes an optimistic master replay one set for ever;
* perturbed sets are repaired when constraints are hard (I-20).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.problem import Problem, to_multi_hot
from msb_jax.rng import stream
from msb_jax.samplers.base import (
    Context,
    Sampler,
    View,
    all_places,
    legal_sets,
    legalise,
    promising,
    scene_of,
    to_local,
    unpriced,
    value_of,
)
from msb_jax.solvers import local_search, scip
from msb_jax.solvers.bound_search import Terrain, walk
from msb_jax.spaces import space_of
from msb_jax.types import Key, Quadratic


@dataclass(frozen=True, kw_only=True)
class SolverConfig:
    """Settings of the solver sampler."""

    num_starts: int = 8  # tabu walks on the mean model
    num_steps: int = 60  # swaps in each of them
    draw_steps: int = 40  # swaps on each randomised model
    draw_scales: tuple[float, float] = (0.2, 1.0)  # share of the posterior deviation
    beta_share: float = 0.1  # of the proposals: the paper's perturber
    epsilon: float = 0.05  # eps0 of the Beta perturber
    linear_nodes: int = 200  # node limit of the linear program
    program_arms: int = 40  # arms of the quadratic program given to SCIP
    program_nodes: int = 1  # its node limit
    program_every: int = 10  # refreshes between two quadratic programs
    program_seconds: float = 5.0  # safety net only

    def __post_init__(self) -> None:
        if min(self.num_starts, self.num_steps, self.draw_steps) < 1:
            raise ValueError("Counts of starts and steps must be positive.")
        if not 0 < self.epsilon < 0.5:
            raise ValueError(f"epsilon must be in (0, 0.5), got {self.epsilon}.")


class SolverState(NamedTuple):
    """How often the sampler was refreshed."""

    refreshes: jax.Array  # [] int32


class SolverRequest(NamedTuple):
    """The programs of one refresh, for one run."""

    refreshes: jax.Array  # [] int32
    pair_price: jax.Array  # [] inf: conflicts are forbidden
    marginals: jax.Array  # [L]
    first_order: jax.Array  # [K] the linear optimum, where the space finds it
    graph: Any  # [L, L] pairs that the programs exclude, if not the conflicts
    walks: jax.Array  # [2W, K] sets found by search, without and with a bonus
    best: jax.Array  # [K] the best of them
    arms: jax.Array  # [A'] the arms of the quadratic program
    conflicts: jax.Array  # [A', A']
    pair: jax.Array  # [A', A']
    linear: jax.Array  # [A']


class SolverAnswer(NamedTuple):
    """The optima found by SCIP."""

    first_order: jax.Array  # [K]
    second_order: jax.Array  # [K]


def beta_perturb(key: Key, action: jax.Array, num_arms: int, eps: float) -> jax.Array:
    """Perturb a set: topK of Beta(e, 1-e) draws, e the clipped 0/1 vector.

    The draws come from Joehnk's rejection method, u^(1/a) / (u^(1/a) + v^(1/b)), in
    logarithms; with a + b = 1 and eps = 0.05 one try in twenty is rejected, so the
    last of five tries is taken as it is.

    Args:
        action: int32[K].
        num_arms: L.
        eps: clip at eps and 1 - eps; 0.05 changes about two of twenty arms (I-20).
    """
    mean = jnp.clip(to_multi_hot(action, num_arms), eps, 1.0 - eps)
    tries = jax.random.exponential(key, (5, 2, num_arms))
    first = -tries[:, 0] / mean[None]  # logarithms
    second = -tries[:, 1] / (1.0 - mean)[None]
    is_kept = jnp.logaddexp(first, second) <= 0.0
    chosen = jnp.where(jnp.any(is_kept, axis=0), jnp.argmax(is_kept, axis=0), 4)
    odds = jnp.take_along_axis(first - second, chosen[None], axis=0)[0]
    return jax.lax.top_k(odds, action.shape[0])[1].astype(jnp.int32)


def solver(config: SolverConfig = SolverConfig()) -> Sampler:
    """Build the solver sampler."""

    def init(key: Key, problem: Problem) -> SolverState:
        del key, problem
        return SolverState(refreshes=jnp.zeros((), jnp.int32))

    def update(key: Key, state: SolverState, context: Context) -> SolverState:
        del key, context
        return SolverState(refreshes=state.refreshes + 1)

    def request(key: Key, state: SolverState, view: View) -> SolverRequest:
        num_elites = min(max(1, config.num_starts // 2), view.elites.shape[0])
        num_random = max(1, config.num_starts - num_elites)
        random = legal_sets(key, view, num_random)
        starts = jnp.concatenate([view.elites[:num_elites], random])
        starts = to_local(view, starts, all_places(view))
        scene, space = scene_of(view, all_places(view)), space_of(view.problem)
        search = functools.partial(space.search, scene)
        walks, values = search(view.model, starts, config.num_steps)
        top = walks[jnp.argmax(values)]
        terrain = Terrain(local_search.hollow(view.model), scene.forbidden, view.reach)
        bold = walk(stream(key, "bold"), terrain, starts, config.num_steps, search)
        places = promising(view.model, top, max(config.program_arms, top.shape[0]))
        model, price = unpriced(view), view.pair_price
        conflicts = view.problem.conflicts[view.arms][:, view.arms]
        if space.exclusions is not None:
            # The program knows one kind of pair: excluded ones; conflicts that only
            # cost something stay in the model.
            model, price, conflicts = view.model, jnp.asarray(jnp.inf), scene.forbidden
        first_order = jnp.zeros((view.problem.k,), jnp.int32)
        if space.maximise is not None:
            first_order = space.maximise(view.problem, view.marginals)
        return SolverRequest(
            refreshes=state.refreshes,
            pair_price=price,
            marginals=view.marginals,
            first_order=first_order,
            graph=view.forbidden if space.exclusions is not None else (),
            walks=view.arms[jnp.concatenate([walks, bold])],
            best=view.arms[top],
            arms=view.arms[places],
            conflicts=conflicts[places][:, places],
            pair=model.pair[places][:, places],
            linear=model.linear[places],
        )

    def solve(problems: Problem, requests: SolverRequest) -> SolverAnswer:
        """Solve the programs of all runs on the host; every leaf has a leading B."""
        space = space_of(problems)
        if space.maximise is not None:
            return SolverAnswer(requests.first_order, requests.best)
        asked = jax.tree.map(np.asarray, requests)
        graphs = asked.graph if space.exclusions else np.asarray(problems.conflicts)
        jobs = [
            functools.partial(
                _solve_one, config, graphs[row], problems.k, _row(asked, row)
            )
            for row in range(graphs.shape[0])
        ]
        first, second = zip(*scip.solve_many(jobs), strict=True)
        return SolverAnswer(jnp.asarray(np.stack(first)), jnp.asarray(np.stack(second)))

    def propose(key: Key, state: SolverState, context: Context, n: int) -> jax.Array:
        del state
        view, asked, answer = context.view, context.request, context.answer
        beta_key, fix_key = jax.random.split(key)
        num_arms = view.problem.num_arms
        first, second = answer.first_order, answer.second_order
        if space_of(view.problem).exclusions is not None:
            # Where no K arms are free of conflicts SCIP may leave the space.
            first, second = (legalise(view, a, view.marginals) for a in (first, second))
        candidates = jnp.stack([asked.best, first, second])
        best = candidates[jnp.argmax(value_of(view, candidates))]
        found = [first[None], second[None], asked.walks]
        found.append(_randomised(config, view, best))
        num_beta = max(1, int(config.beta_share * n))
        noisy = jax.vmap(beta_perturb, in_axes=(0, None, None, None))(
            jax.random.split(beta_key, num_beta), best, num_arms, config.epsilon
        )
        priority = jax.random.uniform(fix_key, (num_beta, num_arms))
        found.append(jax.vmap(legalise, in_axes=(None, 0, 0))(view, noisy, priority))
        left = n - sum(part.shape[0] for part in found)
        if left > 0:
            found.append(_neighbours(stream(key, "near"), view, best, left))
        order = interleave([part.shape[0] for part in found])
        return jnp.concatenate(found)[order[:n]].astype(jnp.int32)

    return Sampler(
        name="solver",
        init=init,
        propose=propose,
        update=update,
        request=request,
        solve=solve,
        num_starts=12,
    )


def _randomised(config: SolverConfig, view: View, best: jax.Array) -> jax.Array:
    """Optima of the randomised models, searched from `best`: int32[R, K]."""
    places = view.draw_places
    arms = view.arms[places]
    mean, draws = unpriced(view), view.draws
    scale = jnp.linspace(*config.draw_scales, draws.linear.shape[0])
    pair_noise = draws.pair - mean.pair[places][:, places][None]
    linear_noise = draws.linear - mean.linear[places][None]
    priced = view.model
    mixed = Quadratic(
        pair=priced.pair[places][:, places][None] + scale[:, None, None] * pair_noise,
        linear=priced.linear[places][None] + scale[:, None] * linear_noise,
        offset=draws.offset,
    )
    start, scene = to_local(view, best[None], places), scene_of(view, places)
    find = space_of(view.problem).search

    def search(model: Quadratic) -> jax.Array:
        return find(scene, model, start, config.draw_steps)[0][0]

    return arms[jax.vmap(search)(mixed)]


def _neighbours(key: Key, view: View, best: jax.Array, n: int) -> jax.Array:
    """The best actions near `best`: int32[n, K]."""
    top = to_local(view, best[None], all_places(view))[0]
    near = space_of(view.problem).best_neighbours
    scene = scene_of(view, all_places(view))
    return view.arms[near(key, scene, local_search.hollow(view.model), top, n)]


def interleave(sizes: Sequence[int]) -> np.ndarray:
    """Order the rows of parts of these sizes so that any beginning has its share of
    each: whoever takes the first n proposals gets a bit of everything.
    """
    ranks = [(np.arange(size) + 0.5) / max(size, 1) for size in sizes]
    # The optima, parts of one row, come first.
    ranks = [r * 0.0 if r.size == 1 else r for r in ranks]
    return np.argsort(np.concatenate(ranks), kind="stable")


def _row(tree: Any, row: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[row], tree)


@functools.lru_cache(maxsize=64)
def _linear_program(graph: bytes, num_arms: int, k: int) -> scip.LinearProgram:
    """Keep what SCIP needs to know of a graph, for as long as it is in use."""
    return scip.LinearProgram(np.frombuffer(graph, bool).reshape(num_arms, num_arms), k)


def _solve_one(
    config: SolverConfig, graph: np.ndarray, k: int, asked: SolverRequest
) -> tuple[np.ndarray, np.ndarray]:
    """Solve both programs of one run: int32[K] each."""
    price = None if np.isinf(asked.pair_price) else float(asked.pair_price)
    start = np.sort(np.asarray(asked.best))
    if not (np.isfinite(asked.marginals).all() and np.isfinite(asked.pair).all()):
        # The master's algebra broke down in float32; it starts afresh next time.
        return start.astype(np.int32), start.astype(np.int32)
    program = _linear_program(graph.tobytes(), graph.shape[0], k)
    first = program.solve(
        asked.marginals, start=start, penalty=price, node_limit=config.linear_nodes
    ).action
    second = start.astype(np.int32)
    if int(asked.refreshes) % config.program_every == 0:
        places = np.flatnonzero(np.isin(asked.arms, start))
        small = scip.QuadraticProgram(asked.conflicts, k)
        solution = small.solve(
            asked.pair,
            asked.linear,
            start=places,
            penalty=price,
            node_limit=config.program_nodes,
            time_limit=config.program_seconds,
        )
        second = np.asarray(asked.arms)[solution.action].astype(np.int32)
    return first, second
