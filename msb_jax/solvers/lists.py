"""The best ordered list of K arms under a conflict graph, by branch and bound.

For rewards of a list that, with the arms of a set in descending order of their
values, are largest in this order and do not fall when a value grows: the cascade (by
an exchange of neighbours) and the position-based model (by rearrangement) are two.
Then a list is a set, and arms are taken in descending order of value. A node holds
the arms taken; what it may still become is bounded by the best of the arms that are
left, of which a clique of conflicting arms gives one. NumPy in, NumPy out; sets of
arms are the bits of Python's integers, and limits are by nodes, so that the same
input gives the same output.

Where no K arms are free of conflicts (as `LinearProgram` finds), the lists with the
fewest conflicts compete. If they have n, at most n arms are beyond the first of their
clique, because a clique with s arms taken has s(s-1)/2 >= s-1 conflicts.

At L=100, K=10 and 437 conflicts the best list is proven in 20 to 40 ms, at L=300, K=20
and 3,962 conflicts in 0.1 to 0.3 s. Where conflicts cannot be avoided the bound is weak
and a search at L=100 stops at its limit, after about 3 s.

Differs from the paper:
* an exact search takes the place of Gurobi on the L x K placements, for which the
  paper gives no program (ALGORITHMS 9.0, I-34).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from msb_jax.solvers.conflict_graph import ConflictGraph, check_numbers
from msb_jax.solvers.scip import LinearProgram

# Values of lists that are closer than this are taken for equal.
_TOLERANCE = 1e-12

Worth = Callable[[Sequence[float]], float]


class BestList(NamedTuple):
    """The best list found and how sure that is."""

    action: np.ndarray  # [K] int32, descending values
    value: float
    bound: float  # no list with as few conflicts is worth more
    status: str  # optimal, node_limit, least_violation
    violated: int  # conflicting pairs in the list


def best_list(
    values: ArrayLike,
    conflicts: ArrayLike,
    k: int,
    worth: Worth,
    *,
    node_limit: int = 100_000,
) -> BestList:
    """Find the best list of K arms.

    Args:
        values: [L], of the arms.
        conflicts: bool[L, L], symmetric with an empty diagonal.
        k: arms in a list, 1..L.
        worth: of K values in descending order; it must not fall when one grows.
        node_limit: arms taken in the whole search.
    """
    graph = ConflictGraph(conflicts, k)
    given = check_numbers(values, (graph.num_arms,), "values")
    order = np.argsort(-given, kind="stable")  # [L], best first
    calm = LinearProgram(conflicts, k).solve(given, arm_limit=graph.num_arms)
    start = np.flatnonzero(np.isin(order, calm.action))  # places in `order`
    search = _Search(given[order], graph.conflicts[np.ix_(order, order)], k, worth)
    search.run(start.tolist(), calm.violated, node_limit)
    action = order[search.best].astype(np.int32)
    is_proven = search.num_nodes < node_limit
    status = "optimal" if is_proven else "node_limit"
    return BestList(
        action=action,
        value=float(search.value),
        bound=float(search.value if is_proven else search.bound),
        status="least_violation" if calm.violated else status,
        violated=graph.violated(action),
    )


class _Search:
    """Branch and bound over arms that are numbered by descending value."""

    def __init__(
        self, values: np.ndarray, conflicts: np.ndarray, k: int, worth: Worth
    ) -> None:
        self._values: list[float] = values.tolist()
        self._near = [
            sum(1 << int(j) for j in np.flatnonzero(row)) for row in conflicts
        ]  # bit j of entry i: arms i and j conflict
        self._k = k
        self._worth = worth

    def run(self, start: list[int], budget: int, node_limit: int) -> None:
        """Improve upon `start`, with at most `budget` conflicts."""
        self.best = start
        self.value = self._worth([self._values[arm] for arm in start])
        self.num_nodes = 0
        self._node_limit = node_limit
        every = (1 << len(self._values)) - 1
        self.bound = self._bound([], every, budget)
        self._branch([], every, budget)

    def _branch(self, taken: list[int], is_open: int, budget: int) -> None:
        """Take each open arm in turn as the next one.

        Args:
            taken: arms in the list, in ascending order.
            is_open: bits of the later arms that may be taken.
            budget: conflicts that may still be added.
        """
        if len(taken) == self._k:
            value = self._worth([self._values[arm] for arm in taken])
            if value > self.value:
                self.best, self.value = taken, value
            return
        while self._bound(taken, is_open, budget) > self.value + _TOLERANCE:
            if self.num_nodes >= self._node_limit:
                return
            self.num_nodes += 1
            arm = _lowest(is_open)
            is_open ^= 1 << arm
            left = budget - sum(self._near[arm] >> other & 1 for other in taken)
            if left >= 0:
                longer = [*taken, arm]
                self._branch(longer, self._fitting(longer, is_open, left), left)

    def _fitting(self, taken: list[int], is_open: int, budget: int) -> int:
        """Drop the neighbours of the arms taken once no conflict may be added."""
        if not budget:
            for arm in taken:
                is_open &= ~self._near[arm]
        return is_open

    def _bound(self, taken: list[int], is_open: int, budget: int) -> float:
        """Bound the worth of all lists that go on with open arms; -inf if none does.

        Open arms are put into cliques, best first. The first of each clique may go
        on, and of the others the `budget` best.
        """
        best = [self._values[arm] for arm in taken]
        common: list[int] = []  # of each clique, the arms that conflict with all of it
        while is_open and len(best) < self._k:
            arm = _lowest(is_open)
            is_open ^= 1 << arm
            clique = next((i for i, c in enumerate(common) if c >> arm & 1), None)
            if clique is None:
                common.append(self._near[arm])
            else:
                common[clique] &= self._near[arm]
                if not budget:
                    continue
                budget -= 1
            best.append(self._values[arm])
        return self._worth(best) if len(best) == self._k else -np.inf


def _lowest(bits: int) -> int:
    """Return the place of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1
