"""Jobs of Kubernetes: manifests."""
