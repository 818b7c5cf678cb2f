"""`attn ask` and `attn layer` for gradients, layers, plans and verification, against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from service.ask import Refused, ask
from service.cli import app
from service.plan_command import plan
from tests.support.bodies import list_body, safetensors_body
from tests.support.golden import GoldenCase, disagreement, golden_cases
from tests.support.server import RunningServer, server_environment

LAYER = "cli.layer-1"
LAYER_CASES = {case.name: case for case in golden_cases("layer")}
GRADIENT_CASES = [case for case in golden_cases("attention") if case.gradients]
QKV = ["query=float32[1,4,8,16]", "key=float32[1,2,8,16]", "value=float32[1,2,8,16]"]


def written(folder: Path, form: str, tensors: dict[str, Tensor], options: dict[str, Any]) -> str:
    file = folder / f"problem.{form}"
    match form:
        case "json":
            file.write_bytes(list_body(tensors, options))
        case "safetensors":
            file.write_bytes(safetensors_body(tensors, options))
        case "npz":
            np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})  # type: ignore[arg-type]
    return str(file)


def words_of(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in ("-o", f"{name}={json.dumps(value)}")]


def run(server: RunningServer, *words: str, **variables: str) -> Result:
    environment = {"ATTN_URL": server.url, "ATTN_CLIENT_KEY": "", "COLUMNS": "200"} | variables
    return CliRunner().invoke(app, [*words], env=environment)


def answered(server: RunningServer, folder: Path, *words: str) -> dict[str, Tensor]:
    """What a command saves."""
    saved = folder / "answer.safetensors"
    done = run(server, "ask", *words, "--save", str(saved))
    assert (done.exit_code, done.stderr) == (0, ""), done.stderr
    # Not load_file: its tensors are the file itself, which the next answer overwrites.
    outputs: dict[str, Tensor] = safetensors.torch.load(saved.read_bytes())
    return outputs


def without_gradients(case: GoldenCase) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in case.tensors.items() if not name.startswith("grad_")}


def parts_of(case: GoldenCase) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """A layer's weights, the rest of its tensors; the options of the weights, the rest of the options."""
    weights = {name: tensor for name, tensor in case.tensors.items() if name[:2] in ("w_", "b_")}
    rest = {name: tensor for name, tensor in case.tensors.items() if name not in weights}
    reading = ("num_heads", "num_kv_heads", "weight_layout")
    kept: dict[str, Any] = {name: case.options[name] for name in reading if name in case.options}
    return weights, rest, kept, {name: value for name, value in case.options.items() if name not in kept}


def assert_golden(outputs: dict[str, Tensor], case: GoldenCase, names: tuple[str, ...]) -> None:
    assert set(names) <= outputs.keys()
    wrong = {name: disagreement(outputs[name], case.expected[name], case.tolerance[name]) for name in names}
    assert not any(wrong.values()), wrong


def lasting(planned: dict[str, Any]) -> dict[str, Any]:
    """A plan without what changes from one moment to the next: free memory and the pace of the machine."""
    paths = {
        path: {n: said for n, said in figures.items() if n != "estimated_ms"}
        for path, figures in planned["paths"].items()
    }
    kept = ("admitted", "why", "path", "answer_bytes", "needed_bytes")
    return {name: planned[name] for name in kept} | {"paths": paths}


@pytest.fixture
def kept_layer(server: RunningServer, tmp_path: Path) -> Iterator[GoldenCase]:
    """A layer that the service keeps as ``LAYER``, put there by the command."""
    case = LAYER_CASES["layer_grad_biases"]
    weights, _, options, _ = parts_of(case)
    file = written(tmp_path, "npz", weights, {})
    done = run(server, "layer", "put", LAYER, file, *words_of(options))
    assert (done.exit_code, done.stderr, done.stdout.splitlines()[0]) == (0, "", f"keeps {LAYER}")
    yield case
    run(server, "layer", "delete", LAYER)


