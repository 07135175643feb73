"""The doctor's reading of kept samples in the trainer: log-probabilities in every way that could explain a gap."""
