"""The ledger's verbs over gRPC: translation only. Imports core and observe, never the ledger."""
