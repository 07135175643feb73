"""Weights from trainer to rollout: manifests and transports."""
