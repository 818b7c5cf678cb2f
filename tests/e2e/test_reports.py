"""Every fault that users of other systems met, as a request to the running service.

One function an id, by the table at the end; what a later issue brings stands there as not yet served.
"""

from __future__ import annotations

import base64
import itertools
import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch

from service.doors.exchange import OPEN_PATHS
from tests.support.bodies import JSON, SAFETENSORS, as_lists, as_object, read_tensor, safetensors_body, strict_json
from tests.support.every_call import METHODS, OPEN_METHODS, outcome, rest_calls
from tests.support.in_process import GatedEngine, service_in_process
from tests.support.reports import Report, assert_right, numbers, reports, request_of
from tests.support.server import RunningServer, running_server, server_environment, spawn, wait_until_ready

EVERYTHING = ["context", "weights", "logsumexp"]
PLAIN = {"query": [[[[1, 0]]]], "key": [[[[1, 0], [0, 1]]]], "value": [[[[1, 2], [3, 4]]]]}


def post(client: httpx.Client, members: dict[str, Any], path: str = "/v1/attention") -> httpx.Response:
    return client.post(path, json=members)


def answered(client: httpx.Client, members: dict[str, Any]) -> dict[str, Any]:
    answer = post(client, members)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = strict_json(answer.content)
    return body


def refused(client: httpx.Client, members: dict[str, Any], *fields: str, status: int = 422) -> dict[str, Any]:
    answer = post(client, members)
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    named = [fault["field"] for fault in body["errors"]]
    for field in fields:
        assert field in named, body
    return body


