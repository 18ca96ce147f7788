"""Every option once: type, limits, default, help and the names that other tools have for it."""
