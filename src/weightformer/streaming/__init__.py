"""Exact inference on images larger than memory, and one image over several processes."""

from weightformer.streaming.distributed import RowParallel
from weightformer.streaming.errors import RegionError, WorkspaceError
from weightformer.streaming.run import stream
from weightformer.streaming.sources import Source, open_source

__all__ = ["RegionError", "RowParallel", "Source", "WorkspaceError", "open_source", "stream"]