def every_path(client: httpx.Client, members: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer by the road that gives everything, and by the one for context and logsumexp alone."""
    return [
        answered(client, members | {"outputs": EVERYTHING}),
        answered(client, members | {"outputs": ["context", "logsumexp"]}),
        answered(client, members | {"outputs": ["context"]}),
    ]


def numeric(report: Report, client: httpx.Client, server: RunningServer) -> None:
    """A problem with one right answer, on both paths."""
    for answer in every_path(client, request_of(report["input"])):
        assert_right(answer, report["right_behaviour"])


def integer_mask(report: Report, client: httpx.Client, server: RunningServer) -> None:
    members = request_of(report["input"] | {"mask_kind": "bool"})
    body = refused(client, members, "allow_mask.0.0")
    assert "true or false" in body["errors"][0]["expected"]
    in_binary = members | {"allow_mask": as_object(torch.tensor(report["input"]["mask"]))}
    assert "bool" in refused(client, in_binary, "allow_mask")["errors"][0]["expected"]


def ambiguous_mask(report: Report, client: httpx.Client, server: RunningServer) -> None:
    fault = refused(client, request_of(report["input"]), "allow_mask")["errors"][0]
    assert "[1,H,T,S]" in fault["expected"] and "[B,1,T,S]" in fault["expected"]
    per_batch = [[axis] for axis in report["input"]["mask"]]
    assert_right(answered(client, request_of(report["input"], allow_mask=per_batch)), report["right_behaviour"])


def transposed_mask(report: Report, client: httpx.Client, server: RunningServer) -> None:
    fault = refused(client, request_of(report["input"]), "allow_mask")["errors"][0]
    assert fault["received"] == json.dumps(report["input"]["mask_shape"], separators=(",", ":"))
    assert "[1,1,1,3]" in fault["expected"]


def wide_bias(report: Report, client: httpx.Client, server: RunningServer) -> None:
    members = request_of(report["input"])
    members["bias"] = as_object(torch.tensor(report["input"]["mask"], dtype=torch.float32))
    for answer in every_path(client, members | {"encoding": "list"}):
        assert_right(answer, report["right_behaviour"])


def finite_minimum(report: Report, client: httpx.Client, server: RunningServer) -> None:
    value = numbers(report["input"]["v"])
    for answer in every_path(client, request_of(report["input"])):
        context = numbers(answer["context"])
        assert (context >= value.amin(2, keepdim=True)).all() and (context <= value.amax(2, keepdim=True)).all()
        if "weights" in answer:
            assert numbers(answer["weights"]).sum().item() == pytest.approx(1.0)


def fill_is_no_mask(report: Report, client: httpx.Client, server: RunningServer) -> None:
    right = report["right_behaviour"]
    for answer in every_path(client, request_of(report["input"])):
        assert_right(answer, right)
    second = request_of(report["input"] | report["input"]["second_call"])
    for answer in every_path(client, second):
        assert_right(answer, {"out": right["second_call_out"], "tolerance": 0})


def two_calls(report: Report, client: httpx.Client, server: RunningServer) -> None:
    answers = every_path(client, request_of(report["input"]))
    for answer in answers:
        assert_right(answer, report["right_behaviour"])
    if report["input"].get("is_causal"):
        weights = numbers(answers[0]["weights"])
        assert (weights.triu(1) == 0).all()


def head_counts(report: Report, client: httpx.Client, server: RunningServer) -> None:
    for case in report["input"]["cases"]:
        key_heads = case.get("kv_heads", case.get("k_heads"))
        value_heads = case.get("kv_heads", case.get("v_heads"))
        query, key, value = (
            as_lists(torch.zeros(1, heads, 2, 2)) for heads in (case["q_heads"], key_heads, value_heads)
        )
        field = "key" if key_heads == value_heads else "value"
        expected = refused(client, {"query": query, "key": key, "value": value}, field)["errors"][0]["expected"]
        assert "heads" in expected and str(case["q_heads"] if field == "key" else key_heads) in expected


def bad_scales(report: Report, client: httpx.Client, server: RunningServer) -> None:
    for scale in report["input"]["scales"]:
        members = request_of(report["input"], scale=scale)
        if isinstance(scale, str):
            refused(client, members, "scale")
        else:
            for answer in every_path(client, members):
                assert_right(answer, report["right_behaviour"][str(scale)])


def overflowing_scores(report: Report, client: httpx.Client, server: RunningServer) -> None:
    for answer in every_path(client, request_of(report["input"])):
        assert answer["context"] == [[[["NaN"]]]]
        assert answer["info"]["nonfinite_rows"] == 1


def nan_behind_mask(report: Report, client: httpx.Client, server: RunningServer) -> None:
    for answer in every_path(client, request_of(report["input"])):
        assert answer["context"] == [[[[1.0, 2.0]]]] == [[[report["input"]["v"][0][0][0]]]]


def nan_row(report: Report, client: httpx.Client, server: RunningServer) -> None:
    value = numbers(report["input"]["v"])
    for answer in every_path(client, request_of(report["input"])):
        assert answer["context"][0][0][0] == ["NaN", "NaN"]
        torch.testing.assert_close(numbers(answer["context"])[0, 0, 1], value[0, 0].mean(0))
        assert answer["info"]["nonfinite_rows"] == 1


def nan_of_the_future(report: Report, client: httpx.Client, server: RunningServer) -> None:
    value = numbers(report["input"]["v"])[0, 0]
    for answer in every_path(client, request_of(report["input"])):
        context = numbers(answer["context"])[0, 0]
        torch.testing.assert_close(context[:2, 0], torch.stack([value[0, 0], value[:2, 0].mean()]))
        assert answer["context"][0][0][2] == ["NaN"]


def nan_of_another(report: Report, client: httpx.Client, server: RunningServer) -> None:
    alone = answered(client, PLAIN)["context"]
    poison = {
        "query": [[[[1, 0], [0, 1]]]],
        "key": [[[["NaN", "NaN"], ["NaN", "NaN"]]]],
        "value": [[[["NaN", "NaN"], ["NaN", "NaN"]]]],
    }
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda members: answered(client, members), [poison, PLAIN] * 8))
    answers.append(answered(client, PLAIN))
    clean = [answer for answer in answers if answer["info"]["nonfinite_rows"] == 0]
    assert len(clean) == 9
    assert all(answer["context"] == alone for answer in clean)
    assert_right(clean[0], {"out": report["right_behaviour"]["B and C"], "tolerance": 1e-5})


def no_keys(report: Report, client: httpx.Client, server: RunningServer) -> None:
    given = report["input"]
    for causal in (False, "upper_left"):
        members = {
            "query": as_object(torch.ones(given["q_shape"])),
            "key": as_object(torch.empty(given["k_shape"])),
            "value": as_object(torch.empty(given["v_shape"])),
            "causal": causal,
            "outputs": EVERYTHING,
        }
        answer = answered(client, members)
        context = read_tensor(answer["context"], torch.float32)
        assert context.shape == (1, 1, 2, 3) and (context == 0).all()
        assert read_tensor(answer["weights"], torch.float32).shape == (1, 1, 2, 0)
        assert torch.isneginf(read_tensor(answer["logsumexp"], torch.float32)).all()
        assert answer["info"]["empty_rows"] == 2


def empty_batch(report: Report, client: httpx.Client, server: RunningServer) -> None:
    members = {name: as_object(torch.empty(report["input"][f"{name[0]}_shape"])) for name in ("query", "key", "value")}
    assert answered(client, members)["context"]["shape"] == [0, 1, 2, 2]


def empty_items(report: Report, client: httpx.Client, server: RunningServer) -> None:
    """The ragged batch as a padded one with lengths: four items in one problem."""
    given = report["input"]
    value = torch.zeros(4, 1, 5, 1)
    value[1, 0, :3, 0] = torch.tensor([1.0, 2.0, 6.0])
    value[3, 0, :, 0] = torch.arange(5.0)
    members = {
        "query": as_lists(torch.zeros(4, 1, 2, 1)),
        "key": as_lists(torch.zeros(4, 1, 5, 1)),
        "value": as_lists(value),
        "query_lengths": given["q_lengths"],
        "key_lengths": given["kv_lengths"],
        "causal": given["causal"],
    }
    answer = answered(client, members)
    for item, expected in report["right_behaviour"]["out"].items():
        index = int(item.split()[1])
        rows = [row[0] for row in answer["context"][index][0]]
        assert rows[: len(expected)] == pytest.approx(expected, abs=1e-5)
        assert rows[len(expected) :] == [0.0] * (2 - len(expected))
    assert answer["info"]["empty_rows"] == 0


def unequal_lengths(report: Report, client: httpx.Client, server: RunningServer) -> None:
    for pair in report["input"]["pairs"]:
        members = {
            ours: as_lists(torch.zeros(pair[theirs]))
            for ours, theirs in zip(("query", "key", "value"), "qkv", strict=True)
        }
        fault = refused(client, members, "value")["errors"][0]
        assert f"{pair['k'][2]} tokens" in fault["expected"] and str(pair["v"][2]) in fault["received"]


def head_sizes(report: Report, client: httpx.Client, server: RunningServer) -> None:
    members = {name: as_lists(torch.zeros(report["input"][f"{name[0]}_shape"])) for name in ("query", "key", "value")}
    fault = refused(client, members, "key")["errors"][0]
    assert fault["expected"] == "head dim 2, as query has" and fault["received"] == "[1,1,2,3]"


def ragged(report: Report, client: httpx.Client, server: RunningServer) -> None:
    refused(client, request_of(report["input"]["body"]), "query.0.0.1")


def head_order(report: Report, client: httpx.Client, server: RunningServer) -> None:
    """Identity projections are none: the btd layout splits and merges heads."""
    x = numbers(report["input"]["x"])
    members = {
        "query": as_lists(0.1 * x),
        "key": as_lists(0.1 * x),
        "value": as_lists(x),
        "layout": "btd",
        "num_heads": report["input"]["num_heads"],
    }
    for answer in every_path(client, members):
        assert_right(answer, {"out": report["right_behaviour"]["out"], "tolerance": 1e-5})


def alone_and_together(report: Report, client: httpx.Client, server: RunningServer) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, width = report["input"]["H"], report["input"]["D"]
    items = [
        {
            name: as_lists(torch.randn(1, heads, tokens, width, generator=generator))
            for name, tokens in (("query", item["T"]), ("key", item["S"]), ("value", item["S"]))
        }
        for item in report["input"]["items"]
    ]
    alone = [answered(client, item)["context"] for item in items]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda item: answered(client, item)["context"], items * 4))
        backwards = list(pool.map(lambda item: answered(client, item)["context"], items[::-1]))
    assert together == alone * 4
    assert backwards == alone[::-1]


def never_random(report: Report, client: httpx.Client, server: RunningServer) -> None:
    members = request_of(report["input"])
    for extra in ({}, {"dropout_p": 0}):
        answers = [post(client, members | extra).json()["context"] for _ in range(report["input"]["repeats"])]
        assert all(answer == answers[0] for answer in answers)
    right = report["right_behaviour"]["no field / 0"]
    assert_right({"context": answers[0]}, {"out": json.loads(right[right.index("[") :]), "tolerance": 1e-5})
    refused(client, members | {"dropout_p": 0.5}, "dropout_p")


def probabilities(report: Report, client: httpx.Client, server: RunningServer) -> None:
    for answer in every_path(client, request_of(report["input"])):
        assert_right(answer, report["right_behaviour"])
        if "weights" in answer:
            weights, value = numbers(answer["weights"]), numbers(report["input"]["v"])
            assert (weights >= 0).all()
            assert (weights.sum(-1) - 1).abs().max() <= 1e-6
            torch.testing.assert_close(weights @ value, numbers(answer["context"]), atol=1e-4, rtol=1e-6)


def weights_change_nothing(report: Report, client: httpx.Client, server: RunningServer) -> None:
    """The whole grid of the report, in float32, over safetensors."""
    generator = torch.Generator().manual_seed(report["input"]["seed"])
    lengths, heads, widths = (1, 2, 5, 33), ((1, 1), (4, 2), (4, 1)), (1, 3, 8, 64)
    headers = {"content-type": SAFETENSORS}
    for (seq_len_q, seq_len_kv), (num_heads, num_kv_heads), width in itertools.product(
        itertools.product(lengths, lengths), heads, widths
    ):
        for causal, mask in itertools.product((False, "upper_left", "lower_right"), ("none", "bool", "float")):
            tensors = {
                "query": torch.randn(1, num_heads, seq_len_q, width, generator=generator),
                "key": torch.randn(1, num_kv_heads, seq_len_kv, width, generator=generator),
                "value": torch.randn(1, num_kv_heads, seq_len_kv, width, generator=generator),
            }
            if mask == "bool":
                tensors["allow_mask"] = torch.rand(1, 1, seq_len_q, seq_len_kv, generator=generator) > 0.3
            elif mask == "float":
                tensors["bias"] = torch.randn(1, num_heads, seq_len_q, seq_len_kv, generator=generator)
            contexts = []
            for outputs in (["context"], ["context", "weights"]):
                body = safetensors_body(tensors, {"causal": causal, "outputs": outputs})
                answer = client.post("/v1/attention", content=body, headers=headers)
                assert answer.status_code == 200, answer.text
                contexts.append(_context(answer.content))
            bound = 2e-6 * tensors["value"].abs().max()
            assert (contexts[0] - contexts[1]).abs().max() <= bound


def _context(content: bytes) -> torch.Tensor:
    length = struct.unpack("<Q", content[:8])[0]
    entry = json.loads(content[8 : 8 + length])["context"]
    begin, end = entry["data_offsets"]
    raw = bytearray(content[8 + length + begin : 8 + length + end])
    return torch.frombuffer(raw, dtype=torch.float32).view(entry["shape"])


def natural_log(report: Report, client: httpx.Client, server: RunningServer) -> None:
    assert_right(answered(client, request_of(report["input"], outputs=["logsumexp"])), report["right_behaviour"])


def lse_shape(report: Report, client: httpx.Client, server: RunningServer) -> None:
    for tokens in report["input"]["T"]:
        zeros = as_lists(torch.zeros(1, 2, tokens, 8))
        for outputs in (["logsumexp"], ["logsumexp", "weights"]):
            lse = numbers(answered(client, {"query": zeros, "outputs": outputs})["logsumexp"])
            assert lse.shape == (1, 2, tokens)
            assert (lse - torch.log(torch.tensor(float(tokens)))).abs().max() <= 1e-6


def softcap_off_and_wrong(report: Report, client: httpx.Client, server: RunningServer) -> None:
    for softcap in report["input"]["softcap"]:
        members = request_of(report["input"] | {"softcap": softcap})
        if softcap == "absent":
            members.pop("softcap")
        if softcap in ("absent", None):
            for answer in every_path(client, members):
                assert_right(answer, report["right_behaviour"]["absent, null"])
        else:
            refused(client, members, "softcap")


def window_counts(report: Report, client: httpx.Client, server: RunningServer) -> None:
    right = report["right_behaviour"]
    by_left = {1: right["W tokens including self (left distance 1)"], 2: right["left distance 2 (W+1 tokens)"]}
    for left, expected in by_left.items():
        for answer in every_path(client, request_of(report["input"], window={"left": left})):
            assert_right(answer, expected)
    refused(client, request_of(report["input"], window=2), "window")


def wide_windows(report: Report, client: httpx.Client, server: RunningServer) -> None:
    plain = answered(client, request_of(report["input"]))["context"]
    for left in report["input"]["window_left"]:
        answer = answered(client, request_of(report["input"], window={"left": left}))
        assert_right(answer, report["right_behaviour"])
        torch.testing.assert_close(numbers(answer["context"]), numbers(plain), atol=1e-6, rtol=0)


def callers_slopes(report: Report, client: httpx.Client, server: RunningServer) -> None:
    """The caller sends the slopes: each of the report's is used as -slope * distance."""
    for slopes in report["right_behaviour"].values():
        heads = len(slopes)
        members = {
            "query": as_lists(torch.zeros(1, heads, 3, 1)),
            "alibi_slopes": slopes,
            "outputs": ["logits"],
        }
        logits = numbers(answered(client, members)["logits"])
        distance = (torch.arange(3).view(-1, 1) - torch.arange(3)).abs()
        expected = -torch.tensor(slopes, dtype=torch.float64).view(1, -1, 1, 1) * distance
        torch.testing.assert_close(logits, expected, atol=1e-7, rtol=1e-6)
    refused(client, {"query": [[1.0]], "alibi_slopes": [1.0, 2.0]}, "alibi_slopes")


def sinks(report: Report, client: httpx.Client, server: RunningServer) -> None:
    for sink, right in (("sinks", "sink 0"), ("also_sinks", "sink 20")):
        members = request_of(report["input"], sinks=report["input"][sink], outputs=EVERYTHING)
        answer = answered(client, members)
        expected = report["right_behaviour"][right]
        assert_right(answer, {"tolerance": 0.0, **expected})
        assert numbers(answer["weights"]).sum() < 1


def step_by_step(report: Report, client: httpx.Client, server: RunningServer) -> None:
    """Without sessions: each step sends the keys so far, and its queries stand at their end."""
    given = report["input"]
    for schedule in given["schedules"]:
        rows: list[Any] = []
        lses: list[Any] = []
        for size in schedule:
            done = len(rows)
            members = {
                "query": [[given["q"][0][0][done : done + size]]],
                "key": [[given["k"][0][0][: done + size]]],
                "value": [[given["v"][0][0][: done + size]]],
                "causal": "lower_right",
                "outputs": ["context", "logsumexp"],
            }
            answer = answered(client, members)
            rows += answer["context"][0][0]
            lses += answer["logsumexp"][0][0]
        assert_right({"context": [[rows]], "logsumexp": [[lses]]}, report["right_behaviour"])


def strict_answers(report: Report, client: httpx.Client, server: RunningServer) -> None:
    members = request_of(reports()["EMPTY-01"]["input"], outputs=EVERYTHING)
    answer = answered(client, members)
    assert answer["logsumexp"][0][0][1] == "-Infinity"
    assert len(answer["context"][0][0]) == 2 and len(answer["weights"][0][0][1]) == 2


def half_types(report: Report, client: httpx.Client, server: RunningServer) -> None:
    values = [1.0, -2.0, 65504, 6e-8]
    by_list = {"query": [[values]], "dtype": "float16", "outputs": ["context"], "encoding": "base64"}
    by_bytes = {"query": as_object(torch.tensor([[values]], dtype=torch.float16)), "outputs": ["context"]}
    assert answered(client, by_list)["context"] == answered(client, by_bytes)["context"]
    refused(client, by_list | {"query": [[[70000.0]]]}, "query.0.0.0")
    one = base64.b64encode(bytes.fromhex("803f")).decode()
    answer = answered(client, {"query": {"dtype": "bfloat16", "shape": [1, 1], "data": one}, "encoding": "list"})
    assert answer["context"] == [[1.0]]


def long_length(report: Report, client: httpx.Client, server: RunningServer) -> None:
    import socket

    before = server.resident_bytes()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        head = f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\n"
        head += f"Content-Length: {report['input']['headers']['Content-Length']}\r\n\r\n"
        connection.sendall(head.encode() + b"[" * 200)
        status = connection.recv(65536).split(b"\r\n", 1)[0]
    assert status.startswith(b"HTTP/1.1 413 ")
    assert server.resident_bytes() - before < 2**24


def base64_forms(report: Report, client: httpx.Client, server: RunningServer) -> None:
    given = report["input"]
    for index, text in enumerate(given["q_base64"]):
        data = text.split(" ")[0]
        members = {"query": {"dtype": "float32", "shape": given["shape"], "data": data}, "encoding": "list"}
        if index == 0:
            assert answered(client, members)["context"] == [[[[0.0, 1.0]]]]
        else:
            refused(client, members, "query.data")


def shape_and_data(report: Report, client: httpx.Client, server: RunningServer) -> None:
    given = report["input"]
    quiet = answered(client, PLAIN)["context"]

    def send(count: int) -> httpx.Response:
        data = base64.b64encode(np.ones(count, dtype="<f4").tobytes()).decode()
        return post(client, {"query": {"dtype": "float32", "shape": given["shape"], "data": data}})

    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(lambda: answered(client, PLAIN)["context"]) for _ in range(20)]
        bad = {count: pool.submit(send, count) for count in given["elements_sent"]}
    assert all(future.result() == quiet for future in good)
    for count, future in bad.items():
        answer = future.result()
        if count == 10:
            assert answer.status_code == 200
        else:
            fault = answer.json()["errors"][0]
            assert answer.status_code == 422
            assert "10 elements" in fault["expected"] and f"{count} elements" in fault["received"]


