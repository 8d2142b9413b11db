"""From a raw log to a bandit log: arms with features, and clicks on them.

HetRec: the rows of the most frequent items are kept. A tag is described by the first
principal components of the tf-idf of its words, an item by the sum of its tags over
the log, and items fall into clusters (K-means): these are the arms. Yahoo!: the arms
are the articles that were shown most.

Everything is repeatable bit for bit: seeds are fixed, signs of components are chosen,
and one thread does the sums. The cluster labels of the published arrays cannot be had
back; numbers of rows can.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from msb_jax.data.format import Log
from msb_jax.data.raw import TaggedLog
from msb_jax.data.yahoo import ClickLog

STEPS = ("tag vectors", "item vectors", "clusters", "log")  # of `prepare_tagged`


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Settings of the preparation; the defaults are the paper's."""

    num_arms: int = 40
    num_items: int = 6000  # most frequent items that are kept
    num_features: int = 10
    user: int | None = None  # keep this user's rows only
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"num_arms": 1, "num_items": 1, "num_features": 1, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(
                    f"{name} must be at least {bound}, got {getattr(self, name)}."
                )
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2^32, got {self.seed}.")


def prepare_tagged(
    raw: TaggedLog,
    config: PrepareConfig = PrepareConfig(),
    on_step: Callable[[str], None] | None = None,
) -> Log:
    """Prepare a HetRec log.

    Of items that are equally frequent at the border, those with the lowest ids stay.

    Args:
        raw: from `read_tagged`.
        config: settings.
        on_step: told each of `STEPS` before it begins.
    """
    step = on_step or (lambda name: None)
    items, counts = np.unique(raw.items, return_counts=True)
    top = np.sort(items[np.argsort(-counts, kind="stable")[: config.num_items]])
    is_kept = np.isin(raw.items, top)
    users, tags = raw.users[is_kept], raw.tags[is_kept]
    rows = np.searchsorted(top, raw.items[is_kept])  # [N], in top
    if top.size < config.num_arms:
        raise ValueError(
            f"The {raw.dataset} log has {top.size} items for {config.num_arms} arms; "
            "lower the number of arms."
        )
    _check_user(config.user, users, raw.dataset)
    step(STEPS[0])
    tag_ids, tag_of_row = np.unique(tags, return_inverse=True)
    texts = [raw.tag_texts.get(tag) for tag in tag_ids.tolist()]
    vectors = _tag_vectors(texts, config, raw.dataset)
    step(STEPS[1])
    sums = np.zeros((top.size, config.num_features))
    np.add.at(sums, rows, vectors[tag_of_row])
    item_vectors, num_zero = _unit(sums)
    step(STEPS[2])
    labels = _cluster(item_vectors, config, raw.dataset)
    sums = np.zeros((config.num_arms, config.num_features))
    np.add.at(sums, labels, item_vectors)
    # Where the members cancel, the first of them stands for all.
    members = [item_vectors[np.argmax(labels == arm)] for arm in range(config.num_arms)]
    arms, num_cancelled = _unit(sums, np.stack(members))
    step(STEPS[3])
    counts_kept = {
        "rows of less frequent items, dropped": int((~is_kept).sum()),
        "items without a direction": num_zero,
        "arms without a direction": num_cancelled,
    }
    return _assemble(raw, raw.dataset, config, arms, labels[rows], users, counts_kept)


def prepare_yahoo(
    raw: ClickLog, config: PrepareConfig = PrepareConfig(num_arms=20)
) -> Log:
    """Prepare a Yahoo! log: clicks on the articles shown most, one nameless user."""
    if config.user is not None:
        raise ValueError("The yahoo log does not name its users; leave the user out.")
    if raw.articles.size < config.num_arms:
        raise ValueError(
            f"The yahoo log has {raw.articles.size} articles with whole features for "
            f"{config.num_arms} arms; lower the number of arms."
        )
    chosen = np.sort(np.argsort(-raw.shown, kind="stable")[: config.num_arms])
    articles = raw.articles[chosen]
    is_kept = np.isin(raw.clicks, articles)
    if not is_kept.any():
        raise ValueError(
            f"None of the {config.num_arms} articles shown most was clicked; take more "
            "arms."
        )
    arms, num_zero = _unit(raw.features[chosen])
    clicks = np.searchsorted(articles, raw.clicks[is_kept])
    counts = {
        "clicks on other articles, dropped": int((~is_kept).sum()),
        "arms without a direction": num_zero,
    }
    users = np.zeros(clicks.size, np.int64)
    return _assemble(raw, "yahoo", config, arms, clicks, users, counts)


