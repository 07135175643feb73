"""What every service stands on: the bus, the blob store, recipe loading, the service life cycle, telemetry."""
