"""Where a process may listen."""

import pytest

from service.bind_rules import BindError, BindRules

HERE = ["127.0.0.1:5", "127.9.9.9:5", "[::1]:5", "localhost:5", "unix:/run/x"]
REMOTE = ["10.0.0.1:5", "[fe80::1]:5", "no.such.name.example.invalid:5", "0.0.0.0:5", "[::]:5", "0:5", ":5"]
ANYWHERE = {"allow_wildcard": True}


def allowed(address, encrypted=False, **rules):
    try:
        BindRules(**rules).check(address, encrypted=encrypted)
    except BindError as refusal:
        assert "--" in str(refusal) and "\n" not in str(refusal)
        return False
    return True


@pytest.mark.parametrize("address", HERE)
def test_this_machine_needs_no_word(address):
    assert allowed(address)


@pytest.mark.parametrize("address", REMOTE)
def test_what_other_machines_reach_needs_tls_or_a_word(address):
    """SEC-04."""
    assert not allowed(address, **ANYWHERE)
    assert allowed(address, encrypted=True, **ANYWHERE)
    assert allowed(address, allow_insecure=True, **ANYWHERE)


@pytest.mark.parametrize("address", ["0.0.0.0:5", "[::]:5", "*:5", ":5", "0:5", "[::ffff:0.0.0.0]:5"])
def test_every_interface_needs_its_own_word(address):
    """SEC-04."""
    assert not allowed(address, encrypted=True)
    assert not allowed(address, allow_insecure=True)