def shape_products(report: Report, client: httpx.Client, server: RunningServer) -> None:
    before = server.resident_bytes()
    for shape in report["input"]["shapes"]:
        data = base64.b64encode(bytes(8)).decode()
        answer = post(client, {"query": {"dtype": "float32", "shape": shape, "data": data}})
        assert 400 <= answer.status_code < 500, (shape, answer.text)
        header = {"query": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + bytes(8)
        binary = client.post("/v1/attention", content=content, headers={"content-type": SAFETENSORS})
        assert 400 <= binary.status_code < 500, (shape, binary.text)
    assert server.resident_bytes() - before < 2**22


def unknown_field(report: Report, client: httpx.Client, server: RunningServer) -> None:
    body = request_of(report["input"]["body"]) | {"is_casual": True}
    fault = refused(client, body, "is_casual")["errors"][0]
    assert fault["expected"] == "a known field; did you mean causal?" and fault["received"] == "true"


def endless_body(report: Report, client: httpx.Client, server: RunningServer) -> None:
    import socket

    limit = 2**20
    with running_server(ATTN_MAX_BODY_BYTES=str(limit)) as small:
        before = small.resident_bytes()
        sent = 0
        with socket.create_connection(("127.0.0.1", small.port), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
            try:
                while sent < 64 * limit:
                    connection.sendall(chunk)
                    sent += 0x10000
            except OSError:
                pass
            assert sent < 64 * limit, "the connection was not closed"
        # Again, by a client that stops to listen in time: the answer is there and the connection ends.
        with socket.create_connection(("127.0.0.1", small.port), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n" + chunk * (limit // 0x10000 + 1)
            )
            received = b""
            while part := connection.recv(65536):
                received += part
        assert received.startswith(b"HTTP/1.1 413 ") and b"connection: close" in received
        assert small.resident_bytes() - before < 2 * limit + 2**22


def one_bad_item(report: Report, client: httpx.Client, server: RunningServer) -> None:
    quiet = answered(client, PLAIN)["context"]
    unequal = PLAIN | {"value": [[[[1, 2]]]]}
    nan = PLAIN | {"query": [[[["NaN", 0]]]]}
    with ThreadPoolExecutor(22) as pool:
        good = [pool.submit(lambda: answered(client, PLAIN)["context"]) for _ in range(20)]
        first, second = pool.submit(post, client, unequal), pool.submit(post, client, nan)
    assert all(future.result() == quiet for future in good)
    expected = json.loads(report["right_behaviour"]["20"].split("with ")[1])
    assert_right({"context": quiet}, {"out": expected, "tolerance": 1e-5})
    assert first.result().status_code == 422
    assert second.result().json()["context"] == [[[["NaN", "NaN"]]]]


def mixed_lengths(report: Report, client: httpx.Client, server: RunningServer) -> None:
    generator = torch.Generator().manual_seed(0)
    items = []
    for index, tokens in enumerate((1, 2, 3, 5, 8, 13, 21, 34)):
        tensors = {n: torch.randn(1, 2, tokens, 8, generator=generator) for n in ("query", "key", "value")}
        items.append({n: as_lists(t) for n, t in tensors.items()} | {"causal": index % 2 == 0})
    alone = [answered(client, item)["context"] for item in items]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda item: answered(client, item)["context"], items * 3)) == alone * 3


