"""A real Envoy in front of gateways: mutual TLS towards clients and gateways, active health checks and least-request
balancing. No retries: what a client sees is what came of its one try."""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx

HEALTH_INTERVAL_S = 0.2
_TYPE = "type.googleapis.com/envoy.extensions"
_HTTP2 = {"max_concurrent_streams": 1000}


def binary():
    """Path of Envoy's own executable, or None. The script beside it would only start it."""
    found = Path(sys.prefix, "bin", "envoy")
    return str(found) if found.exists() else shutil.which("envoy")


class Certificates:
    """An authority, a server and a client certificate of it, and a client certificate of nobody."""

    def __init__(self, folder):
        self.folder = folder
        self._authority("ca")
        self._authority("stranger")
        self._signed("server", "ca")
        self._signed("client", "ca")
        self._signed("intruder", "stranger")

    def path(self, name):
        return str(self.folder / name)

    def credentials(self, client=None):
        """Of a client that trusts the authority, and shows this certificate."""
        read = lambda name: (self.folder / name).read_bytes()  # noqa: E731
        if client is None:
            return grpc.ssl_channel_credentials(read("ca.crt"))
        return grpc.ssl_channel_credentials(read("ca.crt"), read(f"{client}.key"), read(f"{client}.crt"))

    def flags(self, name):
        """Of a process that shows this certificate, and asks for one of the authority."""
        certificate, key = self.path(f"{name}.crt"), self.path(f"{name}.key")
        return ("--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certs", self.path("ca.crt"))

    def context(self, name):
        """The same for Envoy."""
        certificate, key = self.path(f"{name}.crt"), self.path(f"{name}.key")
        return {
            "alpn_protocols": ["h2"],
            "tls_certificates": [
                {"certificate_chain": {"filename": certificate}, "private_key": {"filename": key}}
            ],
            "validation_context": {"trusted_ca": {"filename": self.path("ca.crt")}},
        }

    def _authority(self, name):
        self._openssl("req", "-x509", *self._key(name), "-out", self.path(f"{name}.crt"), "-days", "2")

    def _signed(self, name, authority):
        request, extension = self.path(f"{name}.csr"), self.folder / f"{name}.ext"
        extension.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
        self._openssl("req", *self._key(name), "-out", request)
        signer = ("-CA", self.path(f"{authority}.crt"), "-CAkey", self.path(f"{authority}.key"))
        out = ("-out", self.path(f"{name}.crt"), "-days", "2", "-extfile", str(extension))
        self._openssl("x509", "-req", "-in", request, *signer, "-CAcreateserial", *out)

    def _key(self, name):
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        return (*curve, "-keyout", self.path(f"{name}.key"), "-subj", f"/CN={name}")

    def _openssl(self, *words):
        subprocess.run(["openssl", *words], check=True, capture_output=True)


class Envoy:
    """address: of the listener. admin: of the administration, over HTTP."""

    def __init__(self, process, address, admin):
        self.process, self.address = process, address
        self._admin = httpx.Client(base_url=f"http://{admin}")

    def hosts(self):
        """By address: whether Envoy sends it calls, and how many it has there now."""
        status = self._admin.get("/clusters", params={"format": "json"}).json()["cluster_statuses"][0]
        return {self._name(host): self._state(host) for host in status.get("host_statuses", ())}

    def until(self, holds, seconds=20):
        """The hosts, once they are as wished."""
        end = time.monotonic() + seconds
        while not holds(hosts := self.hosts()):
            assert time.monotonic() < end and not _ended(self.process, within_s=0.02), hosts
        return hosts

    def close(self):
        self._admin.close()

    def _name(self, host):
        socket = host["address"]["socket_address"]
        return f"{socket['address']}:{socket['port_value']}"

    def _state(self, host):
        stats = {each["name"]: int(each.get("value", 0)) for each in host["stats"]}
        ill = host["health_status"].get("failed_active_health_check", False)
        return not ill, stats["rq_active"]


