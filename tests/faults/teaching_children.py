"""What a child that teaches does to itself before its command, alongside `children.py`: a disk that is full while one
of its files is written, a loss or gradient that is no number, and memory that ends.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from tests.faults.children import work_in


def suffer(folder: str, fault: str, *arguments: Any) -> None:
    """Work in a folder, under one of the faults below."""
    work_in(folder)
    globals()[fault](*arguments)


def fill_disk(name: str, nth: int) -> None:
    """No space is left for the nth file whose name begins so; half of it is written."""
    from relabel.distill.training import checkpoints

    left = [nth]

    def is_full(path: Path) -> bool:
        left[0] -= path.name.startswith(name)
        return left[0] == 0 and path.name.startswith(name)

    save_file, write_bytes = checkpoints.save_file, Path.write_bytes

    def saved(tensors: Any, path: Path) -> None:
        save_file(tensors, path)
        if is_full(path):
            os.truncate(path, path.stat().st_size // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def written(path: Path, data: bytes) -> int:
        if is_full(path):
            write_bytes(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_bytes(path, data)

    checkpoints.save_file = saved
    Path.write_bytes = written  # type: ignore[method-assign, assignment]


def lose_number(what: str, nth: int) -> None:
    """The nth batch's `loss`, or its `gradient` alone, is no number; or the `probabilities` of the nth answers."""
    import torch
    from trl import GRPOTrainer

    left = [nth]
    compute, write = GRPOTrainer._compute_loss, GRPOTrainer._generate_single_turn

    def computed(self: Any, model: Any, inputs: Any) -> Any:
        loss = compute(self, model, inputs)
        left[0] -= what in ("loss", "gradient")
        if left[0] == 0 and what == "gradient":
            loss.register_hook(lambda slope: slope * torch.nan)
        return loss * torch.nan if left[0] == 0 and what == "loss" else loss

    def written(self: Any, *arguments: Any) -> Any:
        left[0] -= what == "probabilities"
        if left[0] == 0 and what == "probabilities":
            with torch.no_grad():
                self.model.lm_head.weight.mul_(torch.nan)
        return write(self, *arguments)

    GRPOTrainer._compute_loss, GRPOTrainer._generate_single_turn = computed, written


def end_memory(most_learned: int, most_written: int) -> None:
    """Memory ends where a batch, or what is written together, has more rollouts."""
    import torch
    from trl import GRPOTrainer

    compute, write = GRPOTrainer._compute_loss, GRPOTrainer._generate_single_turn

    def check(num_rollouts: int, most: int) -> None:
        if num_rollouts > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def computed(self: Any, model: Any, inputs: Any) -> Any:
        check(len(inputs["completion_ids"]), most_learned)
        return compute(self, model, inputs)

    def written(self: Any, prompts: Any, *arguments: Any) -> Any:
        check(len(prompts), most_written)
        return write(self, prompts, *arguments)

    GRPOTrainer._compute_loss, GRPOTrainer._generate_single_turn = computed, written


def note_syncs(log: str) -> None:
    """Every file that is put on the disk, and every name that a file gets, is a line of a file."""
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def note(what: str, path: Any) -> None:
        with Path(log).open("a") as file:
            file.write(f"{what} {Path(path).absolute()}\n")

    def synced(descriptor: int) -> None:
        note("sync", Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def renamed(path: Path, target: Any) -> Path:
        note("name", target)
        return rename(path, target)

    def replaced(path: Path, target: Any) -> Path:
        note("name", target)
        return replace(path, target)

    os.fsync = synced  # type: ignore[assignment]
    Path.rename, Path.replace = renamed, replaced  # type: ignore[method-assign, assignment]
