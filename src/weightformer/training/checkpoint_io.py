"""Training checkpoints that a crash cannot damage."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from weightformer.models.checkpoint import read_state_dict

__all__ = ["AtomicCheckpointIO"]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary file in the same folder, flushes it to the disk, then renames it into place.

    A reader therefore sees the old checkpoint or the new one, never a part. Reading never runs code from the file.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write atomically; on failure (a full disk, say) the previous file stays and the temporary one goes."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read on the CPU, as data alone, whatever was asked for.

        Raises:
            ValueError: the file is damaged or asks for code to be run.
        """
        return dict(read_state_dict(path))
