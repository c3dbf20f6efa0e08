"""`crossdock serve --gateways N`: which processes there are, on which ports."""

import pytest

from commands import serve
from service import config
from service.config import GatewayOptions, ServeOptions
from service.startup import StartupError

KEY = "ab" * 32


def read_back(spec, model):
    """The options that a planned process will have."""
    return config.load(model, spec.argv[4:], spec.environ)


def test_several_gateways_share_the_grpc_port_and_have_http_ports_and_names_of_their_own(tmp_path):
    options = config.load(ServeOptions, ["--gateways=3", "--grpc-port=50100", "--http-port=8100"], {})
    *_, target, first, second, third = serve.plan(options, tmp_path, {}, KEY)
    gateways = [read_back(spec, GatewayOptions) for spec in (first, second, third)]
    assert [(each.grpc_port, each.http_port) for each in gateways] == [
        (50100, 8100 + index) for index in range(3)
    ]
    assert all(each.share_grpc_port for each in gateways)
    assert len({spec.name for spec in (target, first, second, third)}) == 4
    *_, alone = serve.plan(config.load(ServeOptions, [], {}), tmp_path, {}, KEY)
    assert not read_back(alone, GatewayOptions).share_grpc_port


@pytest.mark.parametrize("ports", [["--grpc-port=0"], ["--http-port=65535"]])
def test_ports_that_several_gateways_cannot_have_are_refused(tmp_path, ports):
    options = config.load(ServeOptions, ["--gateways=2", *ports], {})
    with pytest.raises(StartupError, match="--gateways"):
        serve.plan(options, tmp_path, {}, KEY)
