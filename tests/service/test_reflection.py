"""What tools can ask a server of its contracts."""

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2 as pb

from crossdock.v1 import inference_pb2
from crossdock.worker.v1 import worker_pb2
from service import orca
from service.channel import open_channel
from service.reflection import NAMES, enable_reflection
from service.server import bind, create_server

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
INTERNAL = worker_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name


@pytest.fixture(params=NAMES)
async def ask(request):
    """Asks one question, by either name of the service."""
    server = create_server()
    enable_reflection(server, [INFERENCE, orca.SERVICE])
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        method = channel.stream_stream(
            f"/{request.param}/ServerReflectionInfo",
            request_serializer=pb.ServerReflectionRequest.SerializeToString,
            response_deserializer=pb.ServerReflectionResponse.FromString,
        )

        async def ask(**question):
            call = method(timeout=10)
            await call.write(pb.ServerReflectionRequest(**question))
            answer = await call.read()
            call.cancel()
            return answer

        yield ask
    await server.stop(None)


def files_of(answer):
    read = FileDescriptorProto.FromString
    return {file.name: file for file in map(read, answer.file_descriptor_response.file_descriptor_proto)}


async def test_all_that_is_served_is_listed_and_nothing_else(ask):
    listed = (await ask(list_services="")).list_services_response.service
    assert {each.name for each in listed} == {INFERENCE, orca.SERVICE, *NAMES}


@pytest.mark.parametrize("service", [INFERENCE, orca.SERVICE, *NAMES])
async def test_what_is_listed_is_described_with_all_that_it_needs(ask, service):
    files = files_of(await ask(file_containing_symbol=service))
    package, _, name = service.rpartition(".")
    assert any(
        file.package == package and name in {each.name for each in file.service} for file in files.values()
    )
    assert {needed for file in files.values() for needed in file.dependency} <= set(files)


@pytest.mark.parametrize(
    "question",
    [
        {"file_by_filename": worker_pb2.DESCRIPTOR.name},
        {"file_containing_symbol": INTERNAL},
        {"file_containing_symbol": f"{worker_pb2.DESCRIPTOR.package}.Hello"},
    ],
)
async def test_the_contracts_between_our_own_processes_are_not_told(ask, question):
    answer = await ask(**question)
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
