"""Exact inference on images larger than memory, and one image over several processes."""

from weightformer.streaming.distributed import RowParallel
from weightformer.streaming.errors import PeerError, RegionError, WorkspaceError
from weightformer.streaming.job import Streamed, stream_files
from weightformer.streaming.run import stream
from weightformer.streaming.sources import Source, find_sources, open_source

__all__ = [
    "PeerError",
    "RegionError",
    "RowParallel",
    "Source",
    "Streamed",
    "WorkspaceError",
    "find_sources",
    "open_source",
    "stream",
    "stream_files",
]
