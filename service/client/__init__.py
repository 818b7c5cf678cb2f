"""What users import: the clients of the attention service and what they give and raise.

Nothing else of the service is behind it, and torch only where a caller brings tensors or captures a model.
"""

from typing import TYPE_CHECKING, Any

from service.client.answers import Answer, Info, LayerDescription, PathPlan, Plan, ServiceInfo
from service.client.asynchronous import AsyncAttentionClient
from service.client.errors import AttentionServiceError, Fault
from service.client.sync import AttentionClient

if TYPE_CHECKING:
    from service.client.capture import capture_attention

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
]


def __getattr__(name: str) -> Any:
    # It needs torch, which a client does not.
    if name == "capture_attention":
        from service.client.capture import capture_attention

        return capture_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
