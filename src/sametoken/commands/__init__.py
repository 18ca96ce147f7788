"""One module per command: `OPTIONS` says what it takes, `command(argument, values)` runs it and returns the exit code.

The argument is a model unless the module has an `ARGUMENT` that says otherwise.
"""
