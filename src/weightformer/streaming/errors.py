"""What can go wrong while an image is streamed; the errors name the file and the place in it."""

from __future__ import annotations

__all__ = ["PeerError", "RegionError", "WorkspaceError"]


class RegionError(OSError):
    """A region of the image could not be read; the message names the image, the rows and the columns."""


class WorkspaceError(OSError):
    """Tokens or results could not be written or read back; the message names the file and its rows."""


class PeerError(RuntimeError):
    """All is well here, but another of the processes that share the image failed."""
