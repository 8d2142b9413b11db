"""Paths, coverage and lists: environments, peers, and the agent on all of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import cascading, other_problems
from msb_jax import runner
from msb_jax.agent.ordered import ordered
from msb_jax.baselines.registry import make_policy
from msb_jax.baselines.structured_ts import greedy_cover
from msb_jax.envs import max_coverage, shortest_path
from msb_jax.envs import position_based as pbm
from msb_jax.problem import problem_from_conflicts, violated_pairs
from msb_jax.spaces.paths import is_path
from msb_jax.types import Policy

AGENT = {"samplers": ("solver", "random_best", "teacher_student"), "n_re": 20}
SETTINGS = {"constraints": "hard", "f_in": 20, **AGENT}


def _play(
    policy: Policy, step: object, state: object, problem: object, rounds: int
) -> runner.Curves:
    def batch(tree: object) -> object:
        return jax.tree.map(lambda leaf: leaf[None], tree)

    keys = jax.random.split(jax.random.key(3), 1)
    return runner.run(
        policy, step, batch(state), batch(problem), keys, rounds=rounds, f_in=20
    )


def test_shortest_path__rewards_the_time_saved() -> None:
    config = shortest_path.ShortestPathConfig(rows=3, columns=3, noise_std=0.0)
    state, truth = shortest_path.make_instance(config, 4)
    delays = np.asarray(state.delays, float)
    every = [
        np.array(edges)
        for edges in itertools.combinations(range(12), 4)
        if is_path(state.problem, np.array(edges))
    ]
    assert len(every) == 6
    least = min(delays[path].sum() for path in every)
    assert delays[truth.action].sum() == pytest.approx(least, abs=1e-6)
    for path in every:
        _, outcome = shortest_path.step(jax.random.key(0), state, jnp.asarray(path))
        want = (4 - delays[path].sum()) / (4 - least)
        assert float(outcome.reward) == pytest.approx(want, abs=1e-5)
        assert float(outcome.mean_reward) == float(outcome.reward)


def test_max_coverage__truth_is_the_best_of_all() -> None:
    config = max_coverage.MaxCoverageConfig(
        num_arms=9, k=3, num_elements=25, share=0.2, noise_std=0.0
    )
    state, truth = max_coverage.make_instance(config, 1)
    members = np.asarray(state.problem.features) > 0
    weights = np.asarray(state.weights, float)
    values = {
        sets: weights[members[list(sets)].any(axis=0)].sum()
        for sets in itertools.combinations(range(9), 3)
    }
    assert truth.status == "optimal"
    assert values[tuple(truth.action.tolist())] == pytest.approx(max(values.values()))
    for sets in list(values)[::7]:
        _, outcome = max_coverage.step(jax.random.key(0), state, jnp.array(sets))
        want = values[sets] / max(values.values())
        assert float(outcome.mean_reward) == pytest.approx(want, abs=1e-5)
    # Greedy by hand: the set that adds most, one after the other.
    chosen: list[int] = []
    for _ in range(3):
        gains = [
            -1.0 if i in chosen else weights[members[[*chosen, i]].any(axis=0)].sum()
            for i in range(9)
        ]
        chosen.append(int(np.argmax(gains)))
    np.testing.assert_array_equal(greedy_cover(state.problem, state.weights), chosen)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: shortest_path.ShortestPathConfig(rows=1, columns=1), "two nodes"),
        (lambda: shortest_path.ShortestPathConfig(noise_std=-1), "noise_std"),
        (lambda: max_coverage.MaxCoverageConfig(k=101), "k must be"),
        (lambda: max_coverage.MaxCoverageConfig(share=0.0), "share"),
        (lambda: shortest_path.make_instance(None, -1), "seed"),
        (lambda: make_policy("path_ts", {"ts_noise": 0.0}), "positive"),
    ],
)
def test_settings__say_what_is_wrong(make: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize("name", ["path_ts", "coverage_ts"])
def test_peers__find_the_optimum(name: str) -> None:
    module = {"path_ts": shortest_path, "coverage_ts": max_coverage}[name]
    config = {
        "path_ts": lambda: shortest_path.ShortestPathConfig(rows=4, columns=4),
        "coverage_ts": lambda: max_coverage.MaxCoverageConfig(
            num_arms=15, k=3, num_elements=30
        ),
    }[name]()
    state, _ = module.make_instance(config, 0)
    curves = _play(make_policy(name, {}), module.step, state, state.problem, 300)
    assert curves.mean_reward[0, -60:].mean() > 0.97
    assert curves.mean_reward[0, 0] < 0.95


@pytest.mark.slow
def test_agent__finds_the_shortest_path() -> None:
    config = shortest_path.ShortestPathConfig(rows=4, columns=4)
    state, _ = shortest_path.make_instance(config, 1)
    agent = make_policy("master_slave", SETTINGS)
    curves = _play(agent, shortest_path.step, state, state.problem, 160)
    assert curves.mean_reward[0, -40:].mean() > 0.97
    assert curves.mean_reward[0, :20].mean() < 0.9


@pytest.mark.slow
def test_agent__orders_a_list_without_conflicts_of_items() -> None:
    config = pbm.PositionBasedConfig(num_arms=12, k=4, num_constraints=10, decay=0.6)
    instance = pbm.make_instance(config, 2)
    state = pbm.env_state(instance)
    agent = make_policy("master_slave", SETTINGS | {"is_ordered": True})
    curves = _play(agent, pbm.step, state, instance.problem, 240)
    best = instance.ground_truth.reward
    assert curves.mean_reward[0, -40:].mean() / best > 0.97
    assert (curves.violations == 0).all()
    assert curves.mean_reward[0, :20].mean() / best < 0.85


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lists", "paths"])
def test_learners__play_every_space(name: str) -> None:
    """Whatever the three learning samplers propose is a legal action."""
    settings = SETTINGS | {"samplers": ("wolpertinger", "g2anet", "cem_ppo")}
    settings |= {"f_in": 10, "n_re": 10, "n_es": 4}
    if name == "paths":
        config = shortest_path.ShortestPathConfig(rows=3, columns=3)
        state, _ = shortest_path.make_instance(config, 0)
        step, problem = shortest_path.step, state.problem
    else:
        instance = pbm.make_instance(
            pbm.PositionBasedConfig(num_arms=8, k=3, num_constraints=3), 0
        )
        step, problem, state = pbm.step, instance.problem, pbm.env_state(instance)
        settings |= {"is_ordered": True}
    agent = make_policy("master_slave", settings)
    played: list[np.ndarray] = []
    run = agent.init(jax.random.key(0), problem)
    ask, tell = jax.jit(agent.ask), jax.jit(agent.tell)
    for t in range(40):
        keys = jax.random.split(jax.random.key(t), 4)
        if t % 10 == 0:
            run = agent.refresh(keys[0], run)
        run, action = ask(keys[1], run)
        played.append(np.asarray(action))
        _, outcome = step(keys[2], state, action)
        run = tell(keys[3], run, action, outcome.reward)
    for action in played:
        if name == "paths":
            assert is_path(problem, action)
        else:
            assert len(set(action.tolist())) == 3
            assert int(violated_pairs(problem, jnp.asarray(action))) == 0
    pool = np.asarray((run if name == "paths" else run.inner).pool.actions)
    assert len(np.unique(pool, axis=0)) > 1
    if name == "paths":
        assert all(is_path(problem, action) for action in pool)
    else:
        np.testing.assert_array_equal(pool // 8, np.tile(np.arange(3), (40, 1)))
        assert all(len(set(items)) == 3 for items in (pool % 8).tolist())


def test_ordered__speaks_of_items_outside_and_of_placements_inside() -> None:
    problem = problem_from_conflicts(np.zeros((5, 5), bool), 2)
    policy = ordered(make_policy("random", {}))
    state = policy.init(jax.random.key(0), problem)
    assert state.problem.num_arms == 10
    asked = [policy.ask(jax.random.key(i), state)[1] for i in range(40)]
    lists = np.array(asked)
    assert lists.max() == 4 and lists.min() == 0
    assert (lists[:, 0] != lists[:, 1]).all()
    assert len(np.unique(lists, axis=0)) > 12  # both orders of a pair occur
    policy.tell(jax.random.key(1), state, jnp.array([3, 1]), jnp.ones(()))
    assert int(policy.origin(state)) == 0


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (cascading.main, ["--num_arms=8", "--k=3", "--policies=cascade_kl_ucb,random"]),
        (other_problems.main, ["--grid=3", "--policies=path_ts,random,oracle"]),
        (
            other_problems.main,
            ["--problem=max_coverage", "--num_arms=8", "--k=2", "--policies=random"],
        ),
        (
            other_problems.main,
            ["--problem=position_based", "--num_arms=8", "--k=2", "--policies=pbm_ucb"],
        ),
    ],
)
def test_experiments__write_the_same_files(
    main: object, argv: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    code = main([*argv, "--rounds=30", "--num_seeds=1", "--n_re=5", f"--out={out}"])
    assert code == 0
    summary = json.loads((out / "summary.json").read_text())
    for figures in summary["policies"].values():
        assert 0 < figures["gt_fraction"] <= 1 + 1e-6
    if "oracle" in summary["policies"]:
        assert summary["policies"]["oracle"]["gt_fraction"] == pytest.approx(
            1, abs=1e-5
        )
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "curves.npz", "summary.md", "curves.png"} <= names


@pytest.mark.parametrize(
    ("main", "argv", "sentence"),
    [
        (cascading.main, ["--policies=lin_ts"], "no policy 'lin_ts'"),
        (cascading.main, ["--gamma=2"], "gamma"),
        (cascading.main, ["--k=200"], "k must be"),
        (other_problems.main, ["--problem=knapsack"], "problem"),
        (other_problems.main, ["--grid=1"], "--grid must be at least 2"),
        (other_problems.main, ["--policies=pbm_ucb"], "no policy 'pbm_ucb'"),
    ],
)
def test_experiments__refuse_wrong_flags_in_a_sentence(
    main: object, argv: list[str], sentence: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error
