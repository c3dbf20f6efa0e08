"""One service that most tests of whole services ask. Triton's kernels run in its interpreter here: it decides when
it is first imported."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def exact_stack():
    """float32, one worker of each role, for all tests that do not hurt it; nothing closed, as `serve` starts it."""
    from tests.e2e.conftest import running_stack

    with running_stack("--dtype", "float32", "--kv-cache-memory-bytes", "512MiB") as stack:
        yield stack
