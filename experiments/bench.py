"""Where the time goes: `python -m experiments.bench [--json=FILE]`.

Four suites. `rounds` plays the default setting and splits the seconds of a round by
the stages of the agent. `samplers` times each learning sampler at the default size and
shows what it learns of a known objective (`competence`). `confidence` times the three
forms of the exact NeuralUCB confidence as the history grows. `drift` compares the
float32 belief of the closed-form master with a float64 one over a long history. All
times are without compilation.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import competence, files, flags, harness, synthetic
from experiments.flags import flag
from experiments.progress import Progress
from experiments.tables import markdown_table
from msb_jax import runner
from msb_jax.agent.master_slave import MasterSlaveConfig, master_slave
from msb_jax.link import to_latent
from msb_jax.masters import set_kernel
from msb_jax.masters.confidence import confidence
from msb_jax.masters.evidence import row_noise
from msb_jax.masters.ntk_ucb import NtkUcbConfig, ntk_ucb
from msb_jax.networks import ucb
from msb_jax.problem import problem_from_conflicts, random_sets
from msb_jax.samplers.base import Context
from msb_jax.samplers.registry import DEFAULT, make_samplers

SUITES = ("rounds", "samplers", "confidence", "drift")
LEARNERS = ("cem_ppo", "wolpertinger", "g2anet")
WARM_UP = 600  # random rounds
WIDTH = 32  # of the network whose confidence is timed


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the benchmark."""

    suite: tuple[str, ...] = flag(SUITES, "what is measured")
    rounds: int = flag(5000, "rounds of each run")
    num_seeds: tuple[int, ...] = flag((1, 10), "runs side by side")
    num_arms: int = flag(300, "arms, L")
    k: int = flag(20, "arms in an action, K")
    form: str = flag("cubic", "reward")
    samplers: tuple[str, ...] = flag(DEFAULT, "of the agent")
    learners: tuple[str, ...] = flag(LEARNERS, "samplers that are timed and tested")
    refreshes: int = flag(200, "updates a sampler gets for the known objective")
    history: int = flag(5000, "longest history of the other suites")
    json: str | None = flag(None, "also write the figures to this file")

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_seeds", tuple(int(n) for n in self.num_seeds))
        unknown = [name for name in self.suite if name not in SUITES]
        if unknown:
            raise ValueError(f"--suite must name some of {', '.join(SUITES)}.")
        if min(self.rounds, self.history, self.num_arms, *self.num_seeds) < 1:
            raise ValueError("Rounds, history, arms and seeds must be positive.")


