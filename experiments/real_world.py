"""Real logs: learn what a user clicks on, while the user's interests move.

    python -m experiments.real_world --dataset=demo
    python -m experiments.real_world --dataset=lastfm --data=lastfm.npz

`experiments.prepare` makes the files. Rewards are the share of a window of clicks that
falls on the set (`--feedback=real`), or one of the synthetic forms on the arms of the
log, whose weights are then what the user likes (I-8). All seeds play the same log.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments import harness
from experiments.flags import UsageError, flag
from experiments.prepare import DATASETS
from experiments.progress import Progress
from experiments.run_flags import SAMPLERS_HELP, RunFlags
from experiments.synthetic import describe_truth
from msb_jax.baselines.registry import MASTERS
from msb_jax.conflicts import METRICS
from msb_jax.data.demo import demo_log
from msb_jax.data.format import Log, load_log
from msb_jax.envs import replay_log as replay
from msb_jax.envs import synthetic
from msb_jax.problem import Problem, make_problem, stack_problems
from msb_jax.rng import stream
from msb_jax.samplers.registry import PLAIN

FEEDBACK = ("real", *synthetic.FORMS)
MOST_ROUNDS = 5000  # of the paper
# The learners train every 40 rounds; the candidates are made anew every 8.
SEASONED = (
    "solver",
    "wolpertinger:5",
    "g2anet:5",
    "cem_ppo:5",
    "random_best",
    "teacher_student",
)
QUICK = {"rounds": 400, "num_seeds": 2, "samplers": PLAIN}


@dataclass(frozen=True, kw_only=True)
class Config(RunFlags):
    """Flags of the experiment."""

    master: str | None = flag(  # type: ignore[assignment]
        None,
        "model of the agent; not given: kalman_ucb, with synthetic feedback ntk_ucb",
        tuple(MASTERS),
    )
    f_in: int = flag(8, "rounds between two refreshes")
    samplers: tuple[str, ...] = flag(SEASONED, SAMPLERS_HELP)
    discount: str | None = flag(  # type: ignore[assignment]
        None,
        "of ntk_ucb and neural_ucb: the weight of an older round, or auto; not given: "
        "auto, with synthetic feedback 1",
    )
    lin_gamma: float = flag(0.97, "gamma of d_lin_ts, the weight of an older round")
    lin_scale: float = flag(0.1, "of d_lin_ts: times the posterior deviation")
    dataset: str = flag("demo", f"which log: {', '.join(DATASETS)}", DATASETS)
    data: str | None = flag(None, "the prepared log, .npz (not for demo)")
    user: int | None = flag(None, "whose clicks; not given: the busiest user's")
    feedback: str = flag("real", f"reward: {', '.join(FEEDBACK)}", FEEDBACK)
    counting: str = flag(
        "multiplicity", f"of clicks: {', '.join(replay.COUNTING)}", replay.COUNTING
    )
    causal: bool = flag(False, "windows look back only")
    rounds: int | None = flag(
        None, f"T; not given or -1: the log's, {MOST_ROUNDS} at most"
    )
    k: int = flag(10, "arms in an action, K")
    metric: str = flag("ned_abs", f"distance of arms: {', '.join(METRICS)}", METRICS)
    tau: float = flag(0.5, "arms that are nearer than this conflict")
    num_constraints: int | None = flag(
        None, "instead of --tau: so many conflicting pairs, the nearest ones"
    )
    noise_std: float = flag(0.1, "noise of a synthetic reward, before scaling")
    n_re: int | None = flag(
        None, "random rounds at the start; not given or -1: 2K (synthetic: 2L)"
    )

    def __post_init__(self) -> None:
        if self.rounds == -1:
            object.__setattr__(self, "rounds", None)
        if self.n_re == -1:
            object.__setattr__(self, "n_re", None)
        is_real = self.feedback == "real"
        if self.n_re is None and is_real:
            object.__setattr__(self, "n_re", 2 * self.k)
        if self.discount is None:
            object.__setattr__(self, "discount", "auto" if is_real else "1")
        if self.master is None:
            object.__setattr__(self, "master", "kalman_ucb" if is_real else "ntk_ucb")
        least: dict[str, float] = {"k": 1, "noise_std": 0, "tau": 0}
        for name in ("rounds", "num_constraints", "n_re"):
            if getattr(self, name) is not None:
                least[name] = 1 if name == "rounds" else 0
        self.check(least)
        if self.dataset == "demo" and self.data is not None:
            raise ValueError("--dataset=demo is generated; leave out --data.")
        if self.dataset != "demo" and self.data is None:
            raise ValueError(
                f"--dataset={self.dataset} needs --data=FILE.npz; make it with python "
                f"-m experiments.prepare --dataset={self.dataset} --raw=FOLDER "
                "--out=FILE.npz."
            )


def settle(config: Config) -> Config:
    """Look into the log for what the flags left open: rounds and warm-up.

    Raises:
        UsageError or ValueError: the flags do not fit the log, or it cannot be read.
    """
    log = read_log(config)
    clicks = log.clicks_of(config.user)
    if config.k > len(log.item_vectors):
        raise UsageError(
            f"--k={config.k} is more than the {len(log.item_vectors)} arms of the log."
        )
    rounds, n_re = config.rounds, config.n_re
    if config.feedback == "real":
        most = replay.num_rounds(clicks.size, config.k)
        if rounds is not None and rounds > most:
            raise UsageError(
                f"--rounds={rounds} is more than the log has: {most}, with "
                f"{clicks.size} clicks and windows of {2 * config.k}."
            )
        rounds = rounds or min(MOST_ROUNDS, most)
    n_re = 2 * len(log.item_vectors) if n_re is None else n_re
    return dataclasses.replace(config, rounds=rounds or MOST_ROUNDS, n_re=n_re)


def read_log(config: Config) -> Log:
    """Read or generate the log, or say what is wrong with the file."""
    if config.data is None:
        return demo_log()
    try:
        return load_log(config.data)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None


def prepare(config: Config, folder: Path, progress: Progress) -> harness.Task:
    """Put the log on as many devices as there are seeds."""
    del folder
    log = read_log(config)
    by_number = config.num_constraints is not None
    try:
        problem = make_problem(
            log.item_vectors,
            config.k,
            metric=config.metric,
            threshold=None if by_number else config.tau,
            num_conflicts=config.num_constraints,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    seeds = range(config.seed, config.seed + config.num_seeds)
    keys = jnp.stack([stream(jax.random.key(seed), "run") for seed in seeds])
    problems = stack_problems([problem] * config.num_seeds)
    title = (
        f"{log.dataset}, {config.feedback} feedback: {config.k} of {problem.num_arms} "
        f"arms, {config.constraints} constraints"
    )
    make = real_task if config.feedback == "real" else synthetic_task
    return make(config, log, problem, progress)._replace(
        problems=problems, keys=keys, title=title
    )


def real_task(
    config: Config, log: Log, problem: Problem, progress: Progress
) -> harness.Task:
    """Replay the clicks."""
    window = replay.WindowConfig(counting=config.counting, is_causal=config.causal)
    clicks = log.clicks_of(config.user)
    worth = replay.window_worth(
        clicks, problem.num_arms, config.k, int(config.rounds or 0), window
    )
    progress.start("references", 1, unit="log")
    known = replay.references(problem, worth)
    progress.stop()
    notes = []
    if known.least_pairs:
        notes.append(
            f"Every set of {config.k} arms has conflicts: {known.least_pairs} of the "
            f"{int(problem.num_conflicts)} pairs at least, a violation rate of "
            f"{known.least_pairs / int(problem.num_conflicts):.4f}."
        )
        progress.say(f"warning: {notes[-1]}")
    states = [replay.replay_state(worth)] * config.num_seeds
    return harness.Task(
        env_step=replay.step,
        env_states=jax.tree.map(lambda *leaves: jnp.stack(leaves), *states),
        problems=problem,
        keys=jnp.zeros(()),
        ground_truth=[],
        title="",
        notes=notes,
        best_actions=np.stack([known.best_action] * config.num_seeds),
        references={
            "random": known.random,
            "best_fixed": known.best_fixed,
            "clairvoyant": known.clairvoyant,
            "clairvoyant_free": known.clairvoyant_free,
        },
    )


def synthetic_task(
    config: Config, log: Log, problem: Problem, progress: Progress
) -> harness.Task:
    """Put a synthetic reward on the arms of the log, the same for all seeds."""
    theta = liking(log, log.clicks_of(config.user))
    progress.start("ground truth", 1, unit="instance")
    instance = synthetic.instance_on(problem, theta, config.feedback, config.seed)
    progress.stop()
    seeds = range(config.seed, config.seed + config.num_seeds)
    states = [synthetic.env_state(instance)] * config.num_seeds
    setting = synthetic.SyntheticConfig(
        form=config.feedback,
        num_arms=problem.num_arms,
        k=config.k,
        num_constraints=int(problem.num_conflicts),
        noise_std=config.noise_std,
    )
    return harness.Task(
        env_step=synthetic.synthetic(setting).step,
        env_states=jax.tree.map(lambda *leaves: jnp.stack(leaves), *states),
        problems=problem,
        keys=jnp.zeros(()),
        ground_truth=[describe_truth(seed, instance.ground_truth) for seed in seeds],
        title="",
        best_actions=np.stack([instance.ground_truth.action] * config.num_seeds),
    )


def liking(log: Log, clicks: np.ndarray) -> np.ndarray:
    """What the user thinks of each arm, from 0 to 0.5: [L] (I-8).

    The user's vector is the mean of the arms clicked.
    """
    vectors = log.item_vectors.astype(np.float64)
    worth = vectors @ vectors[clicks].mean(axis=0)
    spread = float(np.ptp(worth))
    if not (math.isfinite(spread) and spread > 0):
        return np.full(len(vectors), 0.25)
    return 0.5 * (worth - worth.min()) / spread


EXPERIMENT = harness.Experiment(
    name="real_world",
    config_class=Config,
    label=lambda config: f"real-{config.dataset}-{config.feedback}",
    prepare=prepare,
    quick=QUICK,
    settle=settle,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment and return the exit code."""
    return harness.main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(main())