def _tag_vectors(
    texts: list[str | None], config: PrepareConfig, dataset: str
) -> np.ndarray:
    """Describe each tag by the principal components of its words, [tags, D].

    A tag without a text has the zero vector.
    """
    sklearn = _sklearn()
    known = [text for text in texts if text is not None]
    vectors = np.zeros((len(texts), config.num_features))
    # Words of one letter count: some genres are nothing else.
    tf_idf = sklearn.feature_extraction.text.TfidfVectorizer(token_pattern=r"\w+")
    try:
        table = tf_idf.fit_transform(known)  # [known tags, words]
    except ValueError:
        raise ValueError(f"The tags of the {dataset} log have no words.") from None
    if min(table.shape) <= config.num_features:
        raise ValueError(
            f"{config.num_features} features need more different tags and words than "
            f"the {table.shape[0]} and {table.shape[1]} of the {dataset} log."
        )
    pca = sklearn.decomposition.PCA(
        config.num_features, svd_solver="arpack", random_state=config.seed
    )
    with _one_thread():
        pca.fit(table)
    axes = pca.components_  # [D, words]
    largest = np.abs(axes).argmax(axis=1)
    axes = axes * np.sign(axes[np.arange(len(axes)), largest])[:, None]
    is_known = np.array([text is not None for text in texts])
    vectors[is_known] = table @ axes.T - pca.mean_ @ axes.T
    return vectors


def _cluster(vectors: np.ndarray, config: PrepareConfig, dataset: str) -> np.ndarray:
    """Return the cluster of each vector, all clusters being used."""
    sklearn = _sklearn()
    k_means = sklearn.cluster.KMeans(
        config.num_arms, n_init=10, random_state=config.seed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)
        with _one_thread():
            labels = k_means.fit_predict(vectors)
    if (found := np.unique(labels).size) < config.num_arms:
        raise ValueError(
            f"The items of the {dataset} log fall into {found} clusters for "
            f"{config.num_arms} arms; lower the number of arms."
        )
    return labels


def _unit(
    rows: np.ndarray, instead: np.ndarray | None = None
) -> tuple[np.ndarray, int]:
    """Scale rows to length 1; zero rows become those of `instead`, or the first axis.

    Returns:
        the rows, and how many were zero.
    """
    length = np.linalg.norm(rows, axis=1)
    is_zero = length < 1e-12
    if instead is None:
        instead = np.broadcast_to(np.eye(1, rows.shape[1]), rows.shape)
    scaled = rows / np.where(is_zero, 1.0, length)[:, None]
    return np.where(is_zero[:, None], instead, scaled), int(is_zero.sum())


def _check_user(user: int | None, users: np.ndarray, dataset: str) -> None:
    if user is not None and not (users == user).any():
        raise ValueError(f"User {user} has no rows in the {dataset} log.")


def _assemble(
    raw: TaggedLog | ClickLog,
    dataset: str,
    config: PrepareConfig,
    arms: np.ndarray,
    clicks: np.ndarray,
    users: np.ndarray,
    counts: dict[str, int],
) -> Log:
    """Order the clicks, which come in the order of time, by user."""
    if config.user is not None:
        is_own = users == config.user
        counts = counts | {"rows of other users, dropped": int((~is_own).sum())}
        clicks, users = clicks[is_own], users[is_own]
    user_ids, log_users = np.unique(users, return_inverse=True)
    order = np.argsort(log_users, kind="stable")
    counts = {name: n for name, n in counts.items() if n} | {"rows kept": clicks.size}
    summary: dict[str, Any] = {
        "sources": raw.sources,
        "counts": raw.counts | counts,
        "settings": asdict(config),
    }
    return Log(
        dataset=dataset,
        item_vectors=arms.astype(np.float32),
        click_items=clicks[order].astype(np.int32),
        user_offsets=np.append(0, np.bincount(log_users).cumsum()),
        user_ids=user_ids,
        log_users=log_users.astype(np.int32),
        summary=summary,
    )


def _sklearn() -> Any:
    """Import scikit-learn, which only this module needs."""
    try:
        import sklearn.cluster
        import sklearn.decomposition
        import sklearn.feature_extraction.text
    except ImportError:
        raise ImportError(
            "To prepare a log takes scikit-learn: pip install 'msb_jax[data]'."
        ) from None
    return sklearn


def _one_thread() -> Any:
    """Let the sums of scikit-learn have one order only; a context manager."""
    import threadpoolctl  # comes with scikit-learn

    return threadpoolctl.threadpool_limits(1)
