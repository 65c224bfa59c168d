"""Loaded by every Python of the peer when it starts: the progress threads of its NIXL agents sleep between polls.

The Python wrapper of NIXL 1.5.1 sets a delay of 0 and offers no way to another one: a thread that spins, which on a machine
of two cores takes half a core from the model. Nothing else of the peer is changed. (Standard library only: this runs before
anything.)
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys

#: Module that makes agents, and how long their progress threads sleep at most between polls, in microseconds.
MODULE = "nixl_cu13._api"
PROGRESS_DELAY_US = 10_000


class _Patient(importlib.abc.MetaPathFinder):
    """Finds MODULE once, as it would have been found, and wraps what makes agents in it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                _wrap(module.nixlBind)

            spec.loader.exec_module = exec_module
        return spec


def _wrap(bindings):
    make = bindings.nixlAgent

    def patient(name, config):
        config.pthrDelay = PROGRESS_DELAY_US
        return make(name, config)

    bindings.nixlAgent = patient


sys.meta_path.insert(0, _Patient())
