"""Runs a function on several ranks: processes of one machine, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(ranks, *arguments)`` gives on each rank. A rank that raises, or dies, ends the others.

    Raises RuntimeError with the traces of the ranks that raised.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    # Imported once for all ranks of all tests; not run, for torch's threads do not live through a fork.
    context.set_forkserver_preload(["intaglio.trainer.loop", "pytorch_optimizer"])
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(target=_run, args=(pipes[rank][1], rank, world_size, port, function, arguments), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    results = []
    for receiver, _ in pipes:
        try:
            results.append(pickle.loads(receiver.recv_bytes()))
        except EOFError:
            results.append((False, "died"))
        if not results[-1][0]:
            for process in processes:
                process.kill()
    for process in processes:
        process.join()
    if not all(done for done, _ in results):
        raise RuntimeError("\n".join(f"rank {i}: {text}" for i, (done, text) in enumerate(results) if not done))
    return [value for _, value in results]


def _run(
    sender: Connection, rank: int, world_size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    from intaglio.trainer.parallel import started_ranks

    torch.set_num_threads(1)
    try:
        with started_ranks("cpu") as ranks:
            # By value: torch would send tensors as shared memory, which ends with the process.
            sender.send_bytes(pickle.dumps((True, function(ranks, *arguments))))
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
