"""Messages of gRPC services from tables of their fields, and servers that speak them: no generated code.

    messages("envoy.type.v3", {"HttpStatus": "1 code int32"})["HttpStatus"](code=401)

Packages of generated code do harm here: xds-protos 1.85 overwrites 22 files of opentelemetry-proto and 59 of
googleapis-common-protos. A table has the fields that are used; others are ignored when read. Fields are declared as in
proto2, whose bytes are those of proto3: each field is either set or not, 0 and False included, and texts need not be
UTF-8. An enum is an int32. Each table has a pool of its own, so it meets no generated code of the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import grpc
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_SCALARS: Final = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "string": FieldDescriptorProto.TYPE_STRING,
}


def messages(package: str, tables: Mapping[str, str]) -> dict[str, Any]:
    """The classes of messages, by name.

    Args:
        tables: of each message its fields, `NUMBER NAME TYPE` separated by commas. A type is a scalar or a message of
            the table, and ends in `*` if the field is repeated.
    """
    file = FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto2")
    for name, table in tables.items():
        fields = [_field(package, *field.split()) for field in table.split(",") if field.strip()]
        file.message_type.append(DescriptorProto(name=name, field=fields))
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in tables}


def _field(package: str, number: str, name: str, kind: str) -> FieldDescriptorProto:
    bare = kind.rstrip("*")
    field = FieldDescriptorProto(name=name, number=int(number), label=FieldDescriptorProto.LABEL_OPTIONAL)
    if kind != bare:
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if bare in _SCALARS:
        field.type = _SCALARS[bare]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{package}.{bare}"
    return field


async def serve_method(
    address: str, service: str, method: str, handler: Any, request: type[Message], *, streams: bool, most_bytes: int
) -> tuple[grpc.aio.Server, int]:
    """A started server of one method, and its port.

    Args:
        handler: of grpc.aio; `streams` for a stream of requests and of answers.
        most_bytes: of a message.

    Raises:
        RuntimeError: the address cannot be listened on.
    """
    make: Any = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    answers = make(handler, request.FromString, lambda answer: answer.SerializeToString())
    limits = [("grpc.max_receive_message_length", most_bytes), ("grpc.max_send_message_length", most_bytes)]
    server = grpc.aio.server(options=[*limits, ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: answers}),))
    port = server.add_insecure_port(address)
    await server.start()
    return server, port
