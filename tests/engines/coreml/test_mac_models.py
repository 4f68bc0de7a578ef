"""Packages in Core ML, as far as that can be shown where there is none: what coremltools is asked for."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import coreml_models
import coremltools as ct
import numpy as np
import pytest
from coreml_mac import PretendedMac, pretend_mac

from intaglio.engines import coreml
from intaglio.engines.coreml import models
from intaglio.engines.coreml.description import PackageDescription, describe
from intaglio.engines.coreml.functions import merge_functions
from intaglio.engines.coreml.package import write_package
from intaglio.errors import EngineError, InputError

TEXT = "m (float[2,N] x) => (float[2,N] y) { y = Add(x, x) }"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PackageDescription]:
    """``double.mlpackage`` of two functions, and ``single.mlpackage`` of one."""
    folder = tmp_path_factory.mktemp("packages")
    functions, written = {}, {}
    for name, size in (("n3", 3), ("n5", 5)):
        converted = coreml_models.packaged(coreml_models.model(TEXT), {"N": size})
        functions[name] = describe(converted, {"N": size})
        written[name] = folder / f"{name}.mlpackage"
        write_package(converted, written[name])
    merge_functions(written, folder / "double.mlpackage")
    written["n3"].rename(folder / "single.mlpackage")
    return folder, PackageDescription(default_function="n3", functions=functions)


@pytest.fixture
def folder(packages: tuple[Path, PackageDescription], tmp_path: Path) -> Path:
    return Path(shutil.copytree(packages[0], tmp_path / "packages"))


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> PretendedMac:
    return pretend_mac(monkeypatch)


def test_functions_and_compute_units_by_name(
    packages: tuple[Path, PackageDescription], folder: Path, mac: PretendedMac
) -> None:
    for units, name in models.COMPUTE_UNITS.items():
        model = models.open_on_mac(folder / "double.mlpackage", packages[1], "n5", units)
        assert mac.loaded[-1] == ("double", "n5", name)
        assert name in ct.ComputeUnit.__members__
    x = np.ones((2, 5), np.float32)
    np.testing.assert_array_equal(next(iter(model.predict({"x": x}).values())), x + x)
    # The default function of a package with one is asked for by no name.
    one = PackageDescription(default_function="n3", functions={"n3": packages[1].functions["n3"]})
    models.open_on_mac(folder / "single.mlpackage", one, "n3", "all")
    assert mac.loaded[-1] == ("single", None, "ALL")


def test_a_package_is_compiled_once_until_it_changes(
    packages: tuple[Path, PackageDescription], folder: Path, mac: PretendedMac
) -> None:
    package, description = folder / "double.mlpackage", packages[1]
    for name in ("n3", "n5", "n3"):
        models.open_on_mac(package, description, name, "all")
    assert mac.compiled == ["double"]
    (first,) = folder.glob("*.mlmodelc")
    others = folder / f"doubled-{first.stem.partition('-')[2]}.mlmodelc"
    others.mkdir()
    manifest = json.loads((package / "Manifest.json").read_text())
    other = manifest["rootModelIdentifier"][::-1]
    entries = manifest["itemInfoEntries"]
    entries[other] = entries.pop(manifest["rootModelIdentifier"])
    (package / "Manifest.json").write_text(json.dumps({**manifest, "rootModelIdentifier": other}))
    models.open_on_mac(package, description, "n3", "all")
    assert mac.compiled == ["double", "double"]
    assert {path.name for path in folder.glob("*.mlmodelc")} == {f"double-{other}.mlmodelc", others.name}
    assert not list(folder.glob(".mlmodelc-*"))


def test_a_compilation_that_fails_leaves_nothing(
    packages: tuple[Path, PackageDescription], folder: Path, mac: PretendedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(package: str, destination: str) -> Any:
        Path(destination).mkdir()
        raise RuntimeError("no such op on this system")

    monkeypatch.setattr(ct.models.utils, "compile_model", fail)
    with pytest.raises(EngineError, match=r"double.mlpackage: Core ML cannot load it: no such op .* --compute-units"):
        models.open_on_mac(folder / "double.mlpackage", packages[1], "n3", "all")
    assert not list(folder.glob("*.mlmodelc")) and not list(folder.glob(".mlmodelc-*"))
    (folder / "double.mlpackage" / "Manifest.json").unlink()
    with pytest.raises(EngineError, match=r"double\.mlpackage is not a whole Core ML package"):
        models.open_on_mac(folder / "double.mlpackage", packages[1], "n3", "all")


def test_two_loaders_take_the_copy_of_the_first(
    packages: tuple[Path, PackageDescription], folder: Path, mac: PretendedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_model(package: str, destination: str) -> str:
        shutil.copytree(package, destination)
        faster = folder / Path(destination).name
        shutil.copytree(package, faster)
        (faster / "first").touch()
        return destination

    monkeypatch.setattr(ct.models.utils, "compile_model", compile_model)
    model = models.open_on_mac(folder / "double.mlpackage", packages[1], "n3", "all")
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(next(iter(model.predict({"x": x}).values())), x + x)
    (compiled,) = folder.glob("*.mlmodelc")
    assert (compiled / "first").is_file()
    assert not list(folder.glob(".mlmodelc-*"))


def test_what_killed_loaders_left_is_removed_a_day_later(
    packages: tuple[Path, PackageDescription], folder: Path, mac: PretendedMac
) -> None:
    old, young = folder / ".mlmodelc-old", folder / ".mlmodelc-young"
    for left in (old, young):
        (left / "double.mlmodelc").mkdir(parents=True)
    two_days_ago = time.time() - 2 * 24 * 60 * 60
    os.utime(old, (two_days_ago, two_days_ago))
    models.open_on_mac(folder / "double.mlpackage", packages[1], "n3", "all")
    assert young.exists() and not old.exists()


def test_elsewhere_it_says_where_core_ml_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "is_mac", lambda: False)
    with pytest.raises(EngineError, match=r"Core ML runs on macOS 15 or later.*intaglio parity"):
        coreml.check_runs()
    with pytest.raises(InputError, match=r"compute units 'gpu' are unknown; there are all, cpu, cpu\+gpu, cpu\+ne"):
        coreml.check_runs(compute_units="gpu")
    monkeypatch.setattr(models, "is_mac", lambda: True)
    coreml.check_runs(compute_units="cpu")
