"""Launches kernels that were compiled ahead of time, with ctypes and the GPU's driver alone.

    from launch import LoadedKernels
    kernels = LoadedKernels("FOLDER")                  # of this file, by default
    kernels(X=x, W=w, Y=y, stream=0)                   # tensors of torch, or addresses on the device

Needs a current context: torch has one as soon as a tensor is on the GPU; else that of device 0 is used."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

Address = ctypes.c_uint64


class LaunchError(RuntimeError):
    """The driver refused; the message names its function and the number that it returned."""


class LoadedKernels:
    """The kernels of one folder, loaded into the current context. A call launches them all and does not
    wait. Their workspace, if they need one, is kept: use an object for one stream at a time."""

    def __init__(self, folder: str | Path | None = None) -> None:
        folder = Path(__file__).parent if folder is None else Path(folder)
        self.about: dict[str, Any] = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
        self.tensors: dict[str, dict[str, Any]] = self.about["tensors"]
        is_hip = self.about["backend"] == "hip"
        self.prefix = "hip" if is_hip else "cu"
        self.driver = ctypes.CDLL("libamdhip64.so" if is_hip else "libcuda.so.1")
        self.workspace = Address(0)
        if not is_hip:
            self._context()
        self.functions = [
            self._load(folder, step) if "kernel" in step else None for step in self.about["steps"]
        ]

    def __call__(self, *, stream: int = 0, **tensors: Any) -> None:
        """Launch on tensors, or addresses, by name. ValueError for one that is missing, not known, or
        not what the kernels were made for; LaunchError where the driver refuses."""
        if set(tensors) != set(self.tensors):
            raise ValueError(f"expected {' '.join(self.tensors)}, got {' '.join(tensors)}")
        at = {name: self._address(name, given) for name, given in tensors.items()}
        if self.about["workspace_bytes"] and not self.workspace.value:
            self._call(
                "Malloc" if self.prefix == "hip" else "MemAlloc_v2",
                ctypes.byref(self.workspace),
                ctypes.c_size_t(self.about["workspace_bytes"]),
            )
        for step, function in zip(self.about["steps"], self.functions, strict=True):
            if function is None:
                self._call(
                    "MemsetD8Async",
                    Address(self._place(step["clear"], at)),
                    ctypes.c_ubyte(0),
                    ctypes.c_size_t(step["bytes"]),
                    ctypes.c_void_p(stream),
                )
            else:
                self._launch(step, function, at, stream)

    def _address(self, name: str, given: Any) -> int:
        """The address of a checked tensor, or the given address."""
        want = self.tensors[name]
        if not isinstance(given, int):
            if str(given.dtype) != f"torch.{want['dtype']}":
                raise ValueError(f"{name}: expected torch.{want['dtype']}, got {given.dtype}")
            shape, strides = tuple(want["given_shape"]), tuple(want["given_strides"])
            if tuple(given.shape) != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {tuple(given.shape)}")
            if any(n > 1 and a != b for n, a, b in zip(shape, given.stride(), strides, strict=True)):
                raise ValueError(f"{name}: expected strides {strides}, got {tuple(given.stride())}")
            if given.device.type != "cuda":
                raise ValueError(f"{name}: expected a tensor on a GPU, got one on {given.device}")
            given = given.data_ptr()
        if given % self.about["aligned"]:
            raise ValueError(f"{name}: expected an address that is a multiple of {self.about['aligned']}")
        return int(given)

    def _place(self, where: dict[str, Any], at: dict[str, int]) -> int:
        if where["kind"] == "workspace":
            return int(self.workspace.value) + int(where["offset"])
        return at[where["tensor"]]

    def _launch(
        self, step: dict[str, Any], function: ctypes.c_void_p, at: dict[str, int], stream: int
    ) -> None:
        values = [self._argument(x, at) for x in step["passed"]]
        pointers = (ctypes.c_void_p * len(values))(*(v[0] for v in values))
        name = "ModuleLaunchKernel" if self.prefix == "hip" else "LaunchKernel"
        self._call(
            name,
            function,
            *(ctypes.c_uint(n) for n in (*step["grid"], step["threads"], 1, 1)),
            ctypes.c_uint(step["shared_bytes"]),
            ctypes.c_void_p(stream),
            pointers,
            None,
        )

    def _argument(self, x: dict[str, Any], at: dict[str, int]) -> tuple[int, Any]:
        """The address of an argument's value, and the object that must stay alive with it."""
        held: Any
        if x["kind"] == "map":
            return self._map(x, self._place(x["of"], at))
        if x["kind"] in ("i32", "i64"):
            held = (ctypes.c_int32 if x["kind"] == "i32" else ctypes.c_int64)(x["value"])
        else:
            held = Address(0 if x["kind"] == "null" else self._place(x, at))
        return ctypes.addressof(held), held

    def _map(self, x: dict[str, Any], base: int) -> tuple[int, Any]:
        """A CUtensorMap: 128 bytes at a multiple of 64."""
        held = (ctypes.c_char * 192)()
        start = -(-ctypes.addressof(held) // 64) * 64
        rank = x["rank"]
        self._call(
            "TensorMapEncodeTiled",
            ctypes.c_void_p(start),
            ctypes.c_int(x["elements"]),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(base),
            (ctypes.c_uint64 * rank)(*x["sizes"]),
            (ctypes.c_uint64 * rank)(*x["strides"]),
            (ctypes.c_uint32 * rank)(*x["box"]),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            ctypes.c_int(0),
            ctypes.c_int(x["swizzle"]),
            ctypes.c_int(L2_128B),
            ctypes.c_int(0),
        )
        return start, held

    def _load(self, folder: Path, step: dict[str, Any]) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("ModuleLoad", ctypes.byref(module), str(folder / step["file"]).encode())
        self._call("ModuleGetFunction", ctypes.byref(function), module, step["kernel"].encode())
        if self.prefix == "cu" and step["shared_bytes"] > WITHOUT_ASKING:
            self._call(
                "FuncSetAttribute", function, ctypes.c_int(MOST_SHARED), ctypes.c_int(step["shared_bytes"])
            )
        return function

    def _context(self) -> None:
        """The current context, or that of device 0."""
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self._call("Init", ctypes.c_uint(0))
        self._call("CtxGetCurrent", ctypes.byref(context))
        if not context.value:
            self._call("DeviceGet", ctypes.byref(device), ctypes.c_int(0))
            self._call("DevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._call("CtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self.driver, self.prefix + name)
        if code := function(*arguments):
            raise LaunchError(f"{self.prefix}{name} returned {code}")


Kernels = LoadedKernels  # the name that programs written before 0.1.0 import
L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
WITHOUT_ASKING = 48 << 10  # bytes of shared memory that every kernel may have
