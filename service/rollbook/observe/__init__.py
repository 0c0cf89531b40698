"""How we look at the service: metrics, logs, failpoints. Imports core only."""
