"""Text generation: prefill, then one token at a time over a key-value cache.

Shape suffixes: B batch, S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from intaglio.engines.engine import Engine
from intaglio.engines.target import session_options
from intaglio.errors import InputError
from intaglio.progress import Progress, ProgressCallback
from intaglio.runtimes.decoding import Decoding
from intaglio.runtimes.lora import Adapters
from intaglio.runtimes.sampling import Sampler, SamplingParams
from intaglio.runtimes.tokenizer import Tokenizer

# A text to continue, or the messages of a conversation to answer.
Prompt = str | Sequence[Mapping[str, Any]]


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


class GenerationOptions(TypedDict, total=False):
    """Options of a generation.

    max_new_tokens: most tokens to write (128). temperature: 0 is greedy (0). top_k, top_p, min_p: filters of a draw
    (none). repetition_penalty: above 1 makes tokens of the prompt and the text so far less probable, also in greedy
    choices (none). seed: makes draws repeatable (none). chat: the prompt is a user's message for the model's chat
    template (False). progress: a callback for ``tokens``, which can cancel.
    """

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    chat: bool
    progress: ProgressCallback | None


class _Generation:
    """Checked options, with their defaults."""

    def __init__(
        self,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        chat: bool = False,
        progress: ProgressCallback | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        self.max_new_tokens, self.chat, self.progress = max_new_tokens, chat, progress
        self.sampling = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )


class TextGenerationPipeline:
    """Writes text with the engine of a language model. Stages are loaded when they are first needed.

    ``threads`` (of the target cpu) 0 takes one a core; ``compute_units`` (of coreml) is ``all``, ``cpu``, ``cpu+gpu``
    or ``cpu+ne``. ``lora`` are adapters by file, with their strengths. Raises InputError, and the errors of
    :class:`~intaglio.runtimes.lora.Adapters`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        threads: int = 0,
        compute_units: str | None = None,
        lora: Mapping[str, float] | None = None,
    ) -> None:
        self.engine = engine
        self._sessions: dict[str, Any] = {}
        self._adapters = Adapters(engine, lora or {})
        self._how = session_options(engine.info.target, threads=threads, compute_units=compute_units)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises BundleError if it has none."""
        return Tokenizer.of_bundle(self.engine.bundle_path, self.engine.bundle)

    def _session(self, stage: str) -> Any:
        if stage not in self._sessions:
            self._sessions[stage] = self._adapters.load(stage, **self._how)
        return self._sessions[stage]

    def set_strengths(self, strengths: Mapping[str, float]) -> None:
        """Other strengths of the adapters, by file; 0 for those not named. Raises InputError, EngineError."""
        self._adapters.set_strengths(strengths, self._sessions)

    def warm_up(self) -> None:
        """Loads the tokenizer and the stage that writes, which the first prompt otherwise waits for."""
        _ = self.tokenizer, self._session("generate")

    @property
    def context_length(self) -> int:
        """The most tokens that prompt and continuation may have together, in this engine."""
        dims = self.engine.dims
        return min(dims["total_sequence"].max, dims["past_sequence"].max + 1)

    def __call__(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> TextOutput:
        """Continues ``prompt``, or answers it if it is a list of messages (``role`` and ``content``).

        Raises InputError for an empty prompt, one that leaves no room in the context, or an option out of range;
        EngineError.
        """
        return self.batch([prompt], **options)[0]

    def batch(self, prompts: Sequence[Prompt], **options: Unpack[GenerationOptions]) -> list[TextOutput]:
        """Continues several prompts at once (padded on the left). Options and errors as in a call."""
        generation = _Generation(**options)
        ids = [self._encode(prompt, generation.chat) for prompt in prompts]
        if not ids:
            return []
        rows: list[list[int]] = [[] for _ in ids]
        ended = [False] * len(ids)
        for tokens in self._tokens(ids, generation):
            for row, token in enumerate(tokens):
                if not ended[row]:
                    ended[row] = token in self.tokenizer.eos_token_ids
                    rows[row].append(token)
            if all(ended):
                break
        return [
            TextOutput(
                # An end token need not be one that decoding skips.
                text=self.tokenizer.decode(row[:-1] if stopped else row),
                token_ids=tuple(row),
                prompt_tokens=len(prompt_ids),
                finish_reason="stop" if stopped else "length",
            )
            for row, prompt_ids, stopped in zip(rows, ids, ended, strict=True)
        ]

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Iterator[str]:
        """Yields the continuation of ``prompt``, a piece for each token, and at the end what is left of a character.

        A piece may be empty, and never holds half a character. Options and errors as in a call; the prompt and the
        options are checked before this returns.
        """
        generation = _Generation(**options)
        return self._pieces(self._encode(prompt, generation.chat), generation)

    def _pieces(self, ids: list[int], generation: _Generation) -> Iterator[str]:
        text = self.tokenizer.stream()
        for (token,) in self._tokens([ids], generation):
            if token in self.tokenizer.eos_token_ids:
                break
            yield text.put(token)
        yield text.end()

    def score(self, text: str) -> TextScore:
        """Scores ``text`` with the ``score`` stage. Raises InputError for less than two tokens."""
        ids = self._encode(text, chat=False, room=0)
        if len(ids) < 2:
            raise InputError(f"the text has {len(ids)} tokens; at least two are needed for a score")
        tokens_BS = np.array([ids], np.int64)
        feeds = {
            "input_ids": tokens_BS,
            "attention_mask": np.ones_like(tokens_BS),
            "position_ids": np.arange(len(ids), dtype=np.int64)[None],
        }
        logits_SV = self._session("score").run(feeds, ["logits"])["logits"][0, :-1].astype(np.float64)
        logits_SV -= logits_SV.max(axis=-1, keepdims=True)
        chosen = np.take_along_axis(logits_SV, tokens_BS[0, 1:, None], axis=-1)[:, 0]
        logprobs = chosen - np.log(np.exp(logits_SV).sum(axis=-1))
        return TextScore(tuple(ids), tuple(float(value) for value in logprobs))

    def _encode(self, prompt: Prompt, chat: bool, room: int = 1) -> list[int]:
        """Token ids of a prompt that leaves ``room`` in the context."""
        if isinstance(prompt, str):
            messages: Sequence[Mapping[str, Any]] = [{"role": "user", "content": prompt}]
        else:
            messages, chat = prompt, True
        if chat:
            text = self.tokenizer.apply_chat_template(messages)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = self.tokenizer.encode(str(prompt))
        if not ids:
            raise InputError("the prompt is empty, and this model has no token that begins a text; give it some text")
        if len(ids) + room > self.context_length:
            raise InputError(
                f"the prompt has {len(ids)} tokens, no room is left in a context of {self.context_length}; shorten it"
            )
        if len(ids) > (longest := self.engine.dims["sequence"].max):
            raise InputError(f"the prompt has {len(ids)} tokens, but the engine was compiled for at most {longest}")
        return ids

    def _tokens(self, prompts: Sequence[Sequence[int]], generation: _Generation) -> Iterator[list[int]]:
        """The next token of every row, until there are enough or the context is full."""
        sampler = Sampler(generation.sampling, self._ids_without_token)
        decoding = Decoding(self._session("generate"), prompts, self.tokenizer.pad_token_id or 0)
        so_far = [list(prompt) for prompt in prompts]
        steps = min(generation.max_new_tokens, self.context_length - decoding.length)
        count = Progress(generation.progress, "tokens", steps, "tokens")
        for _ in range(steps):
            tokens_B = sampler.sample(decoding.step(), so_far)
            count.advance(1)
            yield [int(token) for token in tokens_B]
            for row, token in zip(so_far, tokens_B, strict=True):
                row.append(int(token))
            decoding.put(tokens_B)

    @cached_property
    def _ids_without_token(self) -> np.ndarray:
        return self.tokenizer.ids_without_token(self.engine.bundle.language_model.config["vocab_size"])
