"""The parameters of a module that is built on the meta device: from a function, or from a Hugging Face config."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from dbuf.errors import DbufError, explain
from dbuf.models.units import Named

__all__ = ["from_config", "from_function", "parameters_of"]


def parameters_of(module: nn.Module) -> list[Named]:
    """Path, shape and dtype of every parameter, tied ones once.

    Example:
        >>> parameters_of(torch.nn.Linear(2, 3, device="meta"))
        [('weight', (3, 2), torch.float32), ('bias', (3,), torch.float32)]
    """
    return [(name, tuple(param.shape), param.dtype) for name, param in module.named_parameters()]


def from_function(source: str) -> list[Named]:
    """The parameters of what `package.module:function` builds; modules of the current folder are found too.

    Raises:
        DbufError: There is no such function, it fails on the meta device, or returns no module.
    """
    where, _, name = source.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(where), name)
    except Exception as error:
        # What a user's module raises while it is imported can be anything.
        _refuse(source, f"{type(error).__name__}: {error}", "package.module:function that can be imported")
    try:
        with torch.device("meta"):
            module = function()
    except Exception as error:
        _refuse(source, f"{type(error).__name__}: {error}", "a function without arguments that works on meta")
    if not isinstance(module, nn.Module):
        _refuse(source, f"a {type(module).__name__}", "a function that returns a torch.nn.Module")
    return parameters_of(module)


def from_config(path: Path) -> list[Named]:
    """The parameters of the model of a Hugging Face `config.json`, as `transformers` builds it; nothing is downloaded.

    Raises:
        DbufError: The file cannot be read, names no architecture that is known, or `transformers` is missing.
    """
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        kind = config.pop("model_type")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        _refuse(str(path), f"{type(error).__name__}: {error}", "JSON with a model_type, as transformers writes it")
    try:
        import transformers
    except ImportError:
        raise DbufError(
            explain(
                "dbuf.models",
                "a config needs transformers to say what it means.",
                got=str(path),
                need="the package transformers",
                fix="pip install transformers, or --model with a .safetensors file or module:function",
            )
        ) from None
    try:
        described = transformers.AutoConfig.for_model(kind, **config)
        known = type(described) in transformers.AutoModelForCausalLM._model_mapping
        auto: Any = transformers.AutoModelForCausalLM if known else transformers.AutoModel
        with torch.device("meta"):
            return parameters_of(auto.from_config(described))
    except Exception as error:
        _refuse(str(path), f"{type(error).__name__}: {error}", "a config that the installed transformers can build")


def _refuse(source: str, got: str, need: str) -> NoReturn:
    raise DbufError(
        explain("dbuf.models", f"cannot build {source}.", got=got, need=need, fix="--model mypackage.model:build")
    )
