"""The kernels without Python and onnxruntime: with sanitizers here, and for ARM under QEMU.

``cpp/check_kernels.cpp`` compares every format with a plain reference. It is built with CMake; what is missing for that
is installed by ``apt-get install cmake g++ g++-aarch64-linux-gnu qemu-user``. Tests skip without it, unless
INTAGLIO_REQUIRE_MODELS is set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent / "cpp"
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def need(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if not missing:
        return
    message = (
        f"{', '.join(missing)} not found; run apt-get install cmake g++ g++-aarch64-linux-gnu qemu-user to check "
        "the kernels with sanitizers and on ARM"
    )
    if os.environ.get("INTAGLIO_REQUIRE_MODELS"):
        pytest.fail(message)
    pytest.skip(message)


def build(folder: Path, *options: str) -> Path:
    steps = (
        ["cmake", "-S", str(SOURCE), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", *options],
        ["cmake", "--build", str(folder), "--target", "check_kernels", "--parallel", str(os.cpu_count() or 1)],
    )
    for command in steps:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning:" not in done.stderr, done.stderr
    return folder / "check_kernels"


def check(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_instruction_set_of_this_machine_passes_with_sanitizers(tmp_path: Path) -> None:
    need("cmake")
    said = check(str(build(tmp_path, "-DINTAGLIO_SANITIZE=ON")))
    assert "portable: exact" in said


def test_the_arm_kernels_pass_under_qemu(tmp_path: Path) -> None:
    need("cmake", ARM_COMPILER, ARM_EMULATOR)
    program = build(
        tmp_path,
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={ARM_COMPILER}",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
    )
    said = check(ARM_EMULATOR, "-cpu", "max", str(program), "portable", "neon", "neon_i8mm")
    # The fast kernels took products, with few rows and many, and were not passed over.
    for name in ("neon", "neon_i8mm"):
        line = next(line for line in said.splitlines() if line.startswith(f"{name}:"))
        assert int(line.split("fast ")[1].split(",")[0]) > 250, said
