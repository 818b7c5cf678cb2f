"""The messages of ``open_inference.proto``, made from its descriptor in a pool of their own.

A module that protoc generates registers its messages in the pool of the process, where tritonclient's, KServe's and
MLServer's own have the same names: the second import would fail. The types of this module are in its stub, which
``make proto`` writes, as it writes the descriptor.
"""

from importlib import resources

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

_files = descriptor_pb2.FileDescriptorSet.FromString(
    resources.files("service.wire").joinpath("open_inference.desc").read_bytes()
)
_pool = descriptor_pool.DescriptorPool()
for _file in _files.file:
    _pool.Add(_file)
DESCRIPTOR = _pool.FindFileByName("open_inference.proto")
globals().update(
    (name, message_factory.GetMessageClass(descriptor)) for name, descriptor in DESCRIPTOR.message_types_by_name.items()
)
for _name, _enum in DESCRIPTOR.enum_types_by_name.items():
    globals()[_name] = enum_type_wrapper.EnumTypeWrapper(_enum)
    globals().update((value.name, value.number) for value in _enum.values)
