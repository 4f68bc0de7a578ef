"""Our kernels as plugins of TensorRT: compiled ahead of time, so that an engine needs neither Python nor a library.

TensorRT calls them quickly deployable plugins; each is one kernel for each tactic, which the builder times. Its parser
finds them by the domain and the name of a node's op.
"""

from __future__ import annotations

from typing import Any

from intaglio.engines.nvidia.plugins.attention import FlashAttention, MaskedFlashAttention
from intaglio.engines.nvidia.plugins.plugin import Plugin, register
from intaglio.engines.nvidia.plugins.ternary import FewRows, ManyRows

PLUGINS: tuple[type[Plugin], ...] = (ManyRows, FewRows, FlashAttention, MaskedFlashAttention)


def register_plugins(trt: Any) -> None:
    """Registers all plugins with a TensorRT, once in a process."""
    for plugin in PLUGINS:
        if plugin.id not in _REGISTERED:
            register(trt, plugin(trt))
            _REGISTERED.add(plugin.id)


_REGISTERED = set[str]()
