"""One service that most tests of whole services ask. Triton's kernels run in its interpreter here: it decides when
it is first imported."""

import os
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    from service.model_source import DEFAULT_MODEL, resolve_model

    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def shallow_model_path(default_model_path, tmp_path_factory) -> Path:
    """For what any model shows: the default one with few of its layers."""
    from tests.fakes.shallow_model import write_shallow

    return write_shallow(default_model_path, tmp_path_factory.mktemp("shallow") / "shallow.gguf")


@pytest.fixture(scope="session")
def shallow_model(shallow_model_path) -> tuple[str, ...]:
    """Flags of a process that serves it, under the default one's name."""
    from service.model_source import DEFAULT_MODEL

    return ("--model", str(shallow_model_path), "--served-model-name", DEFAULT_MODEL)


@pytest.fixture(scope="session")
def exact_stack():
    """float32, one worker of each role, for all tests that do not hurt it; nothing closed, as `serve` starts it."""
    from tests.e2e.conftest import running_stack

    with running_stack("--dtype", "float32", "--kv-cache-memory-bytes", "512MiB") as stack:
        yield stack