@pytest.mark.parametrize("form", ["json", "npz", "safetensors"])
@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_gradients_from_files_are_the_golden_ones(
    server: RunningServer, tmp_path: Path, case: GoldenCase, form: str
) -> None:
    file = written(tmp_path, form, case.tensors, {})
    outputs = answered(server, tmp_path, "--gradients", file, *words_of(case.options))
    assert_golden(outputs, case, case.gradients)


@pytest.mark.parametrize("form", ["json", "npz", "safetensors"])
@pytest.mark.parametrize("case", LAYER_CASES.values(), ids=str)
def test_layers_from_files_are_the_golden_ones(
    server: RunningServer, tmp_path: Path, case: GoldenCase, form: str
) -> None:
    if form == "json" and case.tensors["w_query"].numel() > 10_000:
        form = "safetensors"
    file = written(tmp_path, form, without_gradients(case), {})
    words = [*words_of(case.options), "--outputs", ",".join(case.forward_outputs)]
    assert_golden(answered(server, tmp_path, "--layer", file, *words), case, case.forward_outputs)
    if case.gradients:
        file = written(tmp_path, form, case.tensors, {})
        outputs = answered(server, tmp_path, "--layer", "--gradients", file, *words_of(case.options))
        assert_golden(outputs, case, case.gradients)


def test_a_kept_layer_answers_with_the_bits_of_the_one_that_is_sent(
    server: RunningServer, tmp_path: Path, kept_layer: GoldenCase
) -> None:
    _, rest, _, options = parts_of(kept_layer)
    for flags in ([], ["--gradients"]):
        tensors = kept_layer.tensors if flags else without_gradients(kept_layer)
        whole = written(tmp_path, "safetensors", tensors, kept_layer.options)
        sent = answered(server, tmp_path, "--layer", whole, *flags)
        short = written(tmp_path, "npz", {n: t for n, t in rest.items() if flags or not n.startswith("grad_")}, {})
        by_name = answered(server, tmp_path, "--layer-name", LAYER, short, *flags, *words_of(options))
        assert sent.keys() == by_name.keys() and len(sent) == (len(kept_layer.gradients) if flags else 1)
        assert all(torch.equal(sent[name], by_name[name]) for name in sent)


def test_layers_are_listed_shown_replaced_and_deleted(
    server: RunningServer, tmp_path: Path, kept_layer: GoldenCase
) -> None:
    weights, _, options, _ = parts_of(kept_layer)
    columns, *rows = run(server, "layer", "list").stdout.splitlines()
    (row,) = [row.split() for row in rows if row.split()[0] == LAYER]
    shown = dict(zip(columns.split(), row, strict=True))
    assert shown["weight_layout"] == "in_out" and shown["num_heads"] == str(options["num_heads"])
    lines = [line.strip().split(maxsplit=1) for line in run(server, "layer", "get", LAYER).stdout.splitlines()]
    assert ["w_query", str(list(weights["w_query"].shape))] in lines and ["name", LAYER] in lines
    assert ["parameters", f"{sum(tensor.numel() for tensor in weights.values()):,}"] in lines

    same = run(server, "layer", "put", LAYER, written(tmp_path, "npz", weights, {}), *words_of(options))
    assert same.stdout.startswith(f"{LAYER} was there already")
    other = written(tmp_path, "safetensors", weights | {"w_query": weights["w_query"] + 1}, options)
    refused = run(server, "layer", "put", LAYER, other)
    assert (refused.exit_code, refused.stdout) == (1, "") and refused.stderr.startswith("409 ")
    replaced = run(server, "layer", "put", LAYER, other, "--replace")
    assert (replaced.exit_code, replaced.stderr) == (0, "") and replaced.stdout.startswith(f"keeps {LAYER}\n")

    deleted = run(server, "layer", "delete", LAYER)
    assert (deleted.exit_code, deleted.stdout, deleted.stderr) == (0, f"deleted {LAYER}\n", "")
    for command in ("get", "delete"):
        gone = run(server, "layer", command, LAYER)
        assert (gone.exit_code, gone.stdout) == (1, "") and gone.stderr.startswith("404 ")


