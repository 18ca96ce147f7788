"""Former location of the settings of engine and server, kept for old imports; see `sametoken.options`."""

from sametoken.options.declaration import Positive, Settings
from sametoken.options.engine import MOST_THREADS, DType, EngineConfig, KVCacheConfig, Quantization
from sametoken.options.server import ServerConfig
from sametoken.options.speculation import METHODS, MODEL_METHODS, Method, SpeculativeConfig

__all__ = [
    "METHODS",
    "MODEL_METHODS",
    "MOST_THREADS",
    "DType",
    "EngineConfig",
    "KVCacheConfig",
    "Method",
    "Positive",
    "Quantization",
    "ServerConfig",
    "Settings",
    "SpeculativeConfig",
]
