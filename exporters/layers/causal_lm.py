"""The stages that decoder language models share.

``generate`` is prefill and decode with a key-value cache; its logits are those of the last position only,
since the head over a whole prompt is the largest tensor of a run and nothing reads it. ``score`` has no
cache and gives the logits of every position. ``encode`` gives chosen hidden states only: it stops at the last layer
that they need. ``text_encoder`` is that for pipelines that draw: it counts positions itself, padding included, and
joins the hidden states to one conditioning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.exporters.architecture import Input, Stage
from intaglio.exporters.bundle import Dim
from intaglio.exporters.config import RopeScaling, context_length
from intaglio.exporters.layers.attention import count_up
from intaglio.exporters.layers.taps import forget_taps, tap

# Past keys and values of each layer, both [B, K, P, E].
Cache = list[tuple[ir.Value, ir.Value]]


class DecoderConfig(Protocol):
    """What the stages need to know of a config."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rope_scaling(self) -> RopeScaling | None: ...


def decoder_stages(config: DecoderConfig, hidden_state_layers: tuple[int, ...], dtype: ir.DataType) -> dict[str, Stage]:
    """The stages of a model whose forward is ``(input_ids, attention_mask, position_ids, past, last_only)``.

    The model returns logits, the new cache, and its hidden states: the embeddings, the output of each layer but
    the last, and the final norm's output, as transformers numbers them. Those named in ``hidden_state_layers``
    become outputs. Its ``model`` runs a given number of layers: ``(input_ids, …, past, depth)``. The stage
    ``encode`` and ``text_encoder`` are there if hidden states are, and are exported when they are asked for. The cache
    has the graph's ``dtype``, logits are float32.
    """
    cache_shape = ("batch", config.num_key_value_heads, "past_sequence", config.head_dim)
    present_shape = ("batch", config.num_key_value_heads, "total_sequence", config.head_dim)
    cache_inputs = tuple(
        Input(f"past_key_values.{layer}.{part}", dtype, cache_shape)
        for layer in range(config.num_hidden_layers)
        for part in ("key", "value")
    )

    def outputs(logits: ir.Value, positions: int | str, hidden_states: list[ir.Value]) -> dict[str, ir.Value]:
        logits.shape = ir.Shape(["batch", positions, config.vocab_size])
        chosen = {f"hidden_states.{layer}": hidden_states[layer] for layer in hidden_state_layers}
        return {"logits": logits, **chosen}

    def generate(model: nn.Module, op: OpBuilder, x: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        values = [x[i.name] for i in cache_inputs]
        past = list(zip(values[0::2], values[1::2], strict=True))
        logits, present, hidden_states = model(op, x["input_ids"], x["attention_mask"], x["position_ids"], past, True)
        result = outputs(logits, 1, hidden_states)
        for layer, (key, value) in enumerate(present):
            key.shape = value.shape = ir.Shape(present_shape)
            result[f"present.{layer}.key"], result[f"present.{layer}.value"] = key, value
        return result

    def score(model: nn.Module, op: OpBuilder, x: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        logits, _, hidden_states = model(op, x["input_ids"], x["attention_mask"], x["position_ids"], None, False)
        return outputs(logits, "sequence", hidden_states)

    def encode(model: Any, op: OpBuilder, x: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        depth = max(hidden_state_layers)
        tokens = (x["input_ids"], x["attention_mask"], x["position_ids"])
        hidden_states, _ = model.model(op, *tokens, None, depth)
        return {f"hidden_states.{layer}": hidden_states[layer] for layer in hidden_state_layers}

    def text_encoder(model: Any, op: OpBuilder, x: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        ids_BS = x["input_ids"]
        positions_S = count_up(op, op.Shape(ids_BS, start=1, end=2))
        position_ids_BS = op.Expand(op.Unsqueeze(positions_S, [0]), op.Shape(ids_BS))
        position_ids_BS.shape = ids_BS.shape
        hidden_states, _ = model.model(op, ids_BS, x["attention_mask"], position_ids_BS, None, max(hidden_state_layers))
        forget_taps(op.builder.graph)  # of all layers at once they are larger than the model's weights are
        for layer in sorted({0, 1, *hidden_state_layers}):
            if layer < len(hidden_states):
                tap(hidden_states[layer], f"te_hidden_{layer}")
        return {"prompt_embeds": op.Concat(*(hidden_states[layer] for layer in hidden_state_layers), axis=-1)}

    stages = {
        "generate": Stage((*_token_inputs("total_sequence"), *cache_inputs), generate),
        "score": Stage(_token_inputs("sequence"), score),
    }
    if hidden_state_layers:
        stages["encode"] = Stage(_token_inputs("sequence"), encode, by_default=False)
        tokens = ("batch", "text_tokens")
        text_inputs = tuple(Input(name, ir.DataType.INT64, tokens) for name in ("input_ids", "attention_mask"))
        stages["text_encoder"] = Stage(text_inputs, text_encoder, by_default=False)
    return stages


def _token_inputs(mask_length: str) -> tuple[Input, ...]:
    return (
        Input("input_ids", ir.DataType.INT64, ("batch", "sequence")),
        Input("attention_mask", ir.DataType.INT64, ("batch", mask_length)),
        Input("position_ids", ir.DataType.INT64, ("batch", "sequence")),
    )


def decoder_dims(config: DecoderConfig) -> dict[str, Dim]:
    """The dims table of :func:`decoder_stages`."""
    context = context_length(config.max_position_embeddings, config.rope_scaling)
    return {
        "batch": Dim(min=1, opt=1, max=1024),
        "sequence": Dim(min=1, opt=1, max=context),
        "past_sequence": Dim(min=0, opt=min(512, context - 1), max=context - 1),
        "total_sequence": Dim(min=1, max=context, expression="past_sequence + sequence"),
        "text_tokens": Dim(min=1, opt=min(512, context), max=context),
    }
