"""Tokenizer files of a bundle, from GGUF metadata or from a Hugging Face directory.

What comes out is always the `tokenizer.json` of the `tokenizers` library, so that the runtime knows one
format only.
"""

from intaglio.exporters.tokenizer_directory import TOKENIZER_FILES, tokenizer_from_directory
from intaglio.exporters.tokenizer_files import TokenizerFiles
from intaglio.exporters.tokenizer_gguf import tokenizer_from_gguf

__all__ = ["TOKENIZER_FILES", "TokenizerFiles", "tokenizer_from_directory", "tokenizer_from_gguf"]
