"""The MLflow model registry: each policy is one version (`versions`), the gate decides which serves (`champion`)."""
