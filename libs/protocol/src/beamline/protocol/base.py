"""What all messages are: frozen, keyword-only, closed to unknown fields."""

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the structs inside messages."""
