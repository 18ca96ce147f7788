"""Translation of configurations of other servers into settings of this one, as pure functions of data."""
