"""The names of a request's prefixes: those that the workers use, each computed once and only when it is asked for."""

import pytest

from engine.cache import prefix_chain
from engine.cache.prefix_chain import PrefixChain
from gateway.prefix_map import PrefixMap
from gateway.request_prefix import RequestPrefix
from service.cache_events import CacheEvents

SCOPE = b"a scope of caches"
TOKENS = tuple(range(100, 150))


def hashes(tokens, block_size, scope=SCOPE):
    blocks = len(tokens) // block_size
    return [link.hash for link in PrefixChain(scope, block_size).links(tokens, 0, blocks)]


def map_of(*cached):
    found = PrefixMap(1000)
    found.take(CacheEvents(sequence=1, snapshot=True, added=cached, removed=()))
    return found


def prefix_of(tokens, scope=SCOPE):
    prefix = RequestPrefix(scope)
    prefix.grow(tokens)
    return prefix


@pytest.fixture
def computed(monkeypatch):
    """One entry for each name that is computed."""
    calls, digest = [], prefix_chain._digest
    monkeypatch.setattr(prefix_chain, "_digest", lambda *given: (calls.append(given[0]), digest(*given))[1])
    return calls


@pytest.mark.parametrize("blocks", [0, 1, 5, 12])
@pytest.mark.parametrize("block_size", [4, 5])
def test_what_a_worker_has_from_the_start_is_found_in_full_blocks(blocks, block_size):
    blocks = min(blocks, len(TOKENS) // block_size)
    cached = map_of(*hashes(TOKENS, block_size)[:blocks])
    assert prefix_of(TOKENS).cached_tokens(cached, block_size) == blocks * block_size


def test_what_comes_after_a_hole_does_not_count():
    first, _, *rest = hashes(TOKENS, 4)
    assert prefix_of(TOKENS).cached_tokens(map_of(first, *rest), 4) == 4


def test_another_scope_or_none_has_nothing_in_common():
    cached = map_of(*hashes(TOKENS, 4))
    assert prefix_of(TOKENS, b"another").cached_tokens(cached, 4) == 0
    assert prefix_of(TOKENS, b"").cached_tokens(cached, 4) == 0


def test_names_are_computed_once_for_all_workers_and_no_further_than_one_of_them_knows(computed):
    short, long = map_of(*hashes(TOKENS, 4)[:2]), map_of(*hashes(TOKENS, 4)[:5])
    prefix = prefix_of(TOKENS)
    computed.clear()
    assert prefix.cached_tokens(PrefixMap(10), 4) == 0
    assert len(computed) == 0, "nobody has anything"
    assert prefix.cached_tokens(short, 4) == 8
    assert len(computed) == 3
    assert (prefix.cached_tokens(long, 4), prefix.cached_tokens(short, 4)) == (20, 8)
    assert len(computed) == 6


def test_a_longer_run_is_named_from_where_the_shorter_one_ended(computed):
    longer = (*TOKENS, *range(10))
    cached = map_of(*hashes(longer, 4))
    prefix = prefix_of(TOKENS)
    computed.clear()
    assert prefix.cached_tokens(cached, 4) == 48
    prefix.grow(longer)
    assert prefix.cached_tokens(cached, 4) == 60
    assert len(computed) == 15
