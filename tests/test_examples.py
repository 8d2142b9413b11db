"""Every example runs and does what it says; the README's example runs too."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "examples" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ask_tell__improves_on_random_sets() -> None:
    rewards = _load("ask_tell").main(rounds=120)
    assert np.mean(rewards[-30:]) > np.mean(rewards[:50]) + 0.05


def test_exact_confidence__is_small_where_data_is() -> None:
    known, unknown = _load("exact_confidence").main()
    assert 0 < known < 0.8 * unknown


def test_reinforce_topk__closes_in_on_the_best_set() -> None:
    reached, best = _load("reinforce_topk").main(steps=300)
    assert reached > 0.9 * best


def test_custom_sampler__works_inside_the_agent() -> None:
    assert _load("custom_sampler").main(rounds=160) > 0.9


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples__are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


def test_readme__example_runs_and_has_fifteen_lines() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 1
    lines = [line for line in blocks[0].splitlines() if line.strip()]
    assert len(lines) <= 15
    scope: dict[str, object] = {}
    exec(blocks[0], scope)
    assert np.asarray(scope["action"]).shape == (5,)
