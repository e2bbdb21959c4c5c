"""Compiles CUDA C++ with NVRTC and launches it, by ctypes: torch brings the libraries, but no lasting way to use them.

Knows: NVRTC, the driver's modules and launches, and where binaries are kept. Does not know: any kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...cache import clear_unused, guarded_folders
from ...files import locked, read_guarded, sweep, write_whole

__all__ = ["Kernel", "binary"]

_COOPERATIVE = 2  # a launch attribute: all programs run at the same time, or none does
_MAX_SHARED = 8  # a function attribute: bytes of shared memory that a launch may ask for


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC of the CUDA that torch was built for: beside torch's other libraries, or where the system has it."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}"
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec is not None else []
    found = [path for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))]
    for part in sorted(found[0].parent.glob("libnvrtc-builtins.so.*")) if found else ():
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)  # NVRTC looks for it by name
    return ctypes.CDLL(str(found[0]) if found else name)


def _check(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what} failed with code {code}")


def binary(name: str, text: str, architecture: str) -> bytes:
    """C++ compiled for a GPU ("sm_90"), or what was kept of that. May be called from any thread."""
    lib, version = _nvrtc(), (ctypes.c_int * 2)()
    _check(lib.nvrtcVersion(ctypes.byref(version), ctypes.byref(version, 4)), "nvrtcVersion")
    options = [f"-arch={architecture}", "-std=c++17", "-use_fast_math"]
    known = hashlib.sha256(repr((text, options, list(version))).encode()).hexdigest()
    kept = f"{name}-{known[:20]}.cubin"
    if found := _kept(kept):
        return found
    place = next(guarded_folders("kernels", make=True, elsewhere=True), None)
    with locked(place / kept) if place is not None else nullcontext():
        return _kept(kept) or _made(kept, text, f"{name}.cu", options)  # perhaps another was at it


def _kept(name: str) -> bytes | None:
    for folder in guarded_folders("kernels", elsewhere=True):
        with suppress(OSError):  # not there, or others can have written it
            found = read_guarded(folder / name)
            with suppress(OSError):
                os.utime(folder / name)  # used now
            clear_unused(folder)
            return found
    return None


def _made(kept: str, text: str, name: str, options: Sequence[str]) -> bytes:
    made = _compile(text.encode(), name, options)
    for folder in guarded_folders("kernels", make=True, elsewhere=True):
        with suppress(OSError):  # then in the next one; or it is compiled again next time
            sweep(folder)
            write_whole(folder / kept, made, guarded=True)
            break
    return made


def _compile(text: bytes, name: str, options: Sequence[str]) -> bytes:
    lib, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    _check(lib.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), 0, None, None), "nvrtcCreateProgram")
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if lib.nvrtcCompileProgram(program, len(options), array) != 0:
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            told = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, told)
            lines = told.value.decode(errors="replace").splitlines()
            raise RuntimeError(f"{name} does not compile: {' '.join(lines[:2])[:300]}")
        _check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        made = ctypes.create_string_buffer(size.value)
        _check(lib.nvrtcGetCUBIN(program, made), "nvrtcGetCUBIN")
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))
    return made.raw


class Kernel:
    """One kernel of a binary. Its shared memory is what the symbol ``name``_memory says."""

    def __init__(self, made: bytes, name: str, device: torch.device) -> None:
        driver = _driver()
        self._name, self._device = name, device
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        at, size, memory = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the device's context is there, and current
            _check(driver.cuModuleLoadData(ctypes.byref(self._module), made), "cuModuleLoadData")
            _check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), name)
            symbol = f"{name}_memory".encode()
            _check(driver.cuModuleGetGlobal_v2(ctypes.byref(at), ctypes.byref(size), self._module, symbol), name)
            _check(driver.cuMemcpyDtoH_v2(ctypes.byref(memory), at, ctypes.c_size_t(4)), name)
            _check(driver.cuFuncSetAttribute(self._function, _MAX_SHARED, memory.value), name)
        self._memory = memory.value

    def launch(self, programs: int, threads: int, arguments: Sequence[Any]) -> None:
        """On torch's current stream, all programs at once. Arguments: tensors (their addresses) and ctypes values."""
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attribute = _Attribute(id=_COOPERATIVE)
        attribute.value[0] = 1
        stream = torch.cuda.current_stream(self._device).cuda_stream
        config = _Config(programs, 1, 1, threads, 1, 1, self._memory, stream, ctypes.pointer(attribute), 1)
        code = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        _check(code, f"launching {self._name}")
