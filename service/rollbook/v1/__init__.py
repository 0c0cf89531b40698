"""Generated from proto/rollbook/v1 by proto/generate.sh; never edited by hand, imported by rollbook.rpc only."""
