"""The capture itself: who made a call, what is computed of it and by whom, and what is said at the end."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from attn_core import AttentionProblem, Engine
from service.client.capture.blind_spots import GENERAL, blind_spots
from service.client.capture.calls import Captured, CapturedCall
from service.client.capture.interception import apart_from_the_model, listening, without_autocast
from service.client.capture.seen import Posed, SeenCall, pose

Keep = Literal["weights", "top_weights", "entropy", "none"]
Threads = Literal["own", "all"]
DEFAULT_TOP_K = 8


class Attends(Protocol):
    """Anything with the method ``attention`` of ``AttentionClient``."""

    @property
    def attention(self) -> Callable[..., Any]: ...


class NothingCaptured(RuntimeError):
    """The capture ended and had seen no attention."""


class IncompleteCapture(UserWarning):
    """The model has what a capture cannot see, or calls that nothing could be computed of."""


@contextmanager
def capture_attention(
    model: nn.Module | None = None,
    keep: Keep = "weights",
    to: Attends | None = None,
    *,
    top_k: int | None = None,
    threads: Threads = "own",
) -> Iterator[Captured]:
    """Catches every attention that runs inside; see the package for what that means.

    ``model`` gives calls their names. ``keep`` says what is computed of each: all weights (memory of queries times keys
    for each head and call, on the query's device), the ``top_k`` largest of each row (8 where nothing is said), the
    entropy of each row, or nothing besides shapes and options. It is computed here, by the core, or by ``to``, a
    client of the service, to which query, key and value of each call are sent.

    ``threads`` "own": calls of this thread, and those counted that others made; "all": every thread's, each with the
    thread's name. Captures inside captures each get every call. Within asyncio, what other tasks compute while this
    one awaits is caught as well.

    What cannot be computed (the core refuses it, memory is short, the service is away) is a call with its ``refusal``;
    the model never fails of it. Dropout makes the model's numbers random: weights are computed without, and say so.

    Raises: NothingCaptured at the end if no call came, unless the body raised. Warns: IncompleteCapture.
    """
    if keep not in get_args(Keep):
        raise ValueError(f"keep: expected one of {', '.join(get_args(Keep))}, received {keep!r}")
    if threads not in get_args(Threads):
        raise ValueError(f"threads: expected one of {', '.join(get_args(Threads))}, received {threads!r}")
    if top_k is not None and keep != "top_weights":
        raise ValueError(f"top_k: says nothing where keep is {keep!r}")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int)):
        raise TypeError(f"top_k: expected a whole number, received {top_k!r}")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, received {type(model).__name__}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1, received {top_k}")
    asked = _Asked(keep, (top_k or DEFAULT_TOP_K) if keep == "top_weights" else None)
    compute = _Here().compute if to is None else functools.partial(_computed_by, _checked(to))
    captured = Captured()
    taking = _Taking(captured, asked, compute, _Names(model), threads)
    with listening(taking.take):
        yield captured
    captured.unseen = (*taking.unseen, *(blind_spots(model) if model is not None else ()))
    if not captured:
        known = "".join(f"\n  here: {text}" for text in captured.unseen)
        general = "".join(f"\n  {text}" for text in GENERAL)
        raise NothingCaptured(f"no attention was caught.{known}\nA capture cannot see:{general}")
    said = [f"not seen: {text}" for text in captured.unseen]
    if refused := captured.refused:
        what = "numbers" if keep == "none" else keep
        reason = (refused[0].refusal or "").partition("\n")[0]
        said.append(f"{len(refused)} of {len(captured)} calls have no {what}, the first since: {reason}")
    if said:
        warnings.warn("; ".join(said), IncompleteCapture, stacklevel=3)


@dataclass(frozen=True, slots=True)
class _Asked:
    keep: Keep
    top_k: int | None

    @property
    def outputs(self) -> tuple[str, ...]:
        return () if self.keep == "none" else (self.keep,)


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    outputs: Mapping[str, Tensor]
    path: str
    empty_rows: int
    notes: tuple[str, ...] = ()


Compute = Callable[[AttentionProblem], _Computed]


class _Taking:
    """Takes calls as they are told, on whichever thread, into one ``Captured``."""

    def __init__(self, captured: Captured, asked: _Asked, compute: Compute, names: _Names, threads: Threads) -> None:
        self._captured = captured
        self._asked = asked
        self._compute = compute
        self._names = names
        self._threads = threads
        self._own_thread = threading.get_ident()
        self._of_others = 0
        self._lock = threading.Lock()

    def take(self, seen: SeenCall) -> None:
        if self._threads == "own" and threading.get_ident() != self._own_thread:
            with self._lock:
                self._of_others += 1
            return
        name = self._names.of(seen)
        found, refusal = self._found(seen)
        make = functools.partial(
            CapturedCall,
            thread=threading.current_thread().name,
            function=seen.function,
            query_shape=_shape(seen.query),
            key_shape=_shape(seen.key),
            value_shape=_shape(seen.value),
            dtype=seen.query.dtype,
            device=seen.query.device,
            mask=None if seen.attn_mask is None else "bool" if seen.attn_mask.dtype == torch.bool else "float",
            mask_shape=None if seen.attn_mask is None else _shape(seen.attn_mask),
            is_causal=seen.is_causal,
            scale=seen.scale,
            enable_gqa=seen.enable_gqa,
            dropout_p=seen.dropout_p,
            lengths=seen.lengths,
            in_backward=torch._C._current_graph_task_id() != -1,
            outputs={} if found is None else found.outputs,
            path=None if found is None else found.path,
            empty_rows=None if found is None else found.empty_rows,
            refusal=refusal,
            notes=(*_notes(seen), *(() if found is None else found.notes)),
        )
        with self._lock:
            self._captured.add(make, name)

    def _found(self, seen: SeenCall) -> tuple[_Computed | None, str | None]:
        """What is kept of a call, or why that could not be; neither where nothing is asked."""
        if seen.unreadable is not None:
            return None, seen.unreadable
        if self._asked.keep == "none":
            return None, None
        try:
            with apart_from_the_model(), without_autocast(seen.query.device.type):
                posed = pose(seen.detached(), self._asked.outputs, top_k=self._asked.top_k)
                if seen.own_weights is not None and self._asked.keep == "weights":
                    found = _own(seen.own_weights, posed)
                else:
                    found = self._compute(posed.problem)
                outputs = {name: _outside_inference(posed.in_callers_rank(t)) for name, t in found.outputs.items()}
        except Exception as error:
            # The one place for whatever can go wrong beside a model, which is never to notice.
            return None, f"{type(error).__name__}: {error}"
        return _Computed(outputs, found.path, found.empty_rows, found.notes), None

    @property
    def unseen(self) -> tuple[str, ...]:
        if not self._of_others:
            return ()
        return (f"{self._of_others} calls of other threads, which threads='all' takes",)


class _Names:
    """The names of a model's modules, for the calls that they make.

    A call belongs to the innermost method of a module on the stack. Not asked by hooks: a module that has one leaves
    its fast path, and compiled code is compiled again.
    """

    def __init__(self, model: nn.Module | None) -> None:
        modules = {} if model is None else dict(model.named_modules())
        # They are alive as long as this is, so no other object has their identity.
        self._modules: dict[int, tuple[str, nn.Module]] = {
            id(module): (name, module) for name, module in modules.items()
        }
        self._owners: dict[int, tuple[str, Tensor]] = {}
        for name, module in modules.items():
            for own, parameter in module.named_parameters(recurse=False):
                if own == "in_proj_weight":
                    self._owners.setdefault(id(parameter), (name, parameter))

    def of(self, seen: SeenCall) -> str | None:
        if not self._modules:
            return None
        if seen.owner is not None and id(seen.owner) in self._owners:
            return self._owners[id(seen.owner)][0]
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            # Locals are read of methods alone: in old Pythons that keeps them alive until the frame ends.
            if code.co_argcount and code.co_varnames[0] == "self":
                found = self._modules.get(id(frame.f_locals.get("self")))
                if found is not None:
                    return found[0]
            frame = frame.f_back
        return None


class _SteadyEngine(Engine):
    """The core's engine, which leaves torch's number of threads as it is: the model's numbers depend on it."""

    def _use_threads(self, flops: int) -> None:
        return


class _Here:
    """Computes in this process, on the device of the tensors; an engine for each thread and device."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def compute(self, problem: AttentionProblem) -> _Computed:
        """Raises: AttentionError, and whatever torch raises where memory is short."""
        result = self._engine(problem.query.device).attend(problem)
        return _Computed(result.outputs, result.path, result.empty_rows)

    def _engine(self, device: torch.device) -> Engine:
        engines: dict[torch.device, Engine] = vars(self._of_thread).setdefault("engines", {})
        # Devices that the core does not know send their tensors to the host and get them back.
        place = device if device.type == "cuda" else torch.device("cpu")
        if place not in engines:
            allows_cudnn = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
            engines[place] = _SteadyEngine(device=place)
            # The engine switches it off for itself, and with it for the model; weights never come from there.
            torch.backends.cuda.enable_cudnn_sdp(allows_cudnn)
        return engines[place]


def _checked(to: Attends) -> Attends:
    """Raises: TypeError for what cannot be asked and waited for in the midst of a model."""
    if not callable(getattr(to, "attention", None)):
        raise TypeError(f"to: expected a client with the method attention, received {type(to).__name__}")
    if inspect.iscoroutinefunction(to.attention) or (hasattr(to, "__aenter__") and not hasattr(to, "__enter__")):
        raise TypeError(f"to: expected a client that waits, such as AttentionClient, received {type(to).__name__}")
    return to


def _computed_by(client: Attends, problem: AttentionProblem) -> _Computed:
    """Raises: whatever the client does."""
    options = problem.options
    given: dict[str, Any] = {name: t for name, t in problem.tensors().items() if name != "query"}
    if options.causal is not False:
        given["causal"] = options.causal
    if options.scale is not None:
        given["scale"] = options.scale
    if options.top_k is not None:
        given["select"] = {"top_k": options.top_k}
    answer = client.attention(problem.query, outputs=list(options.outputs), **given)
    names = ("top_weights", "top_keys") if "top_weights" in options.outputs else options.outputs
    outputs = {name: torch.as_tensor(getattr(answer, name)) for name in names}
    return _Computed(outputs, answer.info.path, answer.info.empty_rows)


def _own(weights: Tensor, posed: Posed) -> _Computed:
    """The model's own weights, copied: the model hands them on, and whoever gets them may write into them."""
    empty_rows = posed.count_empty_rows()
    notes = ("the model's own weights: NaN in the rows that may attend no key",) if empty_rows else ()
    return _Computed({"weights": weights.detach().clone()}, "model", empty_rows, notes)


def _outside_inference(tensor: Tensor) -> Tensor:
    """A tensor that can take part in anything; those of inference mode cannot, and the engine's are such."""
    with torch.inference_mode(False):
        return tensor.clone() if tensor.is_inference() else tensor


def _notes(seen: SeenCall) -> tuple[str, ...]:
    notes = []
    if seen.dropout_p > 0:
        notes.append(
            f"the model drops out {seen.dropout_p:g} of its weights at random: what is kept is without dropout"
        )
    if seen.is_causal and seen.query.ndim >= 2 and seen.query.shape[-2] != seen.key.shape[-2]:
        notes.append("is_causal with other numbers of queries and keys: query i sees keys up to i, as torch has it")
    return tuple(notes)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Of a nested tensor, which has none, what torch says of its axes: -1 where they differ."""
    if tensor.is_nested:
        return tuple(tensor.size(axis) if _is_regular(tensor, axis) else -1 for axis in range(tensor.ndim))
    return tuple(tensor.shape)


def _is_regular(tensor: Tensor, axis: int) -> bool:
    try:
        return isinstance(tensor.size(axis), int)
    except RuntimeError:
        return False
