"""Adapters in the engine: slots for several versions, filled from memory, applied without being merged."""
