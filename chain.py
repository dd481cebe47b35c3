"""Several commands of the doors as one, finished ones skipped: `python chain.py --help`."""

from specwave.app.door import door

if __name__ == "__main__":
    door("chain")
