"""What most people write: FastAPI, nested lists through Pydantic, a plain function that FastAPI gives a thread.

Run as ``python -m tests.benchmarks.peers.fastapi_json PORT FOLDER``.
"""

from __future__ import annotations

import sys

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from torch.nn.functional import scaled_dot_product_attention

Numbers = list[list[list[list[float]]]]

app = FastAPI()


class Problem(BaseModel):
    """``[batch, num_heads, seq_len, head_dim]``."""

    query: Numbers
    key: Numbers
    value: Numbers


class Answer(BaseModel):
    """``[batch, num_heads, seq_len, head_dim]``."""

    context: Numbers


@app.post("/v1/attention", response_model=Answer)
def attend(problem: Problem) -> dict[str, Numbers]:
    """SDPA of the lists."""
    query, key, value = (torch.tensor(numbers) for numbers in (problem.query, problem.key, problem.value))
    return {"context": scaled_dot_product_attention(query, key, value).tolist()}


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
