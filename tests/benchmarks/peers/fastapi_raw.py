"""FastAPI without checks: raw float32 in and out, SDPA inline in the event loop.

Run as ``python -m tests.benchmarks.peers.fastapi_raw PORT FOLDER``.
"""

from __future__ import annotations

import sys

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from torch.nn.functional import scaled_dot_product_attention

from tests.benchmarks.headers import SHAPE

app = FastAPI()


@app.post("/v1/attention")
async def attend(request: Request) -> Response:
    """Query, key and value end to end; their shape is in a header."""
    shape = tuple(int(size) for size in request.headers[SHAPE].split(","))
    query, key, value = torch.frombuffer(await request.body(), dtype=torch.float32).view(3, *shape)
    context = scaled_dot_product_attention(query, key, value)
    return Response(context.contiguous().numpy().tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        backlog=2048,
    )
