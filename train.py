"""Distils EAGLE-3 drafters for groups of layers: `python train.py --help`."""

from specwave.app.door import door

if __name__ == "__main__":
    door("train")
