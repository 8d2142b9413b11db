"""The pointer network and the policy that learns it from demonstrations."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax import runner
from msb_jax.baselines import rlfd_training as lib
from msb_jax.baselines.rlfd import rlfd
from msb_jax.baselines.rlfd_training import RLfDConfig, RLfDState
from msb_jax.networks import pointer
from msb_jax.problem import (
    Problem,
    problem_from_conflicts,
    stack_problems,
    violated_pairs,
)
from msb_jax.types import Outcome

EDGES = np.array([[0, 1], [0, 2], [1, 2], [3, 4], [5, 6]])
SMALL: dict[str, Any] = {
    "n_re": 4,
    "f_in": 4,
    "hidden": 8,
    "num_paths": 4,
    "batch_size": 2,
    "num_steps": 2,
    "capacity": 16,
}


def make_problem(num_arms: int = 8, k: int = 3, edges: Any = EDGES) -> Problem:
    features = np.random.default_rng(0).normal(size=(num_arms, 2))
    return problem_from_conflicts(np.asarray(edges), k, features)


def make_net(problem: Problem, seed: int = 0) -> tuple[pointer.Pointer, Any]:
    net = pointer.Pointer(problem.num_arms, problem.k, 8)
    key = jax.random.key(seed)
    params = pointer.init_pointer(key, net, problem.features)
    # Logits far from equal, so that a wrong mask or normalisation shows.
    return net, jax.tree.map(lambda leaf: 3.0 * leaf, params)


@pytest.mark.parametrize("edges", [np.zeros((0, 2), int), [[0, 1], [2, 3]]])
def test_pointer__probabilities_of_all_paths_sum_to_one(edges: Any) -> None:
    problem = make_problem(4, 2, edges)
    net, params = make_net(problem)
    codes = pointer.encode(net, params, problem.features)
    paths = jnp.array(list(itertools.permutations(range(4), 2)), jnp.int32)

    def log_prob(path: jax.Array) -> jax.Array:
        decoding = pointer.follow(net, params, codes, problem.conflicts, path)
        return pointer.path_log_prob(decoding)

    log_probs = jax.jit(jax.vmap(log_prob))(paths)
    probs = np.exp(np.asarray(log_probs, np.float64))
    assert probs.sum() == pytest.approx(1.0, abs=1e-5)
    is_clash = np.asarray(violated_pairs(problem, paths)) > 0
    assert (probs[is_clash] == 0).all()
    assert (probs[~is_clash] > 0).all()
    assert probs.max() > 1.5 * probs[~is_clash].min()


def test_pointer__samples_follow_the_probabilities() -> None:
    problem = make_problem(4, 2, np.zeros((0, 2), int))
    net, params = make_net(problem)
    codes = pointer.encode(net, params, problem.features)
    count = 4000
    noise = jax.random.gumbel(jax.random.key(1), (count, 2, 4))

    @jax.jit
    @jax.vmap
    def draw(noise: jax.Array) -> jax.Array:
        return pointer.sample(net, params, codes, problem.conflicts, noise).path

    @jax.jit
    def log_prob(path: jax.Array) -> jax.Array:
        decoding = pointer.follow(net, params, codes, problem.conflicts, path)
        return pointer.path_log_prob(decoding)

    paths = np.asarray(draw(noise))
    for pair in itertools.permutations(range(4), 2):
        prob = float(jnp.exp(log_prob(jnp.array(pair, jnp.int32))))
        share = (paths == np.array(pair)).all(axis=1).mean()
        assert abs(share - prob) < 5 * np.sqrt(prob * (1 - prob) / count) + 1e-4


def test_pointer__never_repeats_and_avoids_conflicts_while_it_can() -> None:
    # Three triangles: four arms cannot avoid a conflict, three can.
    edges = [
        [i, j] for c in (0, 3, 6) for i, j in itertools.combinations(range(c, c + 3), 2)
    ]
    problem = make_problem(9, 4, edges)
    net, params = make_net(problem)
    codes = pointer.encode(net, params, problem.features)
    noise = 5.0 * jax.random.gumbel(jax.random.key(2), (200, 4, 9))
    none = jnp.zeros_like(problem.conflicts)

    def draw(noise: jax.Array, forbidden: jax.Array) -> jax.Array:
        return pointer.sample(net, params, codes, forbidden, noise).path

    run = jax.jit(jax.vmap(draw, (0, None)))
    free, bound = (
        np.asarray(run(noise, none)),
        np.asarray(run(noise, problem.conflicts)),
    )
    for paths in (free, bound):
        assert (np.diff(np.sort(paths, axis=1), axis=1) > 0).all()
    clashes = violated_pairs(problem, jnp.asarray(bound))
    assert (np.asarray(clashes) == 1).all()
    assert (np.asarray(violated_pairs(problem, jnp.asarray(bound[:, :3]))) == 0).all()
    assert (np.asarray(violated_pairs(problem, jnp.asarray(free))) > 1).any()


def test_pointer__encoder_is_permutation_equivariant() -> None:
    problem = make_problem()
    net, params = make_net(problem)
    order = np.random.default_rng(3).permutation(8)
    moved = {**params["params"], "embedding": params["params"]["embedding"][order]}
    plain = pointer.encode(net, params, problem.features).nodes
    permuted = pointer.encode(net, {"params": moved}, problem.features[order]).nodes
    np.testing.assert_allclose(permuted, plain[order], atol=1e-5)
    assert np.abs(np.asarray(permuted - plain)).max() > 0.1


def test_pointer__labels_are_never_masked() -> None:
    problem = make_problem()
    net, params = make_net(problem)
    codes = pointer.encode(net, params, problem.features)
    path = jnp.array([1, 3, 7], jnp.int32)
    decoding = pointer.follow(net, params, codes, problem.conflicts, path)
    # Arm 2 conflicts with 1, arm 4 with 3: only 7 stays open to the end.
    labels, is_label = pointer.align(decoding, jnp.array([2, 4, 7], jnp.int32))
    assert labels.tolist() == [2, 4, 7]
    assert is_label.all()
    labels, is_label = pointer.align(decoding, jnp.array([1, 2, 4], jnp.int32))
    assert labels[:2].tolist() == [1, 4]
    assert is_label.tolist() == [True, True, False]


def test_rlfd__supervision_alone_reproduces_a_demonstration() -> None:
    problem = make_problem()
    changes = {"constraints": "hard", "coe": 1.0, "num_steps": 150}
    config = RLfDConfig(**SMALL | changes | {"learning_rate": 1e-2})
    state: RLfDState = rlfd(config).init(jax.random.key(0), problem)
    target = jnp.array([6, 0, 3], jnp.int32)
    state = state._replace(
        demonstrations=jnp.tile(target, (config.num_demonstrations, 1))
    )

    @jax.jit
    def learn(key: jax.Array, state: RLfDState) -> jax.Array:
        state = lib.train_actor(key, config, lib.make_optimizer(config), state)
        net = lib.make_net(config, problem)
        codes = pointer.encode(net, state.actor.params, problem.features)
        forbidden = lib.forbidden_pairs(config, problem)
        noise = jnp.zeros((problem.k, problem.num_arms))
        return pointer.sample(net, state.actor.params, codes, forbidden, noise).path

    assert learn(jax.random.key(1), state).tolist() == target.tolist()


def test_rlfd__the_policy_loss_alone_follows_the_estimator() -> None:
    problem = make_problem()
    changes = {"coe": 0.0, "num_steps": 150, "learning_rate": 1e-2, "num_paths": 8}
    config = RLfDConfig(**SMALL | changes)
    state: RLfDState = rlfd(config).init(jax.random.key(0), problem)
    worth = jnp.array([0.0, 2.0, 0.0, 0.0, 2.0, 0.0, 0.0, 2.0]) - 0.75
    estimator = jax.tree.map(jnp.zeros_like, state.estimator.params)
    estimator["params"]["linear"] = worth
    state = state._replace(estimator=state.estimator._replace(params=estimator))

    @jax.jit
    def learn(key: jax.Array, state: RLfDState) -> jax.Array:
        train_key, draw_key = jax.random.split(key)
        state = lib.train_actor(train_key, config, lib.make_optimizer(config), state)
        net = lib.make_net(config, problem)
        codes = pointer.encode(net, state.actor.params, problem.features)
        return lib.draw_paths(draw_key, config, state, codes, 100)

    paths = np.sort(np.asarray(learn(jax.random.key(1), state)), axis=1)
    assert (paths == np.array([1, 4, 7])).all(axis=1).mean() > 0.8


def linear_step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, Outcome]:
    mean = state[action].sum()
    return state, Outcome(mean + 0.01 * jax.random.normal(key), mean)


def play(config: RLfDConfig, problem: Problem, worth: np.ndarray, rounds: int) -> Any:
    return runner.run(
        rlfd(config),
        linear_step,
        jnp.asarray(worth, jnp.float32)[None],
        stack_problems([problem]),
        jax.random.split(jax.random.key(0), 1),
        rounds=rounds,
        f_in=config.f_in,
    )


def test_rlfd__learns_a_linear_reward_without_conflicts() -> None:
    rng = np.random.default_rng(5)
    worth = rng.permutation(np.linspace(0.0, 1.0, 12))
    edges = [[i, i + 1] for i in range(0, 12, 2)]
    problem = make_problem(12, 3, edges)
    config = RLfDConfig(
        constraints="hard",
        n_re=24,
        f_in=8,
        hidden=16,
        num_paths=8,
        batch_size=4,
        learning_rate=5e-3,
    )
    curves = play(config, problem, worth, 320)
    assert (curves.violations == 0).all()
    best = max(
        worth[list(s)].sum()
        for s in itertools.combinations(range(12), 3)
        if all([min(p), max(p)] not in edges for p in itertools.combinations(s, 2))
    )
    first, last = curves.mean_reward[0, :24].mean(), curves.mean_reward[0, -40:].mean()
    # More than half of the way from a random set (1.5) to the best one (2.6).
    assert best > 1.5 * first
    assert last - first > 0.5 * (best - first)


def test_rlfd__a_lost_answer_teaches_nothing() -> None:
    policy = rlfd(RLfDConfig(**SMALL))
    state = policy.init(jax.random.key(0), make_problem())
    action = jnp.array([5, 6, 7], jnp.int32)
    told = policy.tell(jax.random.key(1), state, action, jnp.float32(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, told, state)


def test_rlfd__penalise_takes_the_price_of_conflicts_off() -> None:
    action = jnp.array([0, 1, 2], jnp.int32)  # three of the five conflicts
    for penalise, expected in ((False, 2.0), (True, 2.0 - 5.0 * 3 / 5)):
        policy = rlfd(RLfDConfig(**SMALL, penalise=penalise, lam=5.0))
        state = policy.init(jax.random.key(0), make_problem())
        state = policy.tell(jax.random.key(1), state, action, jnp.float32(2.0))
        assert state.rewards[0] == pytest.approx(expected)


def test_rlfd__demonstrations_are_the_best_distinct_rounds_of_all() -> None:
    config = RLfDConfig(**SMALL | {"capacity": 3, "num_demonstrations": 2})
    policy = rlfd(config)
    state = policy.init(jax.random.key(0), make_problem())
    rounds = [((0, 1, 2), 5.0), ((2, 1, 0), 4.0), ((3, 4, 5), 1.0), ((4, 5, 6), 2.0)]
    for arms, reward in rounds:
        action = jnp.array(arms, jnp.int32)
        state = policy.tell(jax.random.key(1), state, action, jnp.float32(reward))
        values, sets = lib.best_sets(state)
        state = state._replace(values=values, demonstrations=sets)
    # The ring of three rounds has forgotten the first; the second is the same set.
    assert state.values.tolist() == [5.0, 2.0]
    assert state.demonstrations.tolist() == [[0, 1, 2], [4, 5, 6]]


@pytest.mark.parametrize(
    ("num_arms", "k", "edges"),
    [
        (2, 1, [[0, 1]]),
        (4, 4, list(itertools.combinations(range(4), 2))),
    ],
)
def test_rlfd__tiny_problems(num_arms: int, k: int, edges: Any) -> None:
    problem = make_problem(num_arms, k, edges)
    config = RLfDConfig(**SMALL | {"constraints": "hard"})
    curves = play(config, problem, np.linspace(0.0, 1.0, num_arms), 16)
    assert np.isfinite(curves.reward).all()


def test_mend__keeps_a_feasible_path_and_repairs_another() -> None:
    problem = make_problem()
    fill = jnp.linspace(0.0, 0.9, 8)
    path = jnp.array([6, 0, 3], jnp.int32)
    assert lib.mend(problem, path, fill).tolist() == [6, 0, 3]
    stuck = jnp.array([0, 3, 1], jnp.int32)  # 0 and 1 conflict; 7 fills best
    assert lib.mend(problem, stuck, fill).tolist() == [0, 3, 7]


@pytest.mark.parametrize(
    "bad",
    [
        {"constraints": "firm"},
        {"n_re": -1},
        {"f_in": 0},
        {"coe": 1.5},
        {"hidden": 7},
        {"lam": float("nan")},
        {"learning_rate": 0.0},
        {"capacity": 1},
    ],
)
def test_rlfd_config__refuses_bad_values(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        RLfDConfig(**bad)
