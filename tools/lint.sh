#!/usr/bin/env bash
# Style, types and import rules. Runs all of them, then fails if any of them failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

failed=()
check() {
    local name=$1
    shift
    printf '== %s\n' "$name"
    "$@" || failed+=("$name")
}

sources=$(printf '%s:' libs/*/src services/*/src)
check 'ruff check' .venv/bin/ruff check .
check 'ruff format' .venv/bin/ruff format --check --quiet .
check 'import rules' env PYTHONPATH="${sources%:}" .venv/bin/lint-imports tools/importlinter.toml
# Strict for protocol, runtime, algorithms and the ledger; each service against the packages of its own environment.
for part in strict coordinator reward rollout trainer; do
    check "types: $part" .venv/bin/basedpyright --level error --project "tools/types/$part.json"
done

if [ ${#failed[@]} -gt 0 ]; then
    printf 'lint failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
