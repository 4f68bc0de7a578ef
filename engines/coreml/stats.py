"""What a saved Core ML package holds, read off the package itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from intaglio.engines.coreml.evaluator.blobs import Blobs
from intaglio.engines.coreml.evaluator.package import read_program
from intaglio.engines.coreml.evaluator.program import Binding, Block, Constant, Function, Operation, TensorType

_ATTENTION = "scaled_dot_product_attention"
_COMPRESSED = "constexpr_"


@dataclass(frozen=True)
class Weights:
    """How many weights there are, and in how many bytes they are stored, with all that unpacking them needs."""

    count: int
    bytes: int

    @property
    def bits(self) -> float:
        """Bits a weight; 0 where there are none."""
        return self.bytes * 8 / self.count if self.count else 0.0


@dataclass(frozen=True)
class PackageStats:
    """``quantized`` are the weights that Core ML unpacks, ``weights`` all of them. What several share counts once.

    ``bytes`` is the size of the whole package. ``ops`` counts operations by type, constants left out, of all functions.
    """

    bytes: int
    quantized: Weights
    weights: Weights
    fused_attentions: int
    ops: dict[str, int]


def weight_stats(package: Path) -> PackageStats:
    """Reads a package. Raises EngineError if it is damaged, RuntimeMissingError without coremltools."""
    program = read_program(package)
    counter = _Counter()
    ops: Counter[str] = Counter()
    for function in program.functions.values():
        counter.add(function)
        ops.update(op.type for op in function.block.all_operations() if not op.type.startswith("const"))
    return PackageStats(
        bytes=sum(file.stat().st_size for file in package.rglob("*") if file.is_file()),
        quantized=counter.quantized(),
        weights=counter.all(),
        fused_attentions=ops[_ATTENTION],
        ops=dict(sorted(ops.items())),
    )


# What a constant is told from others by: where its blob lies.
_Place = tuple[Path, int]


class _Counter:
    """Counts blobs and what they stand for. Constants in the program itself are a few values each, and not counted."""

    def __init__(self) -> None:
        self._files: dict[Path, Blobs] = {}
        self._sizes: dict[_Place, int] = {}
        self._packed: dict[frozenset[_Place], int] = {}
        self._plain: dict[_Place, int] = {}

    def quantized(self) -> Weights:
        """The weights that are stored packed."""
        places = set().union(*self._packed)
        return Weights(sum(self._packed.values()), sum(self._sizes[place] for place in places))

    def all(self) -> Weights:
        """These and the others."""
        places = set().union(self._plain, *self._packed)
        count = sum(self._packed.values()) + sum(self._plain.values())
        return Weights(count, sum(self._sizes[place] for place in places))

    def add(self, function: Function) -> None:
        for block in _blocks(function.block):
            makers = {value.name: op for op in block.operations for value in op.outputs}
            inner = {name for op in block.operations if op.type.startswith(_COMPRESSED) for name in op.references()}
            for op in block.operations:
                if op.type == "const":
                    self._add_plain(op)
                elif op.type.startswith(_COMPRESSED) and op.outputs[0].name not in inner:
                    self._packed[frozenset(self._places(op, makers))] = _size(op.outputs[0].type)

    def _add_plain(self, op: Operation) -> None:
        for place in self._blobs(op.arguments["val"]):
            self._plain[place] = _size(op.outputs[0].type)

    def _places(self, op: Operation, makers: dict[str, Operation]) -> Iterator[_Place]:
        """The blobs that a compressed weight is unpacked from, those of its tables included."""
        for bindings in op.arguments.values():
            yield from self._blobs(bindings)
        for name in op.references():
            if name in makers:
                yield from self._places(makers[name], makers)

    def _blobs(self, bindings: Iterable[Binding]) -> Iterator[_Place]:
        for binding in bindings:
            if isinstance(binding, Constant) and binding.file is not None:
                file = self._files.setdefault(binding.file, Blobs(binding.file))
                place = binding.file, binding.offset
                self._sizes[place] = file.stored_bytes(binding.offset)
                yield place


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for op in block.operations:
        for inner in op.blocks:
            yield from _blocks(inner)


def _size(kind: object) -> int:
    assert isinstance(kind, TensorType) and kind.shape is not None
    return math.prod(size or 1 for size in kind.shape)
