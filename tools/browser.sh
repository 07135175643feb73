#!/usr/bin/env bash
# Debian's Chromium, for the tests that look at pages; without it they are skipped. For machines that are made for tests:
# it installs a package for the whole system.
set -euo pipefail

if command -v chromium >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "browser: no chromium on the PATH, and nobody to install it: the tests that need it are skipped" >&2
    exit 0
fi
echo "browser: installing Debian's chromium"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { timeout 300 apt-get update && timeout 600 apt-get install --yes --no-install-recommends chromium; } >"$log" 2>&1; then
    tail -20 "$log" >&2
    echo "browser: chromium could not be installed: the tests that need it are skipped" >&2
fi
