"""Entry point of `python -m sametoken`: the command line."""

from sametoken.cli import run

if __name__ == "__main__":
    run()
