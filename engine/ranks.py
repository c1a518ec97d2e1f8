"""The ranks of a run: the processes that `torchrun` starts, and what they tell each other.

What a reader could get wrong: their group is not PyTorch's default one, which in each process belongs to the vLLM
engine there, and it speaks gloo on GPUs too: a step sends no more than the adapter's gradient and the rollouts.
Every rank has to make the same calls in the same order. A process that nobody launched is rank 0 of 1.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

PATIENCE = timedelta(hours=1)
"""For a rank that is still busy; where one has ended, those that wait for it notice."""
GIVE_WAY_SECONDS = 10
LAUNCHER_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|TORCH_NCCL_ASYNC_ERROR_HANDLING"
)


class RankError(RuntimeError):
    """Another rank has ended, so that nothing can go on."""


class Ranks:
    """This process among the others of the run; a context manager, which ends when all have come to its end."""

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        group: Any = None,
        *,
        local_rank: int = 0,
        local_world_size: int = 1,
    ) -> None:
        """Be one of `world_size`, in a process group if launched; `local_*` count on this machine. See `init`."""
        self.rank, self.world_size, self._group = rank, world_size, group
        self._local_rank, self._local_world_size = local_rank, local_world_size
        self.launcher = "python"
        """The command that starts a script as this one was started."""
        self._error_file: str | None = None

    @classmethod
    def init(cls) -> Ranks:
        """Connect to the other processes that `torchrun` started.

        The launcher's variables are then taken out of the environment: an engine would take them for its own.
        """
        launched = {name: value for name, value in os.environ.items() if LAUNCHER_VARIABLES.fullmatch(name)}
        if "TORCHELASTIC_RUN_ID" not in launched:
            return cls()
        from torch.distributed import PrefixStore, ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]
        from torch.distributed.rendezvous import rendezvous

        store, rank, world_size = next(iter(rendezvous("env://", timeout=PATIENCE)))
        group = ProcessGroupGloo(PrefixStore("gspo", store), rank, world_size, PATIENCE)
        local_rank, local_world_size = int(launched["LOCAL_RANK"]), int(launched["LOCAL_WORLD_SIZE"])
        ranks = cls(rank, world_size, group, local_rank=local_rank, local_world_size=local_world_size)
        ranks._error_file = launched.get("TORCHELASTIC_ERROR_FILE")
        ranks.launcher = _launcher(launched)
        for name in launched:
            del os.environ[name]
        return ranks

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes."""
        return self.rank == 0

    def __enter__(self) -> Ranks:
        """Return the ranks."""
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        """Wait for the others, unless something went wrong."""
        if self._group is not None:
            if exc_type is None:
                with suppress(RankError):  # whoever cannot be waited for has failed after its work was done
                    self.all_gather(None)
            self._group = None  # closes the connections, from which the others learn of it

    def take_a_gpu(self) -> None:
        """Make one GPU of this machine the only one that this process sees; ValueError where there are too few."""
        if self._local_world_size == 1:
            return
        import torch

        if (count := torch.cuda.device_count()) == 0:
            return
        if self._local_world_size > count:
            raise ValueError(
                f"{self._local_world_size} ranks were started here for {count} GPUs; each needs its own"
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[self._local_rank].strip()

    def shard(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's part of what all hold: every `world_size`-th item."""
        return items[self.rank :: self.world_size]

    def unshard(self, shard: Sequence[T]) -> list[T]:
        """Return all items, in their order, from the shards of all ranks."""
        parts = self.all_gather(shard)
        return [parts[n % len(parts)][n // len(parts)] for n in range(sum(map(len, parts)))]

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of ranks."""
        if self._group is None:
            return [value]
        import torch

        data = _pickled(value)
        sizes = self._all(torch.tensor([len(data)]))
        longest = int(max(sizes))
        parts = self._all(torch.cat([data, data.new_zeros(longest - len(data))]))
        return [_unpickled(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def agree(self, value: object) -> bool:
        """Return whether all ranks hold the same value."""
        return len(set(self.all_gather(value))) == 1

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, whatever the others gave."""
        if self._group is None:
            return value
        import torch

        data = _pickled(value if self.is_main else None)
        size = torch.tensor([len(data)])
        self._wait("broadcast", size, 0)
        data = data if self.is_main else data.new_empty(int(size))
        self._wait("broadcast", data, 0)
        return value if self.is_main else _unpickled(data)

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, to the bit the same on all of them.

        The tensors travel as one, in the dtype that they share.
        """
        if self._group is None:
            return
        import torch

        total = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in tensors])
        self._wait("allreduce", total)
        for tensor, part in zip(tensors, total.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def log_to(self, folder: Path) -> None:
        """Send what this process prints from now on to `folder`/log.txt, if it is not rank 0."""
        if not self.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            sys.stdout.flush()
            sys.stderr.flush()
            with (folder / "log.txt").open("a") as log:
                for descriptor in (1, 2):
                    os.dup2(log.fileno(), descriptor)

    def report(self, message: str) -> None:
        """Have the launcher show this when all have ended, as what ended them."""
        if self._error_file:
            details = {"py_callstack": message, "timestamp": str(int(time.time()))}
            text = json.dumps({"message": {"message": message, "extraInfo": details}})
            Path(self._error_file).write_text(text)

    def give_way(self) -> None:
        """Wait, so that the launcher sees which rank failed first and ends this one; return after a while."""
        time.sleep(GIVE_WAY_SECONDS)

    def _all(self, tensor: Tensor) -> list[Tensor]:
        parts = [tensor.new_empty(tensor.shape) for _ in range(self.world_size)]
        self._wait("allgather", parts, tensor)
        return parts

    def _wait(self, collective: str, *arguments: Any) -> None:
        try:
            getattr(self._group, collective)(*arguments).wait()
        except RuntimeError as error:  # gloo's only kind: a connection was closed, or patience ran out
            self._group = None  # so that whoever waits for this rank notices in turn
            reason = str(error).splitlines()[0]
            raise RankError(
                f"another rank has ended or does not answer; its own error says why ({reason})"
            ) from None


def _launcher(launched: dict[str, str]) -> str:
    node = ""
    if launched["GROUP_WORLD_SIZE"] != "1":
        node = (
            f"--nnodes {launched['GROUP_WORLD_SIZE']} --node-rank {launched['GROUP_RANK']} "
            f"--master-addr {launched['MASTER_ADDR']} --master-port {launched['MASTER_PORT']} "
        )
    # Without the two hyphens torchrun would take --run for an option of its own.
    return f"torchrun {node}--nproc-per-node {launched['LOCAL_WORLD_SIZE']} --"


def _pickled(value: object) -> Tensor:
    import torch

    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
