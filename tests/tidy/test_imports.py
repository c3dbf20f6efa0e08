"""Imports run downwards only; the contracts are in pyproject.toml."""

import subprocess
import sys


def test_no_import_runs_upwards(root):
    linter = f"{sys.prefix}/bin/lint-imports"
    result = subprocess.run([linter], cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
