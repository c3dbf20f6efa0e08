"""gRPC server reflection, of what a server says that it serves and of nothing else that this process knows.

Under both of its names: older tools ask for v1alpha, newer ones for v1, and on the wire they are the same. It has no
pool with the contracts between our own processes.
"""

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME, aio

from crossdock.mesh.v1 import load_report_pb2
from service import orca

NAMES = (SERVICE_NAME, SERVICE_NAME.replace("v1alpha", "v1"))


def enable_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """services: full names. Those of load reports and reflection have descriptions here, all others of their own."""
    listed = (*services, *NAMES)
    servicer = aio.ReflectionServicer(listed, pool=_pool(listed))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    named = [grpc.method_handlers_generic_handler(name, methods) for name in NAMES]
    server.add_generic_rpc_handlers(named)


def _pool(services: Sequence[str]) -> descriptor_pool.DescriptorPool:
    pool, added = descriptor_pool.DescriptorPool(), set[str]()
    known = descriptor_pool.Default()

    def add(file: FileDescriptor) -> None:
        """With what it imports, before it."""
        if file.name not in added:
            added.add(file.name)
            for each in file.dependencies:
                add(each)
            pool.AddSerializedFile(file.serialized_pb)

    for name in services:
        if name == orca.SERVICE:
            add(load_report_pb2.DESCRIPTOR)
            pool.AddSerializedFile(_load_reports().SerializeToString())
        elif name == NAMES[1]:
            pool.AddSerializedFile(_second_reflection().SerializeToString())
        else:
            add(known.FindFileContainingSymbol(name))
    return pool


def _load_reports() -> FileDescriptorProto:
    """The service of the mesh's, with our messages: they are its own on the wire."""
    package, _, name = orca.SERVICE.rpartition(".")
    file = FileDescriptorProto(name="xds/service/orca/v3/orca.proto", package=package, syntax="proto3")
    file.dependency.append(load_report_pb2.DESCRIPTOR.name)
    file.service.add(name=name).method.add(
        name="StreamCoreMetrics",
        input_type=f".{load_report_pb2.OrcaLoadReportRequest.DESCRIPTOR.full_name}",
        output_type=f".{load_report_pb2.OrcaLoadReport.DESCRIPTOR.full_name}",
        server_streaming=True,
    )
    return file


def _second_reflection() -> FileDescriptorProto:
    first = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    return text_format.Parse(str(first).replace("v1alpha", "v1"), FileDescriptorProto())
