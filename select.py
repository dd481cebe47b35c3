"""Chooses the layers of a target that a drafter should see: `python select.py --help`.

Python puts a script's folder first on its search path, so for every script of this folder this file hides the
standard library's `select` wherever that one is an extension file (subprocess, sockets and asyncio need it).
Imported as `select` it therefore steps aside: it finds the real module and puts it in its own place.
"""

if __name__ == "select":
    import os
    import sys
    from importlib.machinery import BuiltinImporter, PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.realpath(__file__))
    elsewhere = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != here]
    spec = BuiltinImporter.find_spec("select") or PathFinder.find_spec("select", elsewhere)
    if spec is None or spec.loader is None:
        raise ImportError("the standard library's module select is missing")
    real = module_from_spec(spec)
    sys.modules["select"] = real  # before it runs: the import system hands out what stands here afterwards
    spec.loader.exec_module(real)

elif __name__ == "__main__":
    from specwave.app.door import door

    door("select")
