"""`python -m sametoken.deploy.dynamo`, in the form of Dynamo's own workers: the command `sametoken deploy dynamo`."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["deploy", "dynamo"]
    runpy.run_module("sametoken.cli", run_name="__main__", alter_sys=True)
