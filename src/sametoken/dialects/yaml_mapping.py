"""Reader of YAML texts that are mappings of keys to values, each key once."""

from __future__ import annotations

from typing import Any

import yaml

from sametoken.errors import ConfigError

MOST_CHARACTERS = 2**18  # of a text: PyYAML reads about 400,000 a second


class _Once(yaml.SafeLoader):  # type: ignore[misc]
    """YAML loader that refuses a key that occurs twice; `yaml.SafeLoader` would use the last value."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"the key {key.value!r} occurs twice, again in line {line}; remove one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_mapping(text: str, name: str, example: str) -> dict[Any, Any]:
    """Mapping of a YAML text, {} for an empty one.

    Args:
        name: name of the file, for messages.
        example: a key with its value, as an example in messages.

    Raises:
        ConfigError: the text is too long, no YAML or no mapping, or a key occurs twice.
    """
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"{name} has {len(text)} characters, expected at most {MOST_CHARACTERS} of settings; is it another file?"
        )
    try:
        stated = yaml.load(text, _Once)
    except ConfigError as error:
        raise error.about(name) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise ConfigError(f"{name} is not YAML: {error}") from error
    if stated is None:
        return {}
    if not isinstance(stated, dict):
        raise ConfigError(f"{name} is a {type(stated).__name__}, expected keys with values, as in {example}")
    return stated
