"""The header of a safetensors file: names, shapes and dtypes, without reading a weight.

A file begins with the header's length in 8 bytes, little-endian, and the header in JSON.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

import torch

from dbuf.errors import DbufError, explain
from dbuf.models.units import Named

__all__ = ["header_files", "read_header"]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def header_files(path: Path) -> list[Path]:
    """The safetensors files that a path means: itself, those of an index, or those of a folder; none if it is neither.

    Raises:
        DbufError: An index is no JSON, or has no list of files.
    """
    if path.name.endswith(".index.json"):
        try:
            files = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
            _refuse(path, f"the index cannot be read: {error!r}", "JSON with a weight_map from tensors to files")
        return [path.parent / file for file in files]
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    return [path] if path.suffix == ".safetensors" else []


def read_header(path: Path) -> list[Named]:
    """Path, shape and dtype of every tensor in a file, in the order of the file.

    Raises:
        DbufError: The file is missing, or its header is corrupt; the message says where.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length, whole = int.from_bytes(prefix, "little"), path.stat().st_size
            if len(prefix) < 8 or length > whole - 8:
                _refuse(path, f"{whole} bytes, a header of {length}", "8 bytes of length, then so many of header")
            header = json.loads(file.read(length))
    except OSError as error:
        _refuse(path, str(error), "a file that can be read")
    except ValueError as error:
        _refuse(path, f"the header is no JSON: {error}", "a header in JSON")
    if not isinstance(header, dict):
        _refuse(path, f"the header is a {type(header).__name__}", "an object from names to tensors")
    named = [_read_tensor(path, name, info, whole - 8 - length) for name, info in header.items() if name[:2] != "__"]
    return [tensor for _, tensor in sorted(named, key=lambda item: item[0])]


def _read_tensor(path: Path, name: str, info: Any, nbytes: int) -> tuple[int, Named]:
    """Where a tensor begins, and the tensor."""
    try:
        dtype, shape, (start, stop) = _DTYPES[info["dtype"]], tuple(info["shape"]), info["data_offsets"]
    except (KeyError, TypeError, ValueError):
        _refuse(path, f"{name}: {info!r}", f"a dtype of {', '.join(_DTYPES)}, a shape, and two data_offsets")
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        _refuse(path, f"{name}: {info!r}", "sizes and offsets of at least 0")
    if not stop <= nbytes or stop - start != math.prod(shape) * dtype.itemsize:
        _refuse(path, f"{name}: {info!r} of {nbytes} bytes", "data_offsets that lie in the file and fit the shape")
    return start, (name, shape, dtype)


def _refuse(path: Path, got: str, need: str) -> NoReturn:
    raise DbufError(
        explain("dbuf.models", f"{path} is no safetensors file.", got=got, need=need, fix="download or write it again")
    )
