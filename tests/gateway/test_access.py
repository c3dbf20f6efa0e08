"""Who may call what: tenants by key, operators by a credential of their own, health for everybody."""

import errno
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway import api_keys
from gateway.access import Access
from gateway.api_keys import ApiKeys
from service.errors import Unauthorised
from service.guard import Call

INFERENCE = "/crossdock.v1.InferenceService/Generate"
CONTROL = "/crossdock.v1.ControlService/Audit"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LOAD = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
HEALTH = "/grpc.health.v1.Health/Check"
UNKNOWN = "/of.Somebody/Else"
ALL = (INFERENCE, CONTROL, REFLECTION, LOAD, HEALTH, UNKNOWN)


def call(method=CONTROL, authorization="", identities=()):
    return Call(method=method, authorization=authorization, identities=identities)


def may(access, **given):
    """The methods that a call like this may be of."""
    return {method for method in ALL if passes(access, call(method, **given))}


def passes(access, asked):
    try:
        access.check(asked)
    except Unauthorised:
        return False
    return True


@pytest.fixture
def key_file(tmp_path):
    return tmp_path / "api-keys"


@pytest.fixture
def keys(key_file):
    """Keys of two tenants, by tenant."""
    return {tenant: api_keys.make(key_file, tenant) for tenant in ("acme", "zeta")}


def test_without_keys_everybody_may_ask_and_nobody_is_an_operator():
    """From wherever they call: a proxy on this machine makes everybody local."""
    assert may(Access()) == set(ALL) - {CONTROL}


def test_with_keys_nobody_may_ask_anything_but_health_without_one(keys, key_file):
    assert may(Access(keys=ApiKeys(key_file))) == {HEALTH}


def test_a_tenants_key_opens_answers_and_never_the_control_service(keys, key_file):
    for access in (Access(keys=ApiKeys(key_file)), Access(keys=ApiKeys(key_file), control_token="s3cret")):
        assert may(access, authorization=f"Bearer {keys['acme']}") == set(ALL) - {CONTROL}


def test_a_control_token_opens_the_control_service_and_no_answers(keys, key_file):
    access = Access(keys=ApiKeys(key_file), control_token="s3cret")
    assert may(access, authorization="Bearer s3cret") == {CONTROL, REFLECTION, LOAD, HEALTH}


def test_a_certificates_name_is_an_operators_credential(keys, key_file):
    access = Access(keys=ApiKeys(key_file), control_identities=("ops.example",))
    assert CONTROL in may(access, identities=("x", "ops.example"))
    assert CONTROL not in may(access, identities=("ops.example.evil",))
    assert CONTROL not in may(Access(control_identities=("ops.example",)))


@pytest.mark.parametrize(
    ("authorization", "right"),
    [
        ("Bearer s3cret", True),
        ("bearer s3cret", True),
        ("", False),
        ("Bearer ", False),
        ("Bearer", False),
        ("s3cret", False),
        ("Basic s3cret", False),
        ("Bearer s3cret ", False),
        ("Bearer  s3cret", False),
        ("Bearer é", False),
    ],
)
def test_with_a_token_it_is_the_token_that_counts(authorization, right):
    assert passes(Access(control_token="s3cret"), call(authorization=authorization)) is right


def test_each_key_is_its_tenants_and_a_changed_one_is_nobodys(keys, key_file):
    known = ApiKeys(key_file)
    for tenant, key in keys.items():
        assert known.tenant_of(key) == tenant
        for place in range(len(key)):
            other = "A" if key[place] != "A" else "B"
            assert known.tenant_of(key[:place] + other + key[place + 1 :]) is None
    for nonsense in ("", "cdk_", "é" * 64, "x" * 100_000, keys["acme"] + "\n", keys["acme"] * 2):
        assert known.tenant_of(nonsense) is None


def test_the_file_holds_no_key_and_is_its_owners(keys, key_file):
    text = key_file.read_text()
    assert all(key.rpartition("_")[2] not in text for key in keys.values())
    assert key_file.stat().st_mode & 0o077 == 0


def test_two_keys_of_a_tenant_are_good_until_one_is_taken_out(keys, key_file):
    known = ApiKeys(key_file)
    old, new = keys["acme"], api_keys.make(key_file, "acme")
    assert known.tenant_of(new) is None
    known.refresh()
    assert known.tenant_of(old) == known.tenant_of(new) == "acme"
    lines = [line for line in key_file.read_text().splitlines() if old.split("_")[1] not in line]
    key_file.write_text("\n".join(["# without the old one", "", *lines]))
    known.refresh()
    assert (known.tenant_of(old), known.tenant_of(new)) == (None, "acme")


def test_no_keys_at_all_takes_a_word_since_an_empty_file_may_be_one_that_is_being_written(keys, key_file):
    known = ApiKeys(key_file)
    key_file.write_text("# none")
    known.refresh()
    assert known.tenants() == frozenset()


@pytest.mark.parametrize("content", ["acme", "acme 12 34", "a b c d", "\xff", "", " \n\n"])
def test_a_file_that_cannot_be_used_leaves_the_keys_as_they_were(keys, key_file, content):
    known = ApiKeys(key_file)
    key_file.write_bytes(content.encode("latin-1"))
    known.refresh()
    assert known.tenant_of(keys["acme"]) == "acme"
    with pytest.raises(api_keys.KeysUnusable, match="api-keys: "):
        ApiKeys(key_file)
    key_file.unlink()
    known.refresh()
    assert known.tenant_of(keys["acme"]) == "acme"


def test_a_file_that_cannot_be_read_for_a_moment_is_read_the_next_time(keys, key_file, monkeypatch):
    """Or a key that was taken out would be good until the next change."""
    known = ApiKeys(key_file)
    key_file.write_text("# none")
    with monkeypatch.context() as patch:

        def read_text(path, encoding):
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(Path, "read_text", read_text)
        with capture_logs() as said:
            known.refresh()
            known.refresh()
        assert [each["event"] for each in said] == ["API keys not taken"]
        assert known.tenant_of(keys["acme"]) == "acme"
    known.refresh()
    assert known.tenant_of(keys["acme"]) is None


def test_a_file_that_others_may_write_is_refused(keys, key_file):
    key_file.chmod(0o620)
    with pytest.raises(api_keys.KeysUnusable, match="chmod 600"):
        ApiKeys(key_file)


@pytest.mark.parametrize("tenant", ["", "a b", "a\n", "é", "x" * 65])
def test_a_tenants_name_is_one_word(key_file, tenant):
    with pytest.raises(api_keys.KeysUnusable, match="a tenant is"):
        api_keys.make(key_file, tenant)


def test_every_refusal_is_counted():
    count = []
    access = Access(control_token="s3cret", on_refused=lambda: count.append(1))
    assert not passes(access, call())
    assert passes(access, call(authorization="Bearer s3cret"))
    assert len(count) == 1


def test_paths_are_a_tenants_but_for_health_and_what_operators_watch(keys, key_file):
    access = Access(keys=ApiKeys(key_file), control_token="s3cret")
    for path in ("/health", "/ping", "/version"):
        access.check_path(path, call())
    for path in (
        "/v1/completions",
        "/tokenize",
        "/v1/models",
        "/invocations",
        "/metrics",
        "/health/",
        "//health",
    ):
        with pytest.raises(Unauthorised):
            access.check_path(path, call())
    tenant = call(authorization=f"Bearer {keys['acme']}")
    assert access.check_path("/v1/completions", tenant) == "acme"
    with pytest.raises(Unauthorised):
        access.check_path("/metrics", tenant)
    access.check_path("/metrics", call(authorization="Bearer s3cret"))
