"""Text generation: prefill, then one token at a time over a key-value cache.

Shape suffixes: B batch, S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np

from intaglio.engines.compile import Engine
from intaglio.errors import BundleError, InputError
from intaglio.progress import Progress, ProgressCallback
from intaglio.runtimes.decoding import Decoding
from intaglio.runtimes.sampling import Sampler, SamplingParams
from intaglio.runtimes.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextOutput:
    """A continuation, without its prompt. ``finish_reason`` is ``stop`` at an end token, else ``length``."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class TextScore:
    """What a model gives a text: natural log-probabilities of each token after the first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean negative log-probability."""
        return float(np.exp(-np.mean(self.logprobs)))


class TextGenerationPipeline:
    """Writes text with the engine of a language model. Stages are loaded when they are first needed.

    ``threads`` 0 takes one a core.
    """

    def __init__(self, engine: Engine, *, threads: int = 0) -> None:
        if threads < 0:
            raise InputError(f"threads is {threads}, expected 0 (one a core) or more")
        self.engine = engine
        self._threads = threads

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises BundleError if it has none."""
        info = self.engine.bundle.tokenizer
        if info is None:
            raise BundleError(
                f"{self.engine.bundle_path}: holds no tokenizer, since its source had no tokenizer.json; add one beside "
                "the checkpoint and export again"
            )
        return Tokenizer(
            self.engine.bundle_path / info.folder,
            bos_token=info.bos_token,
            eos_token=info.eos_token,
            pad_token=info.pad_token,
            bos_token_id=info.bos_token_id,
            pad_token_id=info.pad_token_id,
            eos_token_ids=info.eos_token_ids,
        )

    @cached_property
    def _generate(self) -> Any:
        return self.engine.load("generate", threads=self._threads)

    @cached_property
    def _score(self) -> Any:
        return self.engine.load("score", threads=self._threads)

    @property
    def context_length(self) -> int:
        """The most tokens that prompt and continuation may have together."""
        dims = self.engine.dims
        return dims["total_sequence" if "total_sequence" in dims else "sequence"].max

    @overload
    def __call__(self, prompt: str, **options: Any) -> TextOutput: ...
    @overload
    def __call__(self, prompt: Sequence[str], **options: Any) -> list[TextOutput]: ...
    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        chat: bool = False,
        progress: ProgressCallback | None = None,
    ) -> TextOutput | list[TextOutput]:
        """Continues one prompt, or several in one batch (padded on the left).

        ``temperature`` 0 is greedy. ``chat`` puts the prompt through the model's chat template as a user's message.
        Raises InputError for an empty prompt or one that leaves no room in the context, EngineError.
        """
        single = isinstance(prompt, str)
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        ids = [self._encode(text, chat) for text in prompts]
        count = Progress(progress, "tokens", max_new_tokens, "tokens")
        rows: list[list[int]] = [[] for _ in ids]
        ended = [False] * len(ids)
        for tokens in self._tokens(ids, max_new_tokens, params):
            for row, token in enumerate(tokens):
                if not ended[row]:
                    ended[row] = token in self.tokenizer.eos_token_ids
                    rows[row].append(token)
            count.advance(1)
            if all(ended):
                break
        outputs = [
            TextOutput(
                text=self.tokenizer.decode(row),
                token_ids=tuple(row),
                prompt_tokens=len(prompt_ids),
                finish_reason="stop" if stopped else "length",
            )
            for row, prompt_ids, stopped in zip(rows, ids, ended, strict=True)
        ]
        return outputs[0] if single else outputs

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        chat: bool = False,
    ) -> Iterator[str]:
        """Yields the continuation of ``prompt`` piece by piece; a piece may be empty, never half a character.

        Options and errors as in a call.
        """
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        text = self.tokenizer.stream()
        for (token,) in self._tokens([self._encode(prompt, chat)], max_new_tokens, params):
            if token in self.tokenizer.eos_token_ids:
                break
            yield text.put(token)
        yield text.end()

    def score(self, text: str) -> TextScore:
        """Scores ``text`` with the ``score`` stage. Raises InputError for less than two tokens."""
        ids = self._encode(text, chat=False)
        if len(ids) < 2:
            raise InputError(f"the text has {len(ids)} tokens; at least two are needed for a score")
        tokens_BS = np.array([ids], np.int64)
        feeds = {
            "input_ids": tokens_BS,
            "attention_mask": np.ones_like(tokens_BS),
            "position_ids": np.arange(len(ids), dtype=np.int64)[None],
        }
        logits_SV = self._score.run(feeds, ["logits"])["logits"][0, :-1].astype(np.float64)
        logits_SV -= logits_SV.max(axis=-1, keepdims=True)
        chosen = np.take_along_axis(logits_SV, tokens_BS[0, 1:, None], axis=-1)[:, 0]
        logprobs = chosen - np.log(np.exp(logits_SV).sum(axis=-1))
        return TextScore(tuple(ids), tuple(float(value) for value in logprobs))

    def _encode(self, prompt: str, chat: bool) -> list[int]:
        if chat:
            prompt = self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        ids = self.tokenizer.encode(prompt, add_special_tokens=not chat)
        if not ids:
            raise InputError("the prompt is empty, and this model has no token that begins a text; give it some text")
        if len(ids) >= self.context_length:
            raise InputError(
                f"the prompt has {len(ids)} tokens, which leaves no room in a context of {self.context_length}; shorten it"
            )
        return ids

    def _tokens(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, params: SamplingParams
    ) -> Iterator[list[int]]:
        """The next token of every row, ``max_new_tokens`` times or until the context is full."""
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        sampler = Sampler(params)
        decoding = Decoding(self._generate, prompts, self.tokenizer.pad_token_id or 0)
        for _ in range(min(max_new_tokens, self.context_length - decoding.length)):
            tokens_B = sampler.sample(decoding.step())
            yield [int(token) for token in tokens_B]
            decoding.put(tokens_B)