class StageClock:
    """Seconds by stage of a refresh, compilation left out."""

    def __init__(self, compiled: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._compiled = compiled
        self.start()

    def start(self) -> None:
        """Begin to measure."""
        self._last, self._last_compiled = time.perf_counter(), self._compiled()

    def __call__(self, stage: str, result: Any) -> None:
        jax.block_until_ready(result)
        wall = time.perf_counter() - self._last
        self.seconds[stage] += wall - (self._compiled() - self._last_compiled)
        self.start()


def time_call(function: Callable[..., Any], *args: Any, repeat: int = 3) -> float:
    """Best of `repeat` calls in seconds, after one that compiles."""
    jax.block_until_ready(function(*args))
    best = np.inf
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        best = min(best, time.perf_counter() - start)
    return float(best)


def matmul_peak(size: int = 2048) -> float:
    """Floating-point operations a second of a large float32 matrix product."""
    matrix = jax.random.normal(jax.random.key(0), (size, size))
    return 2.0 * size**3 / time_call(jax.jit(lambda a: a @ a), matrix)


def bench_rounds(config: Config, num_seeds: int, progress: Progress) -> dict[str, Any]:
    """Seconds per round and seed of the default setting, by stage."""
    setting = synthetic.Config(
        form=config.form,
        rounds=config.rounds,
        num_seeds=num_seeds,
        num_arms=config.num_arms,
        k=config.k,
        n_re=min(WARM_UP, 2 * config.num_arms),
    )
    with tempfile.TemporaryDirectory() as folder:
        task = synthetic.prepare(setting, Path(folder), progress)
    with runner.compile_clock() as compiled:
        clock = StageClock(compiled)
        agent = master_slave(
            ntk_ucb(NtkUcbConfig()),
            make_samplers(config.samplers),
            MasterSlaveConfig(n_re=setting.n_re or 0, f_in=setting.f_in),
            watch=clock,
        )
        progress.start(f"{num_seeds} seeds", config.rounds)

        squares = 0.0  # rows of the factor, squared, over all refreshes and seeds

        def on_block(snapshot: runner.Snapshot) -> None:
            nonlocal squares
            progress.update(snapshot.round)
            if snapshot.round > (setting.n_re or 0):
                rows = np.asarray(snapshot.state.master.history.absorbed)[:num_seeds]
                squares += float(np.sum(rows.astype(float) ** 2))
            clock.start()

        curves = runner.run(
            agent,
            task.env_step,
            task.env_states,
            task.problems,
            task.keys,
            rounds=config.rounds,
            f_in=setting.f_in,
            on_block=on_block,
        )
        progress.stop()
    steps = config.rounds * num_seeds
    stages = {name: value / steps for name, value in clock.seconds.items()}
    stages["rounds"] = curves.seconds_per_round - sum(stages.values())
    # Products with the factor: pool, new rows, draws (three), coefficients.
    columns = setting.n_es * setting.f_in + setting.f_in + 3 * 16 + 2
    flops = squares * columns
    return {
        "num_seeds": num_seeds,
        "num_arms": config.num_arms,
        "rounds": config.rounds,
        "seconds_per_round": curves.seconds_per_round,
        "compile_seconds": float(np.sum(curves.compile_seconds)),
        "stages": stages,
        "solve_flops_per_second": flops / (curves.seconds_per_round * steps),
    }


def bench_samplers(config: Config, progress: Progress) -> dict[str, Any]:
    """Milliseconds of each learning sampler, and what it learns."""
    names = list(config.learners)
    seconds, learned = {}, []
    progress.start("samplers", 5 * len(names))
    for number, name in enumerate(names):
        sampler = make_samplers((name,))[0]
        seconds[name] = _time_sampler(config, sampler)
        for row, form in enumerate(("linear", "quadratic")):
            for demonstrations in (False, True):
                train = jax.jit(
                    lambda key, objective, s=sampler, d=demonstrations: (
                        competence.train(
                            key,
                            s,
                            objective,
                            refreshes=config.refreshes,
                            demonstrations=d,
                        )[1]
                    )
                )
                reports = [
                    train(
                        jax.random.key(seed), competence.make_objective(seed, form=form)
                    )
                    for seed in range(5)
                ]
                report = jax.tree.map(lambda *leaves: np.array(leaves), *reports)
                learned.append(
                    {"sampler": name, "form": form, "demonstrations": demonstrations}
                    | {key: value.tolist() for key, value in report._asdict().items()}
                )
            progress.update(5 * number + 2 * row + 2)
    progress.stop()
    return {"seconds": seconds, "competence": learned}


def _time_sampler(config: Config, sampler: Any, num_proposals: int = 40) -> float:
    """Seconds of one update and its proposals at the size of the config."""
    objective = competence.make_objective(
        0, form="quadratic", num_arms=config.num_arms, k=config.k, density=0.0883
    )
    view = competence.known_view(objective)

    @jax.jit
    def step(seed: jax.Array, state: Any) -> tuple[Any, Any]:
        first, second = jax.random.split(jax.random.key(seed))
        context = Context(view=view)
        state = sampler.update(first, state, context)
        return state, sampler.propose(second, state, context, num_proposals)

    state = sampler.init(jax.random.key(0), objective.problem)
    return time_call(step, jnp.asarray(1), state)


def bench_confidence(config: Config) -> list[dict[str, Any]]:
    """Seconds to judge 200 sets, by form and length of the history."""
    problem = problem_from_conflicts(
        np.zeros((config.num_arms, config.num_arms), bool), config.k
    )
    net = ucb.UcbNet(num_arms=config.num_arms, width=WIDTH, depth=2)
    params = ucb.init_params(jax.random.key(0), net)
    judged = ucb.factors(net, params, random_sets(jax.random.key(1), problem, 200))
    lengths = [n for n in (250, 500, 1000, 2000, 4000) if n < config.history]
    results = []
    for kind in ("exact", "diagonal", "full"):
        bundle = confidence(
            kind, num_arms=config.num_arms, width=WIDTH, depth=2, lam1=1.0
        )
        # The p x p form costs the same at every length, and hours to fill.
        for length in [*lengths, config.history] if kind != "full" else [20]:
            played = random_sets(jax.random.key(2), problem, length)
            grads = ucb.factors(net, params, played)
            state = jax.jit(bundle.absorb)(
                bundle.init(length, config.k), grads, jnp.asarray(length)
            )
            seconds = time_call(jax.jit(bundle.variance), state, judged)
            results.append({"kind": kind, "history": length, "seconds": seconds})
    return results


def bench_drift(config: Config) -> dict[str, float]:
    """Largest error of the float32 belief after a long history, learnt as in a run.

    The reference is a float64 factorisation of the same kernel; errors are in
    deviations of the reward.
    """
    master = ntk_ucb(NtkUcbConfig())
    rng = np.random.default_rng(0)
    graph = np.zeros((config.num_arms, config.num_arms), bool)
    problem = problem_from_conflicts(graph, config.k)
    theta = rng.random(config.num_arms)
    # A history as a run has it: random sets first, then single swaps of one set.
    favourite = np.sort(np.argsort(theta)[-config.k :])
    actions = np.stack(
        [rng.permutation(config.num_arms)[: config.k] for _ in range(config.history)]
    )
    for row in range(min(WARM_UP, config.history), config.history):
        actions[row] = favourite
        others = np.setdiff1d(np.arange(config.num_arms), favourite)
        actions[row, rng.integers(config.k)] = rng.choice(others)
    rewards = theta[actions].sum(1) + 0.1 * rng.normal(size=len(actions))
    state = master.grow(master.init(jax.random.key(0), problem), config.history + 40)

    def tell(state: Any, pair: Any) -> tuple[Any, None]:
        return master.update(jax.random.key(0), state, *pair), None

    run = jax.jit(lambda s, p: jax.lax.scan(tell, s, p)[0])
    refresh = {
        fit: jax.jit(lambda s, fit=fit: master.refresh(jax.random.key(0), s, fit=fit))
        for fit in (False, True)
    }
    pairs = (jnp.asarray(actions, jnp.int32), jnp.asarray(rewards, jnp.float32))
    for start in range(0, config.history, 20):
        state = run(state, tuple(array[start : start + 20] for array in pairs))
        if start + 20 >= WARM_UP:
            state = refresh[master.due(state)](state)
    sets = np.concatenate([actions[-50:], actions[:50]])
    belief = jax.jit(master.belief)(state, jnp.asarray(sets, jnp.int32))
    mean, variance = _float64_belief(state, sets)
    unit = float(state.scales.deviation)
    deviation = np.sqrt(np.maximum(np.diagonal(belief.cov), 0.0))
    return {
        "history": config.history,
        "mean_error": float(np.max(np.abs(belief.mean - mean)) / unit),
        "deviation_error": float(np.max(np.abs(deviation - np.sqrt(variance))) / unit),
    }


def _float64_belief(state: Any, sets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the same model, by NumPy in float64."""
    count = int(state.history.absorbed)
    actions, rewards = state.history.actions[:count], state.history.rewards[:count]
    scales = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.scales)
    size = state.problem.num_arms
    tables = np.asarray(set_kernel.basis_tables(sets.shape[1], 2), np.float64)
    table = np.exp(scales.log_weights) @ tables
    noise = np.asarray(row_noise(state.scales, state.history.plays[:count]), np.float64)
    hot = np.zeros((len(actions) + len(sets), size))
    np.put_along_axis(hot, np.concatenate([actions, sets]), 1.0, axis=1)
    rows, others = hot[: len(actions)], hot[len(actions) :]
    gram = table[np.rint(rows @ rows.T).astype(int)] + np.diag(noise)
    cross = table[np.rint(rows @ others.T).astype(int)]
    latent = np.asarray(to_latent(state.scales.link, rewards))
    target = (latent - scales.center) / scales.deviation
    solved = np.linalg.solve(gram, np.column_stack([cross, target, np.ones(len(rows))]))
    ones = solved[:, -1]
    level = ones @ target / ones.sum()
    mean = cross.T @ (solved[:, -2] - level * ones) + level
    doubt = 1.0 - cross.T @ ones
    variance = (
        table[-1] - np.sum(cross * solved[:, :-2], axis=0) + doubt**2 / ones.sum()
    )
    unit = scales.deviation
    return scales.center + unit * mean, unit**2 * variance


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, and write the figures if asked to."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--help" in arguments:
        print(flags.usage(Config, "python -m experiments.bench"))
        return 0
    try:
        config = Config(**flags.parse(Config, arguments))
    except (flags.UsageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    harness.use_compilation_cache()
    figures: dict[str, Any] = {"device": str(jax.devices()[0]), "config": vars(config)}
    figures["matmul_flops_per_second"] = peak = matmul_peak()
    print(f"matrix product: {peak / 1e9:.0f} GFlop/s on one device")
    with Progress() as progress:
        if "rounds" in config.suite:
            figures["rounds"] = [
                bench_rounds(config, n, progress) for n in config.num_seeds
            ]
            _print_rounds(figures["rounds"], peak)
        if "samplers" in config.suite:
            figures["samplers"] = bench_samplers(config, progress)
            _print_samplers(config, figures["samplers"])
        if "confidence" in config.suite:
            figures["confidence"] = bench_confidence(config)
            print("\nJudging 200 sets (network of width 32):\n")
            rows = [
                [r["kind"], str(r["history"]), f"{1e3 * r['seconds']:.2f}"]
                for r in figures["confidence"]
            ]
            print(markdown_table(["confidence", "history", "ms"], rows))
        if "drift" in config.suite:
            figures["drift"] = drift = bench_drift(config)
            print(
                f"\nfloat32 against float64 after {drift['history']} rounds, in "
                f"deviations of the reward: mean {drift['mean_error']:.1e}, "
                f"deviation {drift['deviation_error']:.1e}"
            )
    if config.json is not None:
        files.write_json(Path(config.json), figures)
    return 0


def _print_rounds(results: Sequence[dict[str, Any]], peak: float) -> None:
    stages = list(results[0]["stages"])
    header = ["seeds", "ms a round and seed", *stages, "compile s", "% of peak"]
    rows = [
        [
            str(result["num_seeds"]),
            f"{1e3 * result['seconds_per_round']:.2f}",
            *(f"{1e3 * result['stages'].get(stage, 0.0):.2f}" for stage in stages),
            f"{result['compile_seconds']:.0f}",
            f"{100 * result['solve_flops_per_second'] / peak:.0f}",
        ]
        for result in results
    ]
    print(f"\nL={results[0]['num_arms']}, {results[0]['rounds']} rounds:\n")
    print(markdown_table(header, rows))


def _print_samplers(config: Config, figures: dict[str, Any]) -> None:
    print(f"\nA refresh of one sampler, L={config.num_arms}, one seed:\n")
    times = [[n, f"{1e3 * s:.0f}"] for n, s in figures["seconds"].items()]
    print(markdown_table(["sampler", "ms"], times))
    print(
        f"\nA known objective, 6 of 60 arms, {config.refreshes} refreshes, five seeds "
        "(shares of the optimum; conflicting pairs):\n"
    )
    header = ["sampler", "form", "demonstrations", "best (worst seed)", "mean"]
    header += ["random", "pairs", "random pairs"]
    rows = [
        [
            r["sampler"],
            r["form"],
            "yes" if r["demonstrations"] else "no",
            f"{np.mean(r['best']):.3f} ({np.min(r['best']):.3f})",
            f"{np.mean(r['mean']):.3f}",
            f"{np.mean(r['random_mean']):.3f}",
            f"{np.mean(r['violation']):.2f}",
            f"{np.mean(r['random_violation']):.2f}",
        ]
        for r in figures["competence"]
    ]
    print(markdown_table(header, rows))


if __name__ == "__main__":
    sys.exit(main())
