"""Runs a GGUF file in llama.cpp: seconds of prefill and decode for lines on stdin.

Started by ``bench`` with the request as JSON on the command line. llama.cpp's own interface is called, because the
Python class over it copies logits that nobody reads.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from typing import Any

import numpy as np

from intaglio.runtimes.competitors.text_protocol import answer_generations


class LlamaGeneration:
    """One generation in a context of llama.cpp, which it empties first."""

    def __init__(self, api: Any, context: Any, vocabulary: int, prompt: list[int]) -> None:
        self._api, self._context, self._vocabulary = api, context, vocabulary
        self._waiting = prompt
        api.llama_memory_clear(api.llama_get_memory(context), True)

    def step(self) -> np.ndarray:
        """Logits of the last token that was waiting."""
        tokens = (ctypes.c_int32 * len(self._waiting))(*self._waiting)
        code = self._api.llama_decode(self._context, self._api.llama_batch_get_one(tokens, len(tokens)))
        if code:
            raise RuntimeError(f"llama_decode gave {code}")
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, (1, self._vocabulary))

    def put(self, tokens_B: np.ndarray) -> None:
        """Appends a token."""
        self._waiting = [int(tokens_B[0])]


def main() -> int:
    """Answers with the version and what it was built with, then the seconds of a generation to every line."""
    request = json.loads(sys.argv[1])
    # Imported by name: it is no dependency, and its types are not installed with this package.
    package: Any = importlib.import_module("llama_cpp")
    api = package.llama_cpp
    api.llama_log_set(_SILENT, None)
    api.llama_backend_init()
    parameters = api.llama_model_default_params()
    parameters.use_extra_bufts = request["extra_buffers"]
    model = api.llama_model_load_from_file(request["gguf"].encode(), parameters)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {request['gguf']}")
    options = api.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = request["context"], request["context"], 512
    options.n_threads = options.n_threads_batch = request["threads"]
    context = api.llama_init_from_model(model, options)
    if not context:
        raise SystemExit(f"llama.cpp has no context of {request['context']} tokens for {request['gguf']}")
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    built = api.llama_print_system_info().decode().strip(" |")
    sys.stdout.write(f"llama-cpp-python {package.__version__}, {built}\n")
    sys.stdout.flush()
    return answer_generations(lambda prompt: LlamaGeneration(api, context, vocabulary, prompt))


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _SILENT(level: int, text: bytes, data: Any) -> None:  # noqa: N802 - a constant to llama.cpp
    """Nothing is logged: bench words its own errors."""


if __name__ == "__main__":
    sys.exit(main())
