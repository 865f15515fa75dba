# SPDX-License-Identifier: Apache-2.0
"""Stands in for the parts of an engine that its storage code imports but does not need."""
import ctypes
import gc
import importlib.machinery
import logging
import subprocess
import sys
import tempfile
import types
from pathlib import Path


class _Anything(types.ModuleType):
    """A module that has whatever name is asked of it, as an empty class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


def stub(*names):
    """Modules that have any name, each an empty class."""
    for name in names:
        module = sys.modules[name] = _Anything(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    return module


def provide(name, **attributes):
    """Module NAME with just ATTRIBUTES."""
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(attributes)
    return module


def packages(*names):
    """Packages found on sys.path whose __init__, which would import the whole engine, is left out."""
    for name in names:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [f"{p}/{name.replace('.', '/')}" for p in sys.path
                           if Path(p, *name.split(".")).is_dir()]
        if not module.__path__:
            raise ImportError(f"no folder for package {name}")


def logger_module(name):
    provide(name, init_logger=logging.getLogger)


# std::string::_M_replace_cold, which libstdc++ has since GCC 13 and PyTorch's libraries bring along
# for older systems: bytes P..P+LENGTH1 of a string become LENGTH2 bytes of S, which may lie in it.
_REPLACE_COLD = r"""
#include <stdlib.h>
#include <string.h>
void _ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE15_M_replace_coldEPcmPKcmm(
    void *string, char *p, size_t length1, const char *s, size_t length2, size_t tail)
{
    char *copy = malloc(length2 + 1);
    if (!copy)
        abort();
    memcpy(copy, s, length2);
    memmove(p + length2, p + length1, tail);
    memcpy(p, copy, length2);
    free(copy);
}
"""


def torch_libraries():
    """
    Libraries that satisfy extensions whose build links them against PyTorch's, although they use
    nothing of it: the distribution's PyTorch has other versions and names.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source.c")
        for name in ("libtorch.so", "libc10.so", "libtorch_cpu.so", "libtorch_python.so"):
            source.write_text(_REPLACE_COLD if name == "libc10.so" else "")
            subprocess.run(["gcc", "-shared", "-fPIC", "-O1", source, f"-Wl,-soname,{name}", "-o",
                            f"{folder}/{name}"], check=True)
            ctypes.CDLL(f"{folder}/{name}", ctypes.RTLD_GLOBAL)


def newer_torch():
    """What the engines use of PyTorch that version 1.13, Debian 12's, does not have yet."""
    import torch

    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
                 "float8_e8m0fnu", "float4_e2m1fn_x2", "uint16", "uint32", "uint64"):
        if not hasattr(torch, name):
            setattr(torch, name, type(name, (), {"itemsize": 1})())
    if not hasattr(torch.Tensor, "itemsize"):
        torch.Tensor.itemsize = property(torch.Tensor.element_size)
    if not hasattr(torch.dtype, "itemsize"):
        # dtype is a type of C's, whose dictionary is read-only unless one goes behind it.
        (names,) = gc.get_referents(torch.dtype.__dict__)
        names["itemsize"] = property(lambda dtype: torch.empty(0, dtype=dtype).element_size())
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.dtype))
