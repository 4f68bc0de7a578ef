"""Pictures through Core ML's sessions, on a machine that pretends to be a Mac, and the Swift package beside them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import swift_golden
from coreml_mac import PretendedMac, pretend_mac
from klein_pipeline import pixels
from measure import intaglio as command_line

import intaglio
from intaglio.engines.coreml.description import DimRange, PackageDescription, read_description
from intaglio.engines.engine import read_engine
from intaglio.engines.target import session_options
from intaglio.errors import InputError
from intaglio.exporters.bundle import read_bundle
from intaglio.runtimes import coreml_swift
from intaglio.runtimes.coreml_swift import STAGES, finish_coreml, picture_settings, text_around
from intaglio.runtimes.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
SIZES = "batch=1,text_tokens=16,image_tokens=64,height=64,width=64"
OPTIONS: dict[str, Any] = {"seed": 3, "num_inference_steps": 2, "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo painter, compiled for both targets; for reading only."""
    folder = tmp_path_factory.mktemp("painter") / "bundle"
    intaglio.export(ROOT / "demo" / "emoji", folder, stages=STAGES)
    intaglio.compile(folder)
    report = intaglio.compile(folder, "coreml", shapes=SIZES)
    (note,) = report.notes
    assert note.startswith("swift/ is a Swift package that paints with these stages")
    return folder


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> PretendedMac:
    return pretend_mac(monkeypatch)


def test_a_picture_is_that_of_the_cpu(bundle: Path, mac: PretendedMac) -> None:
    pipe = intaglio.load(bundle, "coreml", compute_units="cpu+gpu", keep_loaded=False)
    found, expected = pipe("red apple", **OPTIONS), intaglio.load(bundle)("red apple", **OPTIONS)
    assert np.linalg.norm(found.latents - expected.latents) <= 1e-4 * np.linalg.norm(expected.latents)
    difference = np.abs(pixels(found.images) - pixels(expected.images))
    assert difference.max() <= 1
    assert mac.loaded == [(stage, None, "CPU_AND_GPU") for stage in STAGES]
    assert (mac.most_alive, mac.alive) == (1, 0), "one stage at a time, and none stays"
    assert found.texts[0]["engine"] == "coreml, exact, Core ML"
    # What was compiled stays beside the packages, and is what the next run takes.
    assert mac.compiled == list(STAGES)
    intaglio.load(bundle, "coreml").encode_prompt("leaf")
    assert (mac.compiled, mac.loaded[-1]) == (list(STAGES), ("text_encoder", None, "ALL"))
    for compiled in (bundle / "engines" / "coreml").glob("*.mlmodelc"):
        shutil.rmtree(compiled)


def test_a_budget_and_sizes_are_checked_before_anything_is_loaded(bundle: Path, mac: PretendedMac) -> None:
    with pytest.raises(InputError, match=r"the memory budget is 64 MiB, and this needs \d+ MiB even with one stage"):
        intaglio.load(bundle, "coreml", memory_budget=64 << 20)("red apple", **OPTIONS)
    pipe = intaglio.load(bundle, "coreml")
    with pytest.raises(InputError, match="height is 128, but the engine was compiled for 64 to 64"):
        pipe("red apple", height=128, **OPTIONS)
    with pytest.raises(InputError, match="number of pictures is 2, but the engine was compiled for 1 to 1"):
        pipe(["red apple", "leaf"], **OPTIONS)
    assert mac.loaded == []


def test_options_of_another_target(bundle: Path) -> None:
    with pytest.raises(InputError, match="threads is for the target cpu, and this one is coreml"):
        intaglio.load(bundle, "coreml", threads=2)
    with pytest.raises(InputError, match="compute_units is for the target coreml, and this one is cpu"):
        intaglio.load(bundle, compute_units="all")
    assert session_options("coreml", compute_units="cpu") == {"compute_units": "cpu"}
    assert session_options("coreml") == session_options("cpu") == {}
    assert session_options("cpu", threads=2) == {"threads": 2}


def test_elsewhere_nothing_is_compiled_to_be_run(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "bundle", ignore=shutil.ignore_patterns("engines"))
    run = ("run", tmp_path / "bundle", "red apple", "-o", tmp_path / "apple.png", "--target", "coreml")
    done = command_line(*run)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Core ML runs on macOS 15 or later" in done.stderr
    done = command_line(*run, "--compute-units", "gpu")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "the compute units 'gpu' are unknown" in done.stderr
    assert not (tmp_path / "bundle" / "engines").exists()


# --- the Swift package ---------------------------------------------------------------------------------------


def test_what_the_swift_package_is_told(bundle: Path) -> None:
    folder, described = bundle / "engines" / "coreml", read_bundle(bundle)
    settings = json.loads((folder / "swift" / "picture.json").read_text())
    pipe = intaglio.load(bundle)
    for name, stage in settings["stages"].items():
        package = folder / "swift" / stage["package"]
        ((function, expected),) = zip(stage["functions"], read_description(package).functions.values(), strict=True)
        assert function["name"] is None, "there is one"
        assert function["sizes"] == expected.sizes
        assert function["inputs"].keys() == {tensor.name for tensor in described.stages[name].inputs}
        assert set(function["inputs"].values()) == {tensor.package_name for tensor in expected.inputs}
    assert tuple(settings["stages"]) == STAGES
    prompt = settings["prompt"]
    assert (folder / "swift" / prompt["tokenizer"]).samefile(bundle / "tokenizer" / "tokenizer.json")
    assert prompt["length"] == pipe.model.text_length
    assert prompt["pad"] == pipe.tokenizer.pad_token_id
    assert prompt["probe"]["ids"] == pipe._token_ids([prompt["probe"]["text"]], False)[0]
    assert settings["latents"] == {"channels": pipe.model.channels, "pixels": pipe.model.factor}
    # The demo was not distilled, and its pictures have 64 pixels.
    assert settings["sampling"] == {"steps": 50, "guidance": 4, "most": 1000, "shift": 1, "embedded": False}
    assert settings["size"] == {"height": 64, "width": 64}


