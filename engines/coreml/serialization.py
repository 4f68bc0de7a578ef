"""MIL programs as protobuf messages and a weight file that is written weight by weight. Imports coremltools."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools import proto
from coremltools.converters.mil.backend.mil.helper import create_file_value_tensor, types_to_proto_primitive
from coremltools.converters.mil.backend.mil.load import CoreMLProtoExporter, MILProtoExporter
from coremltools.converters.mil.mil import Program, Var, types

from intaglio.engines.coreml.blob_file import BlobFile
from intaglio.engines.coreml.deferred import Deferred, pack

WEIGHT_FILE = "weights/weight.bin"


def serialize(program: Program, blobs: BlobFile, specification_version: int) -> proto.Model_pb2.Model:
    """The model of a program whose passes have run; its weights go to ``blobs``."""
    body = _Exporter(program, blobs, specification_version).export()
    return CoreMLProtoExporter(
        program,
        body,
        predicted_feature_name=None,
        predicted_probabilities_name=None,
        classifier_config=None,
        convert_to="mlprogram",
        convert_from="milinternal",
        specification_version=specification_version,
    ).export(specification_version)


class _Exporter(MILProtoExporter):
    """coremltools' own but for weights: theirs are unpacked arrays, which are held until the end."""

    def __init__(self, program: Program, blobs: BlobFile, specification_version: int) -> None:
        super().__init__(program, "", specification_version)
        self._blobs = blobs
        self._values: dict[Var, proto.MIL_pb2.Value] = {}

    def create_file_value(self, var: Var) -> proto.MIL_pb2.Value:
        if var not in self._values:
            primitive = var.sym_type.get_primitive()
            name = types.builtin_to_string(primitive)
            self._values[var] = create_file_value_tensor(
                file_name=f"@model_path/{WEIGHT_FILE}",
                offset=self._blobs.write(name, var.val.size, _bytes_of(var.val, primitive)),
                dim=var.val.shape,
                data_type=types_to_proto_primitive(primitive),
            )
        return self._values[var]


def _bytes_of(value: np.ndarray, primitive: Any) -> np.ndarray:
    if isinstance(value, Deferred):
        return value.packed()
    if types.is_sub_byte(primitive):
        return pack(value, primitive.get_bitwidth())
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