@contextmanager
def running_envoy(folder, gateways, certificates):
    """An Envoy before these gateways, at ports that it finds itself."""
    config = folder / "envoy.json"
    config.write_text(json.dumps(_bootstrap(folder, gateways, certificates)))
    argv = [
        binary(),
        "-c",
        str(config),
        "--admin-address-path",
        str(folder / "admin"),
        "--use-dynamic-base-id",
        "--concurrency",
        "1",
        "--log-level",
        "warn",
    ]
    log = (folder / "envoy.log").open("w")
    os.mkfifo(folder / "admin")
    process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        admin = _written(process, folder / "admin")
        listeners = httpx.get(f"http://{admin}/listeners", params={"format": "json"}).json()
        at = listeners["listener_statuses"][0]["local_address"]["socket_address"]
        envoy = Envoy(process, f"{at['address']}:{at['port_value']}", admin)
        yield envoy
        envoy.close()
    finally:
        process.terminate()
        process.wait(timeout=20)
        log.close()


def _written(process, pipe, seconds=30):
    """What Envoy writes to a named pipe, which it opens once."""
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), closefd=True) as reader:
        ended = os.pidfd_open(process.pid)
        ready, _, _ = select.select([reader, ended], [], [], seconds)
        os.close(ended)
        assert reader in ready, pipe.with_name("envoy.log").read_text()
        os.set_blocking(reader.fileno(), True)
        return reader.read()


def _ended(process, within_s):
    try:
        process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _bootstrap(folder, gateways, certificates):
    return {
        "admin": {"address": _address("127.0.0.1:0"), "access_log": []},
        "static_resources": {
            "listeners": [_listener(certificates)],
            "clusters": [_cluster(gateways, certificates)],
        },
    } | {"node": {"id": "test", "cluster": "test"}}


def _address(text):
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _listener(certificates):
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"},
    }
    # A route's default limit of 15 s would cut long answers.
    route = {"match": {"prefix": "/", "grpc": {}}, "route": {"cluster": "gateways", "timeout": "0s"}}
    manager = {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "grpc",
        "codec_type": "HTTP2",
        "http2_protocol_options": _HTTP2,
        "http_filters": [router],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    tls = {
        "@type": f"{_TYPE}.transport_sockets.tls.v3.DownstreamTlsContext",
        "require_client_certificate": True,
        "common_tls_context": certificates.context("server"),
    }
    return {
        "name": "grpc",
        "address": _address("127.0.0.1:0"),
        "filter_chains": [
            {
                "filters": [
                    {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
                ],
                "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
            }
        ],
    }


def _cluster(gateways, certificates):
    interval = f"{HEALTH_INTERVAL_S}s"
    check = {
        "timeout": "2s",
        "interval": interval,
        "no_traffic_interval": interval,
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": "crossdock.v1.InferenceService"},
    }
    options = {
        "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": _HTTP2},
    }
    tls = {
        "@type": f"{_TYPE}.transport_sockets.tls.v3.UpstreamTlsContext",
        "sni": "localhost",
        "common_tls_context": certificates.context("client"),
    }
    policy = {"@type": f"{_TYPE}.load_balancing_policies.least_request.v3.LeastRequest"}
    policy["selection_method"] = "FULL_SCAN"
    least_request = {"name": "envoy.load_balancing_policies.least_request", "typed_config": policy}
    endpoints = [{"endpoint": {"address": _address(gateway)}} for gateway in gateways]
    return {
        "name": "gateways",
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_balancing_policy": {"policies": [{"typed_extension_config": least_request}]},
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [check],
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
        "typed_extension_protocol_options": {
            f"{_TYPE.split('/')[1]}.upstreams.http.v3.HttpProtocolOptions": options
        },
        "load_assignment": {"cluster_name": "gateways", "endpoints": [{"lb_endpoints": endpoints}]},
    }
