"""The bundle: a folder with ``bundle.json``, one ONNX file a stage, ``weights.data`` and ``tokenizer/``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from intaglio.errors import BundleError, InputError
from intaglio.exporters.picture_schema import check_picture
from intaglio.output import interrupted

BUNDLE_FILE = "bundle.json"
WEIGHTS_FILE = "weights.data"

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
# A file of the bundle, never one outside it.
_PART = "[A-Za-z0-9_][A-Za-z0-9_.-]*"
FileName = Annotated[str, Field(pattern=f"^{_PART}(/{_PART})?$", max_length=200)]


DtypeName = Annotated[str, Field(pattern="^(b?float16|float32|float64|u?int(8|16|32|64)|bool)$")]
_LARGEST_SIZE = 2**31 - 1
Size = Annotated[int, Field(ge=0, le=_LARGEST_SIZE)]
# A stage's name becomes a file's.
Name = Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_-]*$")]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Dim(_Schema):
    """Bounds of a named dim. A dependent dim has an ``expression`` of others, which its size must equal."""

    min: int = Field(ge=0)
    max: int = Field(ge=1)
    opt: int | None = Field(default=None, ge=0)
    multiple_of: int = Field(default=1, ge=1)
    expression: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Dim:
        if not self.min <= (self.min if self.opt is None else self.opt) <= self.max:
            raise ValueError(f"min {self.min}, opt {self.opt} and max {self.max} must rise")
        if self.expression is not None:
            parse_expression(self.expression)
        return self


class TensorInfo(_Schema):
    """Name, dtype (as NumPy spells it) and shape of an input or output; strings in ``shape`` are dims."""

    name: str
    dtype: DtypeName
    shape: tuple[Size | str, ...]


class StageInfo(_Schema):
    """One graph of the bundle."""

    file: FileName
    sha256: Sha256
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


class WeightsInfo(_Schema):
    """The weights that all stages share. ``sha256`` covers name, dtype, shape and bytes of every tensor.

    ``flushed_to_zero`` counts values of the source that are too small for the bundle's dtype and became zero.
    """

    file: FileName
    bytes: int = Field(ge=0)
    tensors: int = Field(ge=0)
    sha256: Sha256
    flushed_to_zero: int = Field(default=0, ge=0)


class TokenizerInfo(_Schema):
    """Files of the tokenizer and its special tokens."""

    folder: FileName
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    bos_token_id: Size | None
    pad_token_id: Size | None
    eos_token_ids: tuple[Size, ...]
    has_chat_template: bool


class SourceFile(_Schema):
    """A file of the source checkpoint."""

    name: str
    bytes: int
    sha256: Sha256


class SourceInfo(_Schema):
    """Where the weights came from."""

    format: str
    files: tuple[SourceFile, ...]


class QuantizationInfo(_Schema):
    """How many tensors of the source were stored in which way, and what they became."""

    storage: str
    tensors: int
    bits: int
    group_size: int | None = None
    zero_point: int | None = None
    has_offsets: bool = False


class ComponentInfo(_Schema):
    """One model of a bundle: what it is, where it came from, how its weights were stored.

    ``assumed`` are configuration keys that no file of the source says: their values are those of the published model
    of these widths.
    """

    architecture: str
    config: dict[str, Any]
    assumed: tuple[str, ...] = ()
    quantization: tuple[QuantizationInfo, ...]
    source: SourceInfo
    unused_tensors: tuple[str, ...]


class AdapterInfo(_Schema):
    """An adapter that is in the weights, or beside quantized ones.

    ``modules`` says how many of its ``total_modules`` each component has; ``unused`` are the keys of the others.
    """

    name: str
    files: tuple[SourceFile, ...]
    strength: float
    ranks: tuple[int, ...]
    modules: dict[Name, int]
    total_modules: int
    unused: tuple[str, ...] = ()

    @property
    def matched(self) -> int:
        """How many modules of the adapter are the model's."""
        return sum(self.modules.values())


class TextToImageInfo(_Schema):
    """What a picture pipeline needs to know beside its graphs.

    ``text_encoder_layers`` are the hidden states that make the conditioning, in this order, ``text_length`` the tokens
    that every prompt is padded to. A distilled checkpoint takes no guidance; None is not known. ``shift`` is a static
    shift of the sigmas; None takes the empirical one.
    """

    text_encoder_layers: tuple[Size, ...] = Field(min_length=1)
    text_length: int = Field(ge=1, le=2**20)
    is_distilled: StrictBool | None
    shift: float | None = Field(default=None, gt=0)


Kind = Literal["text-generation", "text-to-image"]
# The components that make a pipeline of each kind, by role.
ROLES: dict[str, tuple[str, ...]] = {
    "text-generation": ("language_model",),
    "text-to-image": ("text_encoder", "transformer", "vae"),
}


