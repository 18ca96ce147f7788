"""foretoken: speculative decoding end to end. The public names, imported on first use.

`import foretoken` costs milliseconds and no torch: a name's module is imported when the name is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.config import KVCacheConfig, SpeculativeConfig
    from foretoken.engine.async_llm import AsyncLLM
    from foretoken.engine.completion import Chunk, Completion
    from foretoken.engine.llm import LLM
    from foretoken.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DraftMismatchError,
        EngineError,
        ForetokenError,
        HubError,
        LosslessnessError,
        MemoryPlanError,
        PromptTooLongError,
        RequestError,
        UnsupportedModelError,
    )
    from foretoken.speculation.params import RequestSpeculation, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "Chunk",
    "Completion",
    "ConfigError",
    "DataError",
    "DraftMismatchError",
    "EngineError",
    "ForetokenError",
    "HubError",
    "KVCacheConfig",
    "LosslessnessError",
    "MemoryPlanError",
    "PromptTooLongError",
    "RequestError",
    "RequestSpeculation",
    "SamplingParams",
    "SpeculativeConfig",
    "UnsupportedModelError",
    "__version__",
]

_HOMES = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.async_llm",
    "Chunk": "engine.completion",
    "Completion": "engine.completion",
    "KVCacheConfig": "config",
    "SpeculativeConfig": "config",
    "RequestSpeculation": "speculation.params",
    "SamplingParams": "speculation.params",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
