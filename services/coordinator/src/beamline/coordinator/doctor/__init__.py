"""`beamline doctor mismatch`: why the engine's and the trainer's log-probabilities differ."""
