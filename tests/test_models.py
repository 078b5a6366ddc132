"""Models as units: from names, headers, configs and functions; every refusal by its message."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path

import pytest
import torch

from dbuf.errors import DbufError
from dbuf.models import builtin_names, group, read_model

CASES = json.loads((Path(__file__).parent / "cases" / "models.json").read_text())
F32, BF16 = torch.float32, torch.bfloat16


def header(tensors: dict[str, tuple[str, list[int], int]], *, extra: int = 0) -> bytes:
    """A safetensors file of zeros: name -> (dtype, shape, bytes)."""
    info, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        info[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(info).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end - extra)


TENSORS = {
    "model.embed.weight": ("BF16", [10, 4], 80),
    "model.layers.0.q": ("BF16", [4, 4], 32),
    "model.layers.0.experts.0.up": ("BF16", [2, 4], 16),
    "model.layers.1.q": ("BF16", [4, 4], 32),
    "model.layers.1.experts.0.up": ("BF16", [2, 4], 16),
    "model.layers.2.q": ("BF16", [4, 4], 32),
    "scale": ("F32", [], 4),
}
UNITS = [("model.embed", 1), ("model.layers.{0..1}", 2), ("model.layers.2", 1), ("root", 1)]


def listed(model: object) -> list[tuple[str, int]]:
    return [(unit.name, unit.count) for unit in model.units]


@pytest.mark.parametrize("name", builtin_names())
def test_a_name_has_the_published_shapes(name: str) -> None:
    model = read_model(name)
    assert model.numel == CASES[name]["parameters"]
    for unit, case in zip(model.units, CASES[name]["units"], strict=True):
        assert (unit.name, unit.count, unit.dtype) == (case["name"], case["count"], BF16)
        assert [[n, list(s)] for n, s in zip(unit.names, unit.shapes, strict=True)] == case["tensors"]


def test_all_published_models_have_a_name() -> None:
    assert set(builtin_names()) == set(CASES)


def test_the_same_elements_however_grouped() -> None:
    by = {how: read_model("deepseek-v3", group_by=how) for how in ("block", "tensor", "all")}
    assert {model.numel for model in by.values()} == {CASES["deepseek-v3"]["parameters"]}
    assert len(by["all"].units) == 1
    assert sum(unit.count for unit in by["tensor"].units) == len(by["all"].units[0].shapes)


def test_a_header_is_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(TENSORS))
    model = read_model(str(path))
    assert listed(model) == UNITS
    assert model.units[1].names == ("q", "experts.0.up") and model.units[1].shapes == ((4, 4), (2, 4))
    assert model.units[-1].dtype == F32 and read_model(str(path), dtype=F32).units[0].dtype == F32
    assert read_model(str(tmp_path)).units == model.units  # the folder


def test_a_file_that_safetensors_wrote(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"a.w": torch.zeros(3, 2), "a.b": torch.zeros(3, dtype=BF16)}, str(tmp_path / "m.safetensors"))
    units = read_model(str(tmp_path / "m.safetensors")).units
    assert {(u.name, u.shapes, u.dtype) for u in units} == {
        ("a (float32)", ((3, 2),), F32),
        ("a (bfloat16)", ((3,),), BF16),
    }


def test_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    for i, name in enumerate(TENSORS):
        (tmp_path / f"{i}.safetensors").write_bytes(header({name: TENSORS[name]}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"{i}.safetensors" for i, name in enumerate(TENSORS)}}))
    assert listed(read_model(str(index))) == UNITS
    index.write_text("[]")
    with pytest.raises(DbufError, match=r"(?s)index\.json is no safetensors file.*weight_map"):
        read_model(str(index))


def rewritten(change: dict[str, object]) -> bytes:
    text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | change}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"abc", "8 bytes of length"),
        ((99).to_bytes(8, "little") + b"{}", "a header of 99"),
        ((4).to_bytes(8, "little") + b"{{{{", "the header is no JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "the header is no JSON"),
        ((2).to_bytes(8, "little") + b"[]", "an object from names"),
        (rewritten({"dtype": "F12"}), "a dtype of F64"),
        (rewritten({"shape": [-2]}), "at least 0"),
        (rewritten({"shape": [3]}), "fit the shape"),
        (rewritten({"data_offsets": [8, 16]}), "lie in the file"),
        (rewritten({"data_offsets": [0]}), "two data_offsets"),
        (header(TENSORS, extra=1), "lie in the file"),
        ((2).to_bytes(8, "little") + b"{}", "there is no tensor"),
    ],
)
def test_a_corrupt_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(DbufError, match=message):
        read_model(str(path))


def test_a_config_is_what_transformers_builds(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    model = read_model(str(tmp_path / "config.json"))
    assert listed(model) == [("model.embed_tokens", 1), ("model.layers.*", 3), ("model.norm", 1)]
    with torch.device("meta"):
        built = transformers.LlamaForCausalLM(config)
    assert model.numel == sum(p.numel() for p in built.parameters())
    assert read_model(str(tmp_path)).units == model.units


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "JSONDecodeError"),
        ("[]", "a model_type"),
        ("{}", "KeyError: 'model_type'"),
        ('{"model_type": "unheard-of"}', "the installed transformers can build"),
    ],
)
def test_a_bad_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DbufError, match=message):
        read_model(str(tmp_path / "config.json"))


def test_a_config_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(DbufError, match="pip install transformers"):
        read_model(str(tmp_path))


def test_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DbufError, match="FileNotFoundError"):
        read_model(str(tmp_path / "config.json"))
    with pytest.raises(DbufError, match="No such file"):
        read_model(str(tmp_path / "m.safetensors"))
    with pytest.raises(DbufError, match="holds no model"):
        read_model(str(tmp_path))
    with pytest.raises(DbufError, match=r"(?s)no such model.*deepseek-v3.*try:  --model llama3-70b"):
        read_model("lama3-70b")


def test_a_function_builds_on_meta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models.py").write_text(
        textwrap.dedent("""
        from torch import nn

        def tied():
            model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
            model[2].weight = model[0].weight
            assert model[0].weight.is_meta
            return model

        def wrong():
            return 3

        def fails():
            return 1 / 0
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    model = read_model("my_models:tied")
    assert [(u.name, u.names, u.shapes) for u in model.units] == [
        ("0", ("weight",), ((4, 4),)),
        ("1", ("weight", "bias"), ((4,), (4,))),
    ]
    for name, message in (
        ("wrong", "returns a torch.nn.Module"),
        ("fails", "ZeroDivisionError"),
        ("absent", "AttributeError"),
    ):
        with pytest.raises(DbufError, match=message):
            read_model(f"my_models:{name}")
    with pytest.raises(DbufError, match="ModuleNotFoundError"):
        read_model("no_such_package_here:build")


def test_patterns_of_modules() -> None:
    tensors = [(f"layers.{i}.{part}.w", (2, 2), F32) for i in range(2) for part in ("attn", "mlp")]
    tensors.append(("head.w", (2, 2), F32))
    assert listed(group("m", tensors, "*.attn")) == [("layers.*.attn", 2), ("root", 1)]
    assert group("m", tensors, "*.attn").units[1].names == ("layers.0.mlp.w", "layers.1.mlp.w", "head.w")
    with pytest.raises(DbufError, match=r"(?s)matches no module.*layers.0.attn"):
        group("m", tensors, "blocks*")


def test_a_hundred_thousand_tensors() -> None:
    tensors = [(f"layers.{i}.w{j}", (3, j + 1), F32) for i in range(1000) for j in range(100)]
    (unit,) = group("m", tensors).units
    assert (unit.count, unit.numel) == (1000, sum(math.prod((3, j + 1)) for j in range(100)))
