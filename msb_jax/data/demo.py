"""A generated log of the shape of the real ones, for tests and demonstrations.

Arms lie around a few topics. Interests are a mix of the topics that moves every few
hundred rows, and clicks come in bursts: most rows repeat the arm of the row before.
"""

from __future__ import annotations

import numpy as np

from msb_jax.data.format import Log

NUM_TOPICS = 5
SPREAD = 0.95  # length of an arm's own part, in units of its topic's
SHARPNESS = 18.0  # of interests
REPEAT = 0.62  # chance that a row repeats the last one whatever the interests
ROWS_PER_MIX = (200, 400)


def demo_log(
    seed: int = 0, num_arms: int = 40, num_features: int = 10, rounds: int = 3000
) -> Log:
    """Generate the log of one user.

    With the defaults, 10 to 25 % of the pairs of arms conflict at a distance
    `ned_abs` < 0.5, and there are ten arms without a conflict.

    Args:
        seed: equal seeds give equal logs.
        num_arms: L.
        num_features: D.
        rounds: rows, T.
    """
    least = {"seed": (seed, 0), "num_arms": (num_arms, 1)}
    least |= {"num_features": (num_features, 1), "rounds": (rounds, 1)}
    for name, (value, bound) in least.items():
        if value < bound:
            raise ValueError(f"{name} must be at least {bound}, got {value}.")
    rng = np.random.default_rng(seed)
    topics = _unit(rng.normal(size=(NUM_TOPICS, num_features)))
    own = _unit(rng.normal(size=(num_arms, num_features)))
    arms = _unit(topics[np.arange(num_arms) % NUM_TOPICS] + SPREAD * own)  # [L, D]
    fresh = np.zeros(rounds, np.int64)  # what each row would click without bursts
    start = 0
    while start < rounds:
        end = min(rounds, start + int(rng.integers(*ROWS_PER_MIX)))
        interest = rng.dirichlet(np.full(NUM_TOPICS, 0.5)) @ topics  # [D]
        weights = np.exp(SHARPNESS * arms @ interest)
        chances = weights / weights.sum()
        fresh[start:end] = rng.choice(num_arms, size=end - start, p=chances)
        start = end
    is_fresh = rng.random(rounds) >= REPEAT
    is_fresh[0] = True
    # Each row takes the arm of the last fresh one.
    last = np.maximum.accumulate(np.where(is_fresh, np.arange(rounds), 0))
    settings = {"seed": seed, "num_arms": num_arms, "num_features": num_features}
    return Log(
        dataset="demo",
        item_vectors=arms.astype(np.float32),
        click_items=fresh[last].astype(np.int32),
        user_offsets=np.array([0, rounds]),
        user_ids=np.zeros(1, np.int64),
        log_users=np.zeros(rounds, np.int32),
        summary={
            "sources": {},
            "counts": {"rows kept": rounds},
            "settings": settings | {"rounds": rounds},
        },
    )


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
