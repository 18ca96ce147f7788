"""sametoken: speculative decoding end to end. The public names, imported on first use.

`import sametoken` takes milliseconds and imports no torch: a name's module is imported on first access.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sametoken.engine.async_llm import AsyncLLM
    from sametoken.engine.completion import Chunk, Completion
    from sametoken.engine.llm import LLM
    from sametoken.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DraftMismatchError,
        EngineError,
        HubError,
        LosslessnessError,
        MemoryPlanError,
        ModelOutputError,
        PromptTooLongError,
        RequestError,
        SametokenError,
        UnsupportedModelError,
    )
    from sametoken.options.engine import KVCacheConfig
    from sametoken.options.sampling import RequestSpeculation, SamplingParams
    from sametoken.options.speculation import SpeculativeConfig

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
    "HubError",
    "KVCacheConfig",
    "LosslessnessError",
    "MemoryPlanError",
    "ModelOutputError",
    "PromptTooLongError",
    "RequestError",
    "RequestSpeculation",
    "SametokenError",
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
    "KVCacheConfig": "options.engine",
    "SpeculativeConfig": "options.speculation",
    "RequestSpeculation": "options.sampling",
    "SamplingParams": "options.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
