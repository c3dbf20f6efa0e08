"""Figures that the docs repeat are those of the code."""

import re
from pathlib import Path

import pytest

from kvtransfer import shm_transport

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("transports.md", r"one ring per connection, (\d+) MiB"),
        ("transports.md", r"as fit (\d+) MiB"),
        ("performance.md", r"the staging ring is of (\d+) MiB"),
    ],
)
def test_the_docs_say_how_large_a_ring_of_shared_memory_is(page, words):
    said = re.findall(words, (DOCS / page).read_text())
    assert [int(size) << 20 for size in said] == [shm_transport.STAGING_BYTES]
