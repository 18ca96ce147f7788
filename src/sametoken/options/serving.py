"""All options of a server by name, and their names in other tools."""

from __future__ import annotations

from sametoken.options.declaration import Declared, declared
from sametoken.options.engine import EngineConfig, KVCacheConfig, ModelSettings
from sametoken.options.server import ServerConfig
from sametoken.options.speculation import SpeculativeConfig

CACHE = "kv_cache_"  # prefix of the keys of the KV cache, whose `max_tokens` is not that of a request
GROUPS = ((ModelSettings, ""), (SpeculativeConfig, ""), (EngineConfig, ""), (KVCacheConfig, CACHE), (ServerConfig, ""))
OPTIONS: dict[str, Declared] = {
    prefix + name: option for owner, prefix in GROUPS for name, option in declared(owner).items()
}


def elsewhere(tool: str, group: str = "") -> dict[str, str]:
    """Our names of options, by the names that a tool has for them.

    Args:
        group: key of the tool's configuration that contains the options; "" for the top level.
    """
    names = [(each.split(" "), name) for name, option in OPTIONS.items() for each in option.elsewhere]
    paths = [(path.rpartition("."), name) for (owner, path), name in names if owner == tool]
    return {key: name for (above, _, key), name in paths if above == group}
