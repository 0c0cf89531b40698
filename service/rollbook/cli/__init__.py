"""The `rollbook` command: one module per command group; each command is a thin call into the layers below."""
