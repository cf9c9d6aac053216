"""What the commands raise besides the engine's own errors."""

from octavo.core.errors import OctavoError

__all__ = ["Refused"]


class Refused(OctavoError):
    """What was asked for cannot be honoured; the message says why and what would be."""
