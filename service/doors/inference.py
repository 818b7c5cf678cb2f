"""What the two doors of the Open Inference Protocol have in common: models, statistics, shared memory, one use case.

``open_inference`` (REST) and ``rpc`` (gRPC) read and write; what happens between is here, once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attn_core.errors import MAX_FAULTS, InvalidProblem
from attn_core.prepared import Prepared
from service.attend import Attend
from service.deadline import Deadline
from service.doors.answers import count_answer, info_of
from service.errors import NotServed, ServiceError
from service.failures import INTERNAL, Failure, failure_of
from service.lifecycle import Lifecycle
from service.request_queue import Answer
from service.shared_memory import MappedPart, SharedMemory
from service.statistics import Statistics
from service.telemetry import Metrics
from service.wire.inference import (
    CheckedInference,
    InferenceRequest,
    MemoryPlace,
    ParameterValue,
    RequestedOutput,
    check,
    check_places,
    response_parameters,
)
from service.wire.inference_models import VERSION, Model, Models
from service.wire.requests import ReadLimits
from service.wire.tensors import bytes_of

SERVER_NAME = "attn"
BASE_EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)
FAILED = frozenset({"internal", "deadline", "queue-timeout"})
"""What counts as a failed inference; a refusal counts nowhere."""
SHARED_MEMORY_EXTENSION = "system_shared_memory"
MAX_ERROR_CHARACTERS = 4000
"""An error is one text here; over gRPC it travels in a header, and clients refuse headers of over 8 KiB."""


@dataclass(frozen=True, slots=True)
class InferenceAnswer:
    """What either door writes: each asked output with its numbers, which lie in shared memory already where it has a
    ``place``; ``parameters`` are those of the answer."""

    model: Model
    id: str | None
    parameters: dict[str, ParameterValue]
    outputs: list[tuple[RequestedOutput, Tensor]]
    answer: Answer


class Inference:
    """Shared by both doors; used from the event loop."""

    def __init__(
        self,
        *,
        attend: Attend,
        lifecycle: Lifecycle,
        metrics: Metrics,
        models: Models,
        statistics: Statistics,
        shared_memory: SharedMemory,
        read_limits: ReadLimits,
        default_timeout_s: float,
        version: str,
    ) -> None:
        self.lifecycle = lifecycle
        self.metrics = metrics
        self.models = models
        self.statistics = statistics
        self.shared_memory = shared_memory
        self.read_limits = read_limits
        self._attend = attend
        self._default_timeout_s = default_timeout_s
        self._version = version

    # What the service says of itself

    def server_metadata(self) -> dict[str, Any]:
        """As GET /v2 answers. Only what is served is announced."""
        extensions = [*BASE_EXTENSIONS, *([SHARED_MEMORY_EXTENSION] if self.shared_memory.is_enabled else [])]
        return {"name": SERVER_NAME, "version": self._version, "extensions": sorted(extensions)}

    def index(self, *, ready_only: bool = False) -> list[dict[str, str]]:
        """As POST /v2/repository/index answers."""
        is_ready = self.lifecycle.is_ready
        if ready_only and not is_ready:
            return []
        state = {"state": "READY"} if is_ready else {"state": "UNAVAILABLE", "reason": self.lifecycle.state.value}
        return [{"name": name, "version": VERSION, **state} for name in self.models.names()]

    def model_statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """As GET /v2/models[/M]/stats answers; without a name all of them. Raises: NotFound."""
        names = [self.models.get(name, version).name] if name else self.models.names()
        return {"model_stats": [self.statistics.of(each).as_dict(name=each, version=VERSION) for each in names]}

    def check_shared_memory(self, *, is_loopback: bool) -> None:
        """Raises: NotServed where the extension is switched off, or for a caller on another machine."""
        if not self.shared_memory.is_enabled:
            raise NotServed("shared memory is switched off: ATTN_SHARED_MEMORY=true switches it on")
        if not is_loopback:
            raise NotServed("shared memory is for callers on this machine, connected by its loopback address")

    # Inference

    def check_room(self) -> None:
        """What can be told before a body is read. Raises: Draining, Unavailable, Overloaded."""
        self.lifecycle.check_open()
        self._attend.check_room()

    async def infer(
        self,
        request: InferenceRequest,
        model: Model,
        *,
        began: float,
        remaining_s: float | None = None,
        is_loopback: bool = False,
        takes_reserved: bool = False,
        more_bytes: Callable[[CheckedInference, Prepared], int],
        held: Any = None,
        is_alone: bool = True,
    ) -> InferenceAnswer:
        """Check a request, have it computed, put into shared memory what belongs there.

        ``began`` is when it arrived, on the monotonic clock; ``remaining_s`` what its caller waits at most from now.
        ``more_bytes`` gives what the written answer takes besides the outputs, and may refuse an answer that cannot be
        sent; ``held`` keeps alive what the inputs lie in; ``is_alone`` as for ``Attend.begin``.

        Raises: InvalidProblem, NotFound, NotServed, and as ``Attend.attend``.
        """
        with contextlib.ExitStack() as stack:
            places = self._resolve(request, model, stack, is_loopback=is_loopback)
            checked = check(request, model, self.read_limits, takes_reserved=takes_reserved)
            deadline = self._deadline(checked.timeout_s, began, remaining_s)
            answer = await self._attend.attend(
                checked.problem,
                deadline,
                answer_bytes=lambda prepared: more_bytes(checked, prepared),
                held=(held, places),
                max_queue_s=checked.queue_timeout_s,
                is_alone=is_alone,
            )
            count_answer(self.metrics, answer)
            outputs = [(output, answer.result.outputs[output.name]) for output in checked.outputs]
            placed = [(places[output.place], output.name, tensor) for output, tensor in outputs if output.place]
            for part, name, tensor in placed:
                # All of them first: where one does not fit, none is written.
                part.check_fits(tensor.nbytes, name=name)
            for part, name, tensor in placed:
                part.write(bytes_of(tensor), name=name)
        return InferenceAnswer(
            model=model,
            id=checked.id,
            parameters=response_parameters(info_of(answer), checked.ignored),
            outputs=outputs,
            answer=answer,
        )

    async def infer_plain(
        self,
        prepared: Prepared,
        model: Model,
        *,
        id: str | None,
        ignored: Sequence[str],
        began: float,
        remaining_s: float | None = None,
        held: Any = None,
        is_alone: bool = True,
    ) -> InferenceAnswer:
        """The same for a request that is known to be a plain one, checked and prepared once for all like it.

        Raises: as ``Attend.attend_prepared``.
        """
        deadline = self._deadline(None, began, remaining_s)
        answer = await self._attend.attend_prepared(prepared, deadline, more_bytes=0, held=held, is_alone=is_alone)
        count_answer(self.metrics, answer)
        return InferenceAnswer(
            model=model,
            id=id,
            parameters=response_parameters(info_of(answer), ignored),
            outputs=[(RequestedOutput("context", is_binary=True), answer.result.outputs["context"])],
            answer=answer,
        )

    def _deadline(self, timeout_s: float | None, began: float, remaining_s: float | None) -> Deadline:
        at = began + (self._default_timeout_s if timeout_s is None else timeout_s)
        return Deadline(at if remaining_s is None else min(at, time.monotonic() + remaining_s))

    def _resolve(
        self, request: InferenceRequest, model: Model, stack: contextlib.ExitStack, *, is_loopback: bool
    ) -> dict[MemoryPlace, MappedPart]:
        """Inputs that are places become buffers; the places of outputs are looked up. Raises: NotServed, NotFound,
        InvalidProblem for a place outside its region."""
        places: dict[MemoryPlace, MappedPart] = {}
        for given in request.inputs:
            if isinstance(given.content, MemoryPlace):
                self.check_shared_memory(is_loopback=is_loopback)
        # Nothing is read, or copied, that is refused for its name, its shape or its size.
        check_places(request, model)
        for given in request.inputs:
            if isinstance(given.content, MemoryPlace):
                part = self._part(given.content, places, stack, is_loopback=is_loopback)
                given.content, given.is_shared = part.read(name=given.name), True
        for output in request.outputs:
            if output.place is not None:
                self._part(output.place, places, stack, is_loopback=is_loopback)
        return places

    def _part(
        self,
        place: MemoryPlace,
        places: dict[MemoryPlace, MappedPart],
        stack: contextlib.ExitStack,
        *,
        is_loopback: bool,
    ) -> MappedPart:
        self.check_shared_memory(is_loopback=is_loopback)
        if place not in places:
            places[place] = stack.enter_context(self.shared_memory.part(place))
        return places[place]

    def answered(self, answer: InferenceAnswer, *, began: float, input_s: float, output_s: float) -> None:
        """Count a request that was answered: reading took ``input_s`` and writing ``output_s``.

        One of a layer that was deleted meanwhile counts nowhere, as its figures are gone.
        """
        if not self.models.has(answer.model.name):
            return
        self.statistics.succeeded(
            answer.model.name,
            total_s=time.monotonic() - began,
            queue_s=answer.answer.queue_s,
            input_s=input_s,
            infer_s=answer.answer.compute_s,
            output_s=output_s,
        )

    def failed(self, model: Model, error: BaseException, *, began: float) -> None:
        """Count a request that was taken and not answered; refusals count nowhere."""
        if failure_of(error).name in FAILED and self.models.has(model.name):
            self.statistics.failed(model.name, total_s=time.monotonic() - began)


def error_text(error: BaseException, request_id: str) -> tuple[Failure, str]:
    """An error as its row of the table and as the one text that this protocol has for it, cut where it gets long."""
    failure = failure_of(error)
    if failure is INTERNAL:
        return failure, f"this is a mistake of the server; its log names request {request_id}"
    if isinstance(error, InvalidProblem):
        count = len(error.faults) if len(error.faults) < MAX_FAULTS else f"at least {MAX_FAULTS}"
        text = f"{count} fault{'' if count == 1 else 's'}: " + "; ".join(str(fault) for fault in error.faults)
    elif isinstance(error, ServiceError) and error.faults:
        text = "; ".join(str(fault) for fault in error.faults)
    else:
        text = str(error)
    return failure, text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 1] + "…"
