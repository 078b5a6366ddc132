"""Which kind of source a string names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from dbuf.errors import DbufError, explain
from dbuf.models.builtin import builtin
from dbuf.models.module import from_config, from_function
from dbuf.models.safetensors import header_files, read_header
from dbuf.models.units import Model, group

__all__ = ["read_model"]


def read_model(source: str, *, group_by: str = "block", dtype: torch.dtype | None = None) -> Model:
    """The tensors of a model, from whatever is at hand.

    Args:
        source: A name of `builtin_names()`; a safetensors file, its index, or a folder with some, of which only
            headers are read; a Hugging Face `config.json` or a folder with one; or `package.module:function`, which
            builds a module and is called on the meta device.
        group_by: What is one unit; see `dbuf.models.group`.
        dtype: In place of the tensors' own.

    Raises:
        DbufError: The source does not exist, or cannot be read.

    Example:
        >>> read_model("qwen3-8b").numel
        8190735360
    """
    path = Path(source)
    files = header_files(path)
    config = path / "config.json" if path.is_dir() else path
    if files:
        model = group(source, [tensor for file in files for tensor in read_header(file)], group_by)
    elif path.is_dir() and not config.exists():
        raise DbufError(
            explain(
                "dbuf.models",
                "the folder holds no model.",
                got=source,
                need="*.safetensors or a config.json in it",
                fix="--model FOLDER/config.json",
            )
        )
    elif path.is_dir() or source.endswith(".json"):
        model = group(source, from_config(config), group_by)
    elif ":" in source:
        model = group(source, from_function(source), group_by)
    else:
        model = builtin(source, group_by)
    if dtype is None:
        return model
    return model._replace(units=tuple(dataclasses.replace(unit, dtype=dtype) for unit in model.units))