def test_a_layer_that_cannot_be_kept_is_refused_with_its_faults(server: RunningServer, tmp_path: Path) -> None:
    weights, _, options, _ = parts_of(LAYER_CASES["layer_causal"])
    file = written(tmp_path, "npz", weights, {})
    done = run(server, "layer", "put", "stats", file, *words_of(options))
    assert (done.exit_code, done.stdout) == (1, "") and done.stderr.startswith("422 ")
    done = run(server, "layer", "put", LAYER, file, "-o", "num_heads=3")
    assert done.exit_code == 1 and "weight_layout" in done.stderr


@pytest.mark.parametrize("form", ["json", "npz", "safetensors"])
def test_a_plan_of_files_is_the_plan_of_their_shapes(server: RunningServer, tmp_path: Path, form: str) -> None:
    tensors = {"query": torch.zeros(1, 4, 8, 16), "key": torch.zeros(1, 2, 8, 16), "value": torch.zeros(1, 2, 8, 16)}
    given: dict[str, Any] = {"path": "/v1/attention/plan", "outputs": None, "save": None, "options": ["causal=true"]}
    of_files = plan([written(tmp_path, form, tensors, {})], url=server.url, **given)
    of_words = plan(QKV, url=server.url, **given)
    assert lasting(of_files) == lasting(of_words) and of_files["admitted"] is True
    _, info = ask([written(tmp_path, form, tensors, {})], url=server.url, **given | {"path": "/v1/attention"})
    assert (info["path"], info["flops"]) == (of_files["path"], of_files["paths"][of_files["path"]]["flops"])


def test_a_plan_is_shown_for_problems_that_fit_and_for_one_that_does_not(server: RunningServer) -> None:
    done = run(server, "ask", "--plan", *QKV, "-o", "causal=true")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("admitted by the ")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert rows["fused"][0] == rows["manual"][0] == rows["blocked"][0] == "yes" and rows["max_seq_len"]

    gradients = run(server, "ask", "--plan", *QKV, "grad_context=float32[1,4,8,16]")
    assert (gradients.exit_code, gradients.stderr) == (0, "")

    huge = [f"{name}=float32[1,8,1000000,64]" for name in ("query", "key", "value")]
    done = run(server, "ask", "--plan", *huge, "--outputs", "weights")
    assert (done.exit_code, done.stderr) == (0, "") and done.stdout.startswith("not admitted")


def test_a_plan_of_what_cannot_be_computed_is_refused(server: RunningServer) -> None:
    with pytest.raises(Refused) as caught:
        plan(
            [*QKV[:2], "value=float32[1,2,9,16]"],
            url=server.url,
            path="/v1/attention/plan",
            options=["is_casual=true"],
            outputs=None,
            save=None,
        )
    assert {fault["field"] for fault in caught.value.problem["errors"]} == {"value", "is_casual"}


def test_verify_shows_how_far_the_answer_is_from_float64(server: RunningServer, tmp_path: Path) -> None:
    case = LAYER_CASES["layer_causal"]
    file = written(tmp_path, "safetensors", case.tensors, case.options)
    done = run(server, "ask", "--layer", file, "--verify")
    assert (done.exit_code, done.stderr) == (0, "")
    info = dict(line.strip().split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(" max_"))
    assert 0 <= float(info["max_abs_error"]) < 1e-5 and 0 <= float(info["max_rel_error"]) < 1e-5


def test_the_command_itself_keeps_a_layer_and_asks_it(server: RunningServer, tmp_path: Path) -> None:
    case = LAYER_CASES["worked_two_head_causal_layer"]
    weights, rest, options, more = parts_of(case)
    attn = str(Path(sys.executable).parent / "attn")
    put = ["layer", "put", "cli.worked", written(tmp_path, "safetensors", weights, options)]
    asked = written(tmp_path, "npz", {"input": rest["input"]}, {})
    for words, said in (
        (put, "keeps cli.worked"),
        (["ask", "--layer-name", "cli.worked", asked, *words_of(more)], "output "),
        (["layer", "delete", "cli.worked"], "deleted cli.worked"),
    ):
        done = subprocess.run(
            [attn, *words],
            env=server_environment(ATTN_URL=server.url),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(said)
