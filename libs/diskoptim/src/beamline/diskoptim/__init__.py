"""AdamW whose float32 main weights and moments live on a local disk. Imports nothing else of Beamline."""
