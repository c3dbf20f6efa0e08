"""Gateways of which a client sees what it needs to choose among them: whether they are well, and what they refuse."""

import json
import re
from concurrent import futures
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from crossdock.v1 import inference_pb2, inference_pb2_grpc
from service import status

INFERENCE = "crossdock.v1.InferenceService"
MESH = Path(__file__).parents[2] / "docs" / "mesh.md"


class Gateway(inference_pb2_grpc.InferenceServiceServicer):
    """Says its number as the one token of every text, or refuses while there are refusals left."""

    def __init__(self, number):
        self.number, self.calls, self.refusals = number, 0, []
        self.health = health.HealthServicer()
        self.serve(True)

    def serve(self, healthy):
        code = (
            health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        self.health.set(INFERENCE, code)

    def Tokenize(self, request, context):
        self.calls += 1
        if self.refusals:
            context.abort_with_status(status.to_status(self.refusals.pop()))
        return inference_pb2.TokenizeResponse(token_ids=[self.number])


@contextmanager
def serving(servicer):
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(None).wait()


@contextmanager
def gateways_well(count):
    with ExitStack() as stack:
        yield [stack.enter_context(serving(Gateway(number))) for number in range(count)]


def documented_service_config():
    """What other languages are told to give to gRPC."""
    (block,) = re.findall(r"^    \{.*?(?=^\S)", MESH.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return json.loads(block)
