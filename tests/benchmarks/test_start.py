"""Every benchmark can be started: whoever changes what they use hears of it."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODULES = sorted(
    ".".join(("benchmarks", *path.relative_to(FOLDER).with_suffix("").parts)) for path in FOLDER.rglob("*.py")
)


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_finds_all_that_it_imports(module):
    importlib.import_module(module)
