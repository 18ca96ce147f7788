"""The options of a server as one list of names, and the names that other tools have for them."""

from __future__ import annotations

from sametoken.options.declaration import Declared, declared
from sametoken.options.engine import EngineConfig, KVCacheConfig, ModelSettings
from sametoken.options.server import ServerConfig
from sametoken.options.speculation import SpeculativeConfig

CACHE = "kv_cache_"  # before the keys of the page pool, whose `max_tokens` is not the request's
GROUPS = ((ModelSettings, ""), (SpeculativeConfig, ""), (EngineConfig, ""), (KVCacheConfig, CACHE), (ServerConfig, ""))
OPTIONS: dict[str, Declared] = {
    prefix + name: option for owner, prefix in GROUPS for name, option in declared(owner).items()
}


def elsewhere(tool: str, group: str = "") -> dict[str, str]:
    """A tool's names of options below a key of its configuration, "" for none, and our names."""
    said = [(each.split(" "), name) for name, option in OPTIONS.items() for each in option.elsewhere]
    paths = [(path.rpartition("."), name) for (owner, path), name in said if owner == tool]
    return {key: name for (above, _, key), name in paths if above == group}