def late_in_the_queue(report: Report, client: httpx.Client, server: RunningServer) -> None:
    engine = GatedEngine()
    with (
        service_in_process(engine) as service,
        httpx.Client(base_url=service.url, timeout=30.0) as own,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(post, own, PLAIN)
        engine.wait_until_entered()
        # A is being computed for as long as the test likes; B's answer does not wait for it.
        late = post(own, PLAIN | {"timeout_ms": 200})
        assert late.status_code == 504
        assert late.json()["type"] == "/errors/deadline"
        assert late.elapsed.total_seconds() >= 0.2
        engine.let_through()
        assert first.result().status_code == 200


def full_queue(report: Report, client: httpx.Client, server: RunningServer) -> None:
    engine = GatedEngine()
    max_queue, num_offered = report["input"]["max_queue"], report["input"]["offered"]
    overflow = num_offered - max_queue
    with (
        service_in_process(engine, max_queue_requests=max_queue) as service,
        httpx.Client(base_url=service.url, timeout=30.0, limits=httpx.Limits(max_connections=200)) as own,
        ThreadPoolExecutor(num_offered + 1) as pool,
    ):
        running = pool.submit(post, own, PLAIN)
        engine.wait_until_entered()
        offered = [pool.submit(post, own, PLAIN) for _ in range(num_offered)]
        is_answered = threading.Semaphore(0)
        for future in offered:
            future.add_done_callback(lambda _: is_answered.release())
        for _ in range(overflow):
            assert is_answered.acquire(timeout=30)
        # The overflow has its answer while nothing has been computed yet.
        early = [future.result() for future in offered if future.done()]
        engine.open()
        answers = [running.result(), *(future.result() for future in offered)]
    assert {answer.status_code for answer in early} == {429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in early)
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == max_queue + 1
    assert statuses.count(429) == overflow


def readiness(report: Report, client: httpx.Client, server: RunningServer) -> None:
    engine = GatedEngine()
    with service_in_process(engine, start_engine=False) as service, httpx.Client(base_url=service.url) as own:
        assert own.get("/livez").status_code == 200
        not_ready = own.get("/readyz")
        assert not_ready.status_code == 503 and int(not_ready.headers["retry-after"]) >= 1
        assert post(own, PLAIN).status_code == 503
    started = spawn()
    try:
        assert httpx.get(f"{started.url}/livez").status_code == 200
        wait_until_ready(started.url)
        started.terminate()
        assert started.wait() == 0
    finally:
        started.end()


def health_under_load(report: Report, client: httpx.Client, server: RunningServer) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(1, 8, 1024, 64, generator=generator) for name in ("query", "key", "value")}
    body = safetensors_body(tensors, {"outputs": ["context", "weights"]})
    headers = {"content-type": SAFETENSORS}
    with ThreadPoolExecutor(4) as pool:
        load = [pool.submit(client.post, "/v1/attention", content=body, headers=headers) for _ in range(4)]
        probes = 0
        while not all(future.done() for future in load):
            assert httpx.get(f"{server.url}/livez", timeout=5.0).status_code == 200
            probes += 1
    assert probes > 3
    assert [future.result().status_code for future in load] == [200] * 4


