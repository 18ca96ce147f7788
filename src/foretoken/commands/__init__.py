"""One module per command: `OPTIONS` says what it takes, `command(model, values)` runs it and returns the exit code."""
