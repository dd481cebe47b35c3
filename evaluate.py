"""Measures decoding methods against plain decoding: `python evaluate.py --help`."""

from specwave.app.door import door

if __name__ == "__main__":
    door("evaluate")
