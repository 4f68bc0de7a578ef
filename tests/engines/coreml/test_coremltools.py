"""What importing coremltools, or its messages alone, does to a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import coreml_models
import pytest

from intaglio.engines.coreml.description import PackageDescription, describe, write_description
from intaglio.engines.coreml.package import write_package

# What coremltools does with frameworks: it looks for them once.
COREMLTOOLS = """
import logging
try:
    import torch
except ImportError:
    torch = None
logging.getLogger("coremltools").warning("never tried with this version")
"""


def run(program: str, *arguments: object, path: Path | None = None) -> str:
    """What a process of its own prints, on stdout and then on stderr."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [("", "True 0\nnever tried with this version\n"), ("alone=True", "False 40\n")],
)
def test_frameworks_are_hidden_in_our_own_processes_only(tmp_path: Path, arguments: str, printed: str) -> None:
    (tmp_path / "coremltools.py").write_text(COREMLTOOLS)
    (tmp_path / "torch.py").touch()
    program = (
        "import logging; from intaglio.engines.coreml.coremltools_ import import_coremltools; "
        f"ct = import_coremltools({arguments}); "
        "print(ct.torch is not None, logging.getLogger('coremltools').level); import torch"
    )
    assert run(program, path=tmp_path) == printed


def test_packages_are_read_without_coremltools(tmp_path: Path) -> None:
    converted = coreml_models.packaged(coreml_models.model("m (float[2] x) => (float[2] y) { y = Add(x, x) }"), {})
    package = tmp_path / "m.mlpackage"
    described = describe(converted)
    write_package(converted, package)
    write_description(package, PackageDescription(functions={"main": described}))
    program = """
import sys
from pathlib import Path
import numpy as np
from intaglio.engines.coreml.description import read_description
from intaglio.engines.coreml.evaluator import Evaluator
package = Path(sys.argv[1])
print(*read_description(package).functions, *Evaluator(package).run({"x": np.ones(2, np.float32)}).values())
print({"coremltools", "torch"} & sys.modules.keys())
"""
    assert run(program, package) == "main [2. 2.]\nset()\n"


def test_messages_are_those_of_coremltools() -> None:
    """In whichever order the two are loaded: protobuf has one class for a message."""
    ours = "from intaglio.engines.coreml.protobuf import model_class; ours = model_class(); "
    theirs = (
        "from intaglio.engines.coreml.coremltools_ import import_coremltools; import_coremltools(alone=True); "
        "from coremltools.proto.Model_pb2 import Model; "
    )
    for program in (ours + theirs, theirs + ours):
        assert run(f"{program}print(ours is Model, Model.FromString(ours().SerializeToString()))") == "True \n"
