#!/bin/sh
# Makes the environment. Says what it does; fails with a sentence that says what to do.
set -eu
fail() { printf 'setup: %s\n' "$1" >&2; exit 1; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  || fail "Tandem needs Python 3.11 or newer as '$PYTHON'; install it, or run make PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null \
  || fail "'$PYTHON' has no venv module; on Debian: apt-get install python3-venv"

if [ ! -x "$VENV/bin/python" ]; then
  echo "==> making the environment in $VENV"
  "$PYTHON" -m venv "$VENV" || fail "the environment could not be made; remove $VENV and try again"
fi
echo "==> installing packages (torch is the large one; pip shows each)"
"$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar on -e '.[dev]' 2>&1 \
  | grep --line-buffered -E '^(Collecting|Downloading|Installing|Successfully|ERROR|error|  error)' \
  | sed -u -E 's/^Collecting ([^ ]+).*/  needs \1/; s/^Downloading ([^ ]+)(.*)/  fetches \1\2/' \
  || true
"$VENV/bin/python" -c 'import grpc, torch, nixl, redis, tandem, tandem_cli' 2>/dev/null \
  || fail "packages are missing; run '$VENV/bin/python -m pip install -e .[dev]' to see why (a package index must be reachable)"
echo "==> the environment is ready"