def test_the_swift_package_is_copied_whole(bundle: Path) -> None:
    source, copied = ROOT / "engines" / "coreml" / "swift", bundle / "engines" / "coreml" / "swift"
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    assert {path.relative_to(copied) for path in copied.rglob("*") if path.is_file()} == files | {Path("picture.json")}
    assert all((copied / file).read_bytes() == (source / file).read_bytes() for file in files)


def test_the_settings_have_the_keys_that_swift_reads(bundle: Path) -> None:
    """Swift's decoder takes the names of properties, and nothing here can run it."""
    source = (ROOT / "engines/coreml/swift/Sources/PictureMath/Settings.swift").read_text()
    structs = dict(re.findall(r"    public struct (\w+): Codable \{\n(.*?)\n    \}\n", source, re.DOTALL))
    structs["PictureSettings"] = source[source.index("    public let version") : source.index("    public init")]
    fields = {
        name: dict(re.findall(r"public let (\w+): ([^\n]+)", body.partition("func ")[0]))
        for name, body in structs.items()
    }

    def check(kind: str, value: Any) -> None:
        if kind.endswith("?"):
            if value is not None:
                check(kind[:-1], value)
        elif found := re.fullmatch(r"\[String: (\w+)\]", kind):
            assert isinstance(value, Mapping)
            for each in value.values():
                check(found[1], each)
        elif found := re.fullmatch(r"\[(\w+)\]", kind):
            assert isinstance(value, list)
            for each in value:
                check(found[1], each)
        elif kind in fields:
            assert value.keys() == fields[kind].keys(), kind
            for name, each in value.items():
                check(fields[kind][name], each)
        else:
            expected = {"String": str, "Int": int, "Int32": int, "Float": (int, float), "Bool": bool}[kind]
            assert isinstance(value, expected) and (kind == "Bool" or not isinstance(value, bool)), (kind, value)

    check("PictureSettings", json.loads((bundle / "engines/coreml/swift/picture.json").read_text()))


def test_functions_of_several_sizes_are_told_by_name(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, described = bundle / "engines" / "coreml", read_bundle(bundle)
    dims = read_engine(bundle, "coreml").identities["transformer"].shapes

    def two(package: Path) -> PackageDescription:
        (function,) = read_description(package).functions.values()
        ranged = function.model_copy(update={"sizes": {}, "dims": {"text_tokens": DimRange(min=1, max=16)}})
        return PackageDescription(default_function="first", functions={"first": function, "second": ranged})

    monkeypatch.setattr(coreml_swift, "read_description", two)
    functions = picture_settings(folder, bundle, described, dims)["stages"]["transformer"]["functions"]
    assert [function["name"] for function in functions] == ["first", "second"]
    assert functions[1]["dims"] == {"text_tokens": {"min": 1, "max": 16}}


def test_a_bundle_without_all_stages_has_no_swift_package(bundle: Path) -> None:
    folder, described = bundle / "engines" / "coreml", read_bundle(bundle)
    dims = read_engine(bundle, "coreml").identities["transformer"].shapes
    described = described.model_copy(update={"stages": {"transformer": described.stages["transformer"]}})
    assert finish_coreml(folder, bundle, described, dims) == [
        "no Swift package: the bundle lacks text_encoder, vae_decoder"
    ]


def test_golden_numbers_are_those_of_our_runtime() -> None:
    assert swift_golden.FILE.read_text("utf-8") == swift_golden.text(), "python tests/support/swift_golden.py"


@pytest.mark.parametrize("name", ["qwen3", "demo"])
def test_text_around_a_prompt(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if name == "demo":
        folder = ROOT / "demo" / "emoji" / "tokenizer"
    else:
        published = request.getfixturevalue("qwen3_folder")
        shutil.copy(published / "tokenizer.json", tmp_path)
        config = json.loads((published / "tokenizer_config.json").read_text())
        (tmp_path / "chat_template.jinja").write_text(config["chat_template"])
        folder = tmp_path
    before, after = text_around(Tokenizer(folder))
    assert (before, after) == {
        "demo": ("<|im_start|>", "<|im_end|>"),
        "qwen3": (
            "<|im_start|>user\n",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
    }[name]


@pytest.mark.parametrize(
    "template",
    [
        "<{{ messages[0].content | trim }}>",
        "<{{ messages[0].content * 2 }}>",
        "<>",
        "{{ messages[0].content | upper }}",
    ],
)
def test_a_template_that_does_more(template: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "demo" / "emoji" / "tokenizer" / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match="the chat template does more than put text around a prompt"):
        text_around(Tokenizer(tmp_path))
