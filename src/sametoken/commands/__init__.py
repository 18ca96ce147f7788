"""Commands, one module each: `OPTIONS` are its options; `command(argument, values)` runs it and returns the exit code.

The argument is a model, unless `ARGUMENT` of the module declares another one, or None.
"""
