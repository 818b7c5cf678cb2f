"""What Python's gRPC can reach: grpc.aio that parses ModelInfer, runs SDPA inline in the event loop and checks nothing.

Run as ``python -m tests.benchmarks.peers.grpcaio_raw PORT FOLDER``.
"""

from __future__ import annotations

import asyncio
import sys

import grpc
import torch
from torch.nn.functional import scaled_dot_product_attention

from service.wire import open_inference_pb2 as messages


async def infer(
    request: messages.ModelInferRequest, rpc_context: grpc.aio.ServicerContext
) -> messages.ModelInferResponse:
    """SDPA of raw contents, in whatever model was asked for."""
    query, key, value = (
        torch.frombuffer(contents, dtype=torch.float32).view(*tensor.shape)
        for tensor, contents in zip(request.inputs, request.raw_input_contents, strict=True)
    )
    context = scaled_dot_product_attention(query, key, value)
    answer = messages.ModelInferResponse(model_name=request.model_name)
    answer.outputs.add(name="context", datatype="FP32", shape=list(context.shape))
    answer.raw_output_contents.append(context.contiguous().numpy().tobytes())
    return answer


async def serve(port: int) -> None:
    """Until it is ended."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
    )
    handler = grpc.unary_unary_rpc_method_handler(
        infer, messages.ModelInferRequest.FromString, messages.ModelInferResponse.SerializeToString
    )
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": handler})
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(int(sys.argv[1])))