class Bundle(_Schema):
    """The content of ``bundle.json``. ``components`` are by role; a partial picture bundle lacks some."""

    schema_version: Literal[2] = 2
    intaglio_version: str
    kind: Kind
    dtype: str
    components: dict[Name, ComponentInfo] = Field(min_length=1)
    stages: dict[Name, StageInfo] = Field(min_length=1)
    dims: dict[Name, Dim]
    weights: WeightsInfo
    tokenizer: TokenizerInfo | None
    text_to_image: TextToImageInfo | None = None
    adapters: tuple[AdapterInfo, ...] = ()

    @property
    def language_model(self) -> ComponentInfo:
        """The only component of a bundle for text generation."""
        return self.components["language_model"]

    @model_validator(mode="after")
    def _check(self) -> Bundle:
        roles = ROLES[self.kind]
        if unknown := sorted(self.components.keys() - set(roles)):
            raise ValueError(f"components has {unknown[0]}, which a bundle for {self.kind} has not")
        if (self.kind == "text-to-image") != (self.text_to_image is not None):
            raise ValueError(f"text_to_image belongs to bundles of that kind, and only to them; this is {self.kind}")
        if self.kind == "text-generation" or "text_encoder" in self.components:
            _check_vocabulary(self.components.get(roles[0]))
        for name, stage in self.stages.items():
            for tensor in stage.inputs:
                if unknown := [n for n in tensor.shape if isinstance(n, str) and n not in self.dims]:
                    raise ValueError(f"{name}: the input {tensor.name} has the dim {unknown[0]!r}, which dims lacks")
        for name, dim in self.dims.items():
            _check_expression(name, self.dims)
            if dim.max > _LARGEST_SIZE:  # only a model that others wrote has dims without an end
                raise ValueError(f"dims.{name}.max is {dim.max}, expected at most {_LARGEST_SIZE}")
        if self.kind == "text-to-image":
            check_picture(self)
        return self


def _check_expression(name: str, dims: Mapping[str, Dim], above: tuple[str, ...] = ()) -> None:
    """Refuses an expression with a name that is no dim, or that comes back to itself."""
    expression = dims[name].expression
    if expression is None:
        return
    for other in expression_names(expression):
        if other not in dims:
            raise ValueError(f"dims.{name} is {expression}, and dims lacks {other}")
        if other in (name, *above):
            raise ValueError(f"dims.{name} is {expression}, which depends on itself")
        _check_expression(other, dims, (name, *above))


def _check_vocabulary(component: ComponentInfo | None) -> None:
    vocab_size = component.config.get("vocab_size") if component else None
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or not 0 < vocab_size < 2**31:
        raise ValueError(f"config.vocab_size is {vocab_size!r:.100}, expected an integer above zero")


def is_bundle(path: Path) -> bool:
    """Whether ``path`` is a folder with a ``bundle.json``."""
    return (path / BUNDLE_FILE).is_file()


def read_bundle(path: Path) -> Bundle:
    """Reads and checks ``bundle.json``, and that the files it names are there. Raises BundleError."""
    file = path / BUNDLE_FILE
    if not file.is_file():
        if old := interrupted(path):
            raise BundleError(f"{path}: replacing it was cut short; the old one lies whole in {old}: rename it back")
        what = "no such folder" if not path.exists() else f"holds no {BUNDLE_FILE}"
        raise BundleError(f"{path}: {what}; expected a bundle. Make one with `intaglio export CHECKPOINT {path}`.")
    try:
        text = file.read_text("utf-8")
        bundle = Bundle.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise BundleError(
            f"{file}: {where}: {first['msg']}. It is damaged or of another schema version than this intaglio reads; "
            "export again."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{file}: cannot be read ({error})") from error
    _check_files(path, bundle)
    return bundle


def _check_files(path: Path, bundle: Bundle) -> None:
    names = [stage.file for stage in bundle.stages.values()] + [bundle.weights.file]
    if (path / bundle.weights.file).is_symlink():
        raise BundleError(f"{path / bundle.weights.file}: is a link, which runtimes refuse to follow; put a copy there")
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise BundleError(f"{path}: {', '.join(missing)} named in {BUNDLE_FILE} are missing; export again")
    size = (path / bundle.weights.file).stat().st_size
    if size != bundle.weights.bytes:
        raise BundleError(
            f"{path / bundle.weights.file}: has {size} bytes, expected {bundle.weights.bytes}; export again"
        )


_Operation = Callable[[int, int], int]


def _exact_division(a: int, b: int) -> int:
    if b == 0 or a % b:
        raise InputError(f"{a} is not a multiple of {b}")
    return a // b


_OPERATORS: dict[type[ast.operator], _Operation] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.Div: _exact_division,
}


def parse_expression(expression: str) -> ast.expr:
    """The syntax tree of a dependent dim's expression: names, integers and ``+ - * /``. Raises ValueError."""
    if len(expression) > 200:
        raise ValueError(f"a dim expression has {len(expression)} characters, expected at most 200")
    try:
        tree = ast.parse(expression, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the dim expression {expression!r} cannot be read") from error
    for node in ast.walk(tree):
        known = isinstance(node, ast.Name | ast.Load | ast.BinOp) or type(node) in _OPERATORS
        if not known and not (isinstance(node, ast.Constant) and type(node.value) is int):
            raise ValueError(f"the dim expression {expression!r} may hold only names, integers and + - * /")
    return tree


def expression_names(expression: str) -> list[str]:
    """The names in a dim expression. Raises ValueError."""
    return sorted({node.id for node in ast.walk(parse_expression(expression)) if isinstance(node, ast.Name)})


def evaluate_dim(expression: str, sizes: Mapping[str, int]) -> int | None:
    """The value of a dependent dim's expression; None if it holds a name that has no size.

    Raises InputError for a division that leaves a rest: sizes are never rounded.
    """

    def value(node: ast.expr) -> int | None:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return sizes.get(name)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = value(left), value(right)
                return None if a is None or b is None else _OPERATORS[type(op)](a, b)
        raise AssertionError(node)

    return value(parse_expression(expression))
