"""Empty modules in place of what SGLang imports and does not use on a CPU: torchvision, torchaudio, sgl_kernel, decord.

Loaded by a .pth file at the start of every Python of the environment; does nothing unless SGLANG_STUBS is set.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

NAMES = ("torchvision", "torchaudio", "sgl_kernel", "decord")


class Anything(type):
    """A class that has whatever it is asked for, and whose objects have, too."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return make(name)


def make(name):
    members = {"__init__": lambda self, *args, **kwargs: None, "__getattr__": lambda self, name: make(name)}
    return Anything(name, (), members)


class Stub(types.ModuleType):
    """A module that has whatever it is asked for."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = make(name)
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        made = Stub(spec.name)
        made.__version__ = "0.0"
        made.__path__ = []
        return made

    def exec_module(self, module):
        pass


if os.environ.get("SGLANG_STUBS"):
    sys.meta_path.insert(0, Finder())