def out_of_memory(report: Report, client: httpx.Client, server: RunningServer) -> None:
    before = server.resident_bytes()
    tensors = {name: torch.zeros(1, 16, 65536, 1) for name in ("query", "key", "value")}
    body = safetensors_body(tensors, {"outputs": ["weights"]})
    answer = client.post("/v1/attention", content=body, headers={"content-type": SAFETENSORS})
    assert answer.status_code == 413, answer.text
    problem = answer.json()
    assert problem["needed_bytes"] >= 16 * 65536**2 * 4 > problem["allowed_bytes"]
    second = answered(client, request_of(report["input"]["then"]))
    assert_right(second, {"out": report["right_behaviour"]["second"], "tolerance": 1e-5})
    assert server.resident_bytes() - before < 2**26


def few_series(report: Report, client: httpx.Client, server: RunningServer) -> None:
    def count() -> int:
        return sum(not line.startswith("#") for line in client.get("/metrics").text.splitlines())

    client.get("/somewhere")
    answered(client, PLAIN)
    before = count()
    for number in range(300):
        client.get(f"/unknown/{number}", headers={"x-request-id": f"id-{number}"})
        if number < 100:
            answered(client, {"query": as_lists(torch.ones(1 + number % 10, 1 + number // 10))})
    assert count() - before <= 5


def orderly_stop(report: Report, client: httpx.Client, server: RunningServer) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(1, 16, 3072, 64, generator=generator) for name in ("query", "key", "value")}
    body = safetensors_body(tensors, {"outputs": ["logsumexp", "entropy"]})
    headers = {"content-type": SAFETENSORS}
    stopping = spawn(ATTN_DRAIN_NOTICE_S="1.0", ATTN_TORCH_THREADS="1")
    try:
        wait_until_ready(stopping.url)
        with httpx.Client(base_url=stopping.url, timeout=120.0) as own, ThreadPoolExecutor(3) as pool:
            work = [pool.submit(own.post, "/v1/attention", content=body, headers=headers) for _ in range(3)]
            while "attn_in_flight_requests 3.0" not in httpx.get(f"{stopping.url}/metrics").text:
                assert stopping.process.poll() is None
            stopping.terminate()
            while httpx.get(f"{stopping.url}/readyz").status_code == 200:
                assert stopping.process.poll() is None
            late = httpx.post(f"{stopping.url}/v1/attention", json=PLAIN)
            assert late.status_code == 503 and int(late.headers["retry-after"]) >= 1
            assert late.headers["connection"] == "close"
            assert [future.result().status_code for future in work] == [200, 200, 200]
        assert stopping.wait() == 0
    finally:
        stopping.end()


def retried(report: Report, client: httpx.Client, server: RunningServer) -> None:
    import socket

    body = json.dumps(PLAIN).encode()
    head = f"POST /v1/attention HTTP/1.1\r\nHost: x\r\nX-Request-Id: same\r\nContent-Type: {JSON}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as cut:
        cut.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answers = [client.post("/v1/attention", json=PLAIN, headers={"x-request-id": "same"}) for _ in range(2)]
    assert answers[0].json()["context"] == answers[1].json()["context"]
    assert all(answer.headers["x-request-id"] == "same" for answer in answers)


def keys_everywhere(report: Report, client: httpx.Client, server: RunningServer) -> None:
    right = {"authorization": "Bearer K"}
    refused: tuple[dict[str, str], ...] = ({}, {"authorization": "Bearer k"}, {"x-api-key": "KK"})
    with running_server(ATTN_API_KEYS="K") as locked, httpx.Client(base_url=locked.url) as caller:
        for method, path in rest_calls(caller, right):
            statuses = [caller.request(method, path, headers=headers).status_code for headers in refused]
            assert statuses == ([200] * 3 if path in OPEN_PATHS else [401] * 3), path
            assert caller.request(method, path, headers=right).status_code != 401
        with grpc.insecure_channel(f"127.0.0.1:{locked.grpc_port}") as channel:
            for method in {*METHODS, *OPEN_METHODS}:
                code = grpc.StatusCode.OK if method in OPEN_METHODS else grpc.StatusCode.UNAUTHENTICATED
                assert [outcome(channel, method, metadata) for metadata in refused] == [code] * 3, method
                assert outcome(channel, method, right) is not grpc.StatusCode.UNAUTHENTICATED
    command = [sys.executable, "-m", "service", "serve", "--port", "0", "--grpc-port", "0"]
    ended = subprocess.run(command, env=server_environment(ATTN_API_KEYS=""), capture_output=True, check=False)
    assert ended.returncode == 2


def steady_memory(report: Report, client: httpx.Client, server: RunningServer) -> None:
    """A short seed of the report; the long form belongs to the soak."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 129, (600, 2), generator=generator).tolist()

    def one(size: list[int]) -> None:
        tensors = {
            "query": torch.ones(1, 2, size[0], 16),
            "key": torch.ones(1, 2, size[1], 16),
            "value": torch.ones(1, 2, size[1], 16),
        }
        answer = client.post(
            "/v1/attention", content=safetensors_body(tensors, {}), headers={"content-type": SAFETENSORS}
        )
        assert answer.status_code == 200

    for size in sizes:
        one(size)
    first = server.resident_bytes()
    for size in sizes:
        one(size)
    assert server.resident_bytes() <= first * 1.05


def fortran_order(report: Report, client: httpx.Client, server: RunningServer) -> None:
    """The command line reads arrays by index, whatever their order in memory."""
    import tempfile
    from pathlib import Path

    from service.ask import ask

    array = np.array([[1.0, 2.0], [3.0, 4.0]], dtype=np.float32).T[None, None]
    assert not array.flags.c_contiguous
    with tempfile.TemporaryDirectory() as folder:
        outputs = []
        for name, own in (("fortran", array), ("c", np.ascontiguousarray(array))):
            file = Path(folder) / f"{name}.npz"
            np.savez(file, query=own, key=own, value=own)
            tensors, _ = ask([str(file)], url=server.url, path="/v1/attention", options=[], outputs=None, save=None)
            outputs.append(tensors["context"])
        assert torch.equal(*outputs)


def small_gradients(report: Report, client: httpx.Client, server: RunningServer) -> None:
    members = request_of(report["input"])
    for dtype in ("float64", "float32"):
        for path in (None, "manual", "blocked"):
            answer = post(client, members | {"dtype": dtype, "path": path}, "/v1/attention/gradients")
            assert answer.status_code == 200, answer.text
            assert_right(strict_json(answer.content), report["right_behaviour"])


def gradients_of_logsumexp(report: Report, client: httpx.Client, server: RunningServer) -> None:
    small_gradients(report, client, server)
    # Where no context has a gradient, none need be sent.
    members = request_of(report["input"], grad_context=None)
    answer = strict_json(post(client, members, "/v1/attention/gradients").content)
    assert_right(answer, report["right_behaviour"])


Check = Callable[[Report, httpx.Client, RunningServer], None]
NUMERIC = [
    "MASK-01",
    "MASK-03",
    "MASK-06",
    "EMPTY-01",
    "EMPTY-03",
    "CAUSAL-01",
    "CAUSAL-03",
    "CAUSAL-05",
    "CAUSAL-06",
    "GQA-01",
    "GQA-03",
    "SCALE-01",
    "DTYPE-01",
    "DTYPE-03",
    "DTYPE-06",
    "CAP-01",
    "WIN-04",
]
SERVED: dict[str, Check] = dict.fromkeys(NUMERIC, numeric) | {
    "MASK-05": integer_mask,
    "MASK-07": ambiguous_mask,
    "MASK-09": transposed_mask,
    "MASK-10": wide_bias,
    "EMPTY-04": finite_minimum,
    "EMPTY-06": fill_is_no_mask,
    "CAUSAL-08": two_calls,
    "GQA-04": head_counts,
    "SCALE-03": two_calls,
    "SCALE-04": bad_scales,
    "DTYPE-04": overflowing_scores,
    "NAN-01": nan_behind_mask,
    "NAN-03": nan_row,
    "NAN-05": nan_of_the_future,
    "NAN-06": nan_of_another,
    "ZERO-01": no_keys,
    "ZERO-03": empty_batch,
    "ZERO-05": empty_items,
    "SHAPE-01": unequal_lengths,
    "SHAPE-03": head_sizes,
    "SHAPE-05": ragged,
    "HEADS-01": head_order,
    "LAYOUT-01": fortran_order,
    "INV-01": alone_and_together,
    "INV-03": never_random,
    "W-01": probabilities,
    "W-03": weights_change_nothing,
    "LSE-01": natural_log,
    "LSE-03": lse_shape,
    "CAP-03": softcap_off_and_wrong,
    "WIN-01": window_counts,
    "WIN-03": wide_windows,
    "ALIBI-01": callers_slopes,
    "SINK-01": sinks,
    "CACHE-01": step_by_step,
    "WIRE-01": strict_answers,
    "WIRE-03": half_types,
    "WIRE-05": long_length,
    "WIRE-06": base64_forms,
    "SIZE-01": shape_and_data,
    "SIZE-02": shape_products,
    "SIZE-04": unknown_field,
    "SIZE-07": endless_body,
    "BATCH-01": one_bad_item,
    "BATCH-03": mixed_lengths,
    "TIME-01": late_in_the_queue,
    "TIME-03": full_queue,
    "HEALTH-01": readiness,
    "HEALTH-03": health_under_load,
    "HEALTH-04": out_of_memory,
    "MEM-01": steady_memory,
    "METRIC-01": few_series,
    "STOP-01": orderly_stop,
    "RETRY-01": retried,
    "AUTH-01": keys_everywhere,
    "GRAD-01": small_gradients,
    "GRAD-03": small_gradients,
    "GRAD-05": gradients_of_logsumexp,
}
ELSEWHERE = {"LSE-04": "tests/attn_core: the merge of two partial results is a function of the core"}
NOT_YET = {
    "CACHE-03": "sessions",
    "CACHE-05": "sessions",
    "SIZE-05": "gRPC",
}


@pytest.mark.parametrize("name", SERVED)
def test_report(name: str, client: httpx.Client, server: RunningServer) -> None:
    SERVED[name](reports()[name], client, server)


def test_every_report_is_accounted_for() -> None:
    assert len(reports()) == 79
    assert len(SERVED) + len(ELSEWHERE) + len(NOT_YET) == 79
    assert set(reports()) == {*SERVED, *ELSEWHERE, *NOT_YET}
