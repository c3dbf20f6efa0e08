"""The whole service with everything closed: TLS in which everybody shows a certificate, API keys, a control token."""

import json
import os
import secrets
import ssl
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from urllib.error import HTTPError

import grpc
import pytest

from crossdock.credentials import Credentials
from gateway import api_keys
from tests.e2e.conftest import ROOT, said_when_ready
from tests.security.certificates import Authority

CONTROL_TOKEN = "operators only"
OPERATOR = "operator.example"
ENGINE = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB")


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


class Secured:
    """Three processes, and what is needed to reach them. keys: an API key by tenant. engine: flags of both workers."""

    def __init__(self, folder, authority, engine):
        self.folder, self.authority, self.engine = folder, authority, engine
        self.key_file = folder / "api-keys"
        self.keys = {tenant: api_keys.make(self.key_file, tenant) for tenant in ("acme", "zeta")}
        self.ticket_key = secrets.token_hex(32)
        self.server, self.client = authority.issue("crossdock"), authority.issue("client.example")
        self.operator = authority.issue(OPERATOR)
        self.processes, self.said = {}, {}

    def start(self, name, verb, *flags):
        environ = os.environ | {"CROSSDOCK_TICKET_KEY": self.ticket_key}
        tls = (*self.server.flags(), f"--ssl-ca-certs={self.authority.path}")
        argv = [sys.executable, "-m", "commands.main", verb, *tls, *flags]
        self.processes[name] = subprocess.Popen(
            argv, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
        )

    def ready(self, name):
        self.said[name] = said_when_ready(self.processes[name])
        return self.said[name]["grpc"]

    def credentials(self, key="", certificate=None, private_key=None):
        """As one of the clients, which has a certificate, with a key or none."""
        return Credentials(
            key=key,
            ca=self.authority.pem(),
            certificate=certificate or self.client.pem(),
            private_key=private_key or self.client.key.read_bytes(),
        )

    def channel(self, name="gateway", **who):
        return self.credentials(**who).aio_channel(self.said[name]["grpc"])

    def http(self, path, body=None, key="", **headers):
        """The status, the headers and the JSON of an answer."""
        context = ssl.create_default_context(cafile=self.authority.path)
        context.load_cert_chain(self.client.path, self.client.key)
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        if key:
            headers["authorization"] = f"Bearer {key}"
        asked = urllib.request.Request(self.said["gateway"]["http"] + path, data, headers)
        try:
            with urllib.request.urlopen(asked, context=context, timeout=60) as answer:
                return answer.status, answer.headers, answer.read()
        except HTTPError as refusal:
            return refusal.code, refusal.headers, refusal.read()


@contextmanager
def secured(folder, authority, model):
    stack = Secured(folder, authority, (*model, *ENGINE))
    try:
        stack.start("p", "prefill-worker", "--worker-id=p", *stack.engine, "--listen=127.0.0.1:0")
        kv = ("--listen=127.0.0.1:0", "--kv-listen=tcp://127.0.0.1:0")
        stack.start("d", "decode-worker", "--worker-id=d", *stack.engine, *kv)
        stack.start(
            "gateway",
            "gateway",
            f"--prefill-workers={stack.ready('p')}",
            f"--decode-workers={stack.ready('d')}",
            "--grpc-port=0",
            "--http-port=0",
            f"--api-keys={stack.key_file}",
            f"--control-token={CONTROL_TOKEN}",
            f"--control-identities={OPERATOR}",
            f"--worker-ssl-ca-certs={authority.path}",
            *stack.client.flags("worker-ssl"),
        )
        stack.ready("gateway")
        yield stack
    finally:
        for process in stack.processes.values():
            process.terminate()
        for process in stack.processes.values():
            process.wait(timeout=30)
            process.stdout.close()


@pytest.fixture(scope="session")
def stack(tmp_path_factory, authority, shallow_model):
    with secured(tmp_path_factory.mktemp("secured"), authority, shallow_model) as stack:
        yield stack


@pytest.fixture(scope="session")
def code_of():
    """The status code that a call, or the first message of its stream, ends with; OK for an answer."""

    async def ask(call):
        try:
            await (call.read() if hasattr(call, "read") else call)
        except grpc.aio.AioRpcError as refusal:
            return refusal.code()
        call.cancel()
        return grpc.StatusCode.OK

    return ask
