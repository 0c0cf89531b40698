#!/bin/sh
# Generate service/rollbook/v1 from proto/rollbook/v1. Usage: proto/generate.sh [OUTPUT_FOLDER] (default: service).
# Set PYTHON to an interpreter that has the pinned grpcio-tools (extra "dev").
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/service}
mkdir -p "$out"
exec "${PYTHON:-python}" -m grpc_tools.protoc --proto_path="$root/proto" \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  rollbook/v1/ledger.proto rollbook/v1/ledger_service.proto
