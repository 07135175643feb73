"""The wire contract of Beamline: messages, subjects, codec, blob schema and run configuration. No I/O."""
