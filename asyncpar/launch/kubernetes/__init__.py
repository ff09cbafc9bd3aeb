"""Manifests of Kubernetes jobs."""
