"""What users import: the clients of the attention service and what they give and raise.

Nothing else of the service is behind it, and torch only where a caller brings tensors, captures a model, or has a model
of transformers ask the service.
"""

from typing import TYPE_CHECKING, Any

from service.client.answers import Answer, Info, LayerDescription, PathPlan, Plan, ServiceInfo
from service.client.asynchronous import AsyncAttentionClient
from service.client.errors import AttentionServiceError, Fault
from service.client.plot import plot
from service.client.sync import AttentionClient

if TYPE_CHECKING:
    from service.client.capture import capture_attention
    from service.client.hugging_face import register_transformers

__all__ = [
    "Answer",
    "AsyncAttentionClient",
    "AttentionClient",
    "AttentionServiceError",
    "Fault",
    "Info",
    "LayerDescription",
    "PathPlan",
    "Plan",
    "ServiceInfo",
    "capture_attention",
    "plot",
    "register_transformers",
]


def __getattr__(name: str) -> Any:
    # They need torch, which a client does not.
    if name == "capture_attention":
        from service.client.capture import capture_attention

        return capture_attention
    if name == "register_transformers":
        from service.client.hugging_face import register_transformers

        return register_transformers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
