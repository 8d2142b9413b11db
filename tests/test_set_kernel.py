"""The kernels on sets: overlaps, the tangent kernel, their quadratic part."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.masters import set_kernel
from msb_jax.problem import make_problem, random_sets

L, K = 24, 4


@pytest.mark.parametrize("depth", [2, 3])
def test_tangent_kernel__matches_the_gradients_of_a_wide_network(depth: int) -> None:
    width, size = 2048 if depth == 2 else 512, 8
    rng = np.random.default_rng(0)
    points = rng.normal(size=(2, size))
    points[1] = 0.5 * points[0] + points[1]
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    shapes = [size] + [width] * (depth - 1)
    values = []
    for _ in range(8):
        hidden = [
            rng.normal(size=(width, fan)) * np.sqrt(2 / width) for fan in shapes[:-1]
        ]
        last = rng.normal(size=(1, width))
        activations, masks = [[x] for x in points], [[], []]
        for i in range(2):
            for w in hidden:
                pre = w @ activations[i][-1]
                masks[i].append(pre > 0)
                activations[i].append(np.maximum(pre, 0))
        total = activations[0][-1] @ activations[1][-1]
        deltas = [last[0] * masks[i][-1] for i in range(2)]
        for layer in range(depth - 2, -1, -1):
            total += (
                (activations[0][layer] @ activations[1][layer])
                * (deltas[0] @ deltas[1])
                * 2
                / width
            )
            if layer:
                deltas = [
                    (hidden[layer].T @ deltas[i]) * masks[i][layer - 1]
                    for i in range(2)
                ]
        values.append(total)
    rho = jnp.asarray([points[0] @ points[1]], jnp.float32)
    expected = float(set_kernel.tangent_kernel(rho, depth)[0])
    error = (np.mean(values) - expected) / (np.std(values, ddof=1) / np.sqrt(8))
    assert abs(error) < 5


def test_overlaps__count_common_arms() -> None:
    problem = make_problem(np.random.default_rng(0).random((L, 3)), K)
    sets = random_sets(jax.random.key(5), problem, 9)
    counts = set_kernel.overlaps(sets, sets[:4], L)
    expected = [
        [len(set(a) & set(b)) for b in sets[:4].tolist()] for a in sets.tolist()
    ]
    np.testing.assert_array_equal(counts, expected)


def test_quadratic_fit__is_exact_on_polynomials() -> None:
    overlap = np.arange(K + 1.0)
    table = 0.3 + 0.2 * overlap - 0.05 * overlap**2
    np.testing.assert_allclose(
        set_kernel.quadratic_fit(jnp.asarray(table, jnp.float32)),
        [0.3, 0.2, -0.05],
        atol=1e-4,
    )
    # With K=1 there are two overlaps and a line goes through both.
    np.testing.assert_allclose(
        set_kernel.quadratic_fit(jnp.asarray([1.0, 3.0])), [1.0, 2.0, 0.0], atol=1e-5
    )
