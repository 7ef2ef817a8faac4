#!/bin/sh
# usage: update.sh ENGINE TRAINER: starts the engine, updates it once when it is ready, and ends it.
set -eu
folder=$(mktemp -d)
mkfifo "$folder/out"
"$1" consumer >"$folder/out" &
engine=$!
trap 'kill "$engine" 2>/dev/null || true; rm -rf "$folder"' EXIT
exec 3<"$folder/out"
read -r ready <&3
echo "$ready"
"$2" consumer
kill -TERM "$engine"
cat <&3
wait "$engine"
trap 'rm -rf "$folder"' EXIT
